"""Closures, depths and masks against a walk along the parents."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from families import root_path
from secondguess.core import Draft
from secondguess.runtime import tree
from secondguess.tensors import ancestor_closure


@st.composite
def forests(draw):
    """Parents of 1 to 12 nodes; a parent stands before its children."""
    count = draw(st.integers(1, 12))
    return [draw(st.integers(-1, node - 1)) for node in range(count)]


@given(forests())
def test_the_closure_is_the_set_of_root_paths(parents):
    closure = ancestor_closure(torch.tensor([parents]))
    for node in range(len(parents)):
        assert closure[0, node].nonzero().flatten().tolist() == root_path(parents, node)
        assert tree.depths(closure)[0, node] == len(root_path(parents, node)) - 1


@given(forests(), st.integers(1, 4))
def test_uncached_tokens_extend_every_path(parents, num_uncached):
    (query_parents,) = tree.attach_drafts([parents], [len(parents)], [num_uncached])
    for node in range(len(parents)):
        path = [*range(num_uncached), *(num_uncached + step for step in root_path(parents, node))]
        assert root_path(query_parents, num_uncached + node) == path


@given(forests())
def test_is_chain_is_true_only_for_successive_nodes(parents):
    longest = root_path(parents, len(parents) - 1)
    nodes = torch.tensor([parents])
    draft = Draft(torch.zeros_like(nodes), nodes, torch.tensor([len(parents)]))
    assert draft.is_chain == (longest == list(range(len(parents))))


@given(forests(), st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_a_tree_mask_shows_the_cached_tokens_and_the_ancestors(parents, starts):
    closure = ancestor_closure(torch.tensor([parents] * len(starts)))
    num_keys = max(starts) + len(parents) + 1
    mask = tree.tree_mask(torch.tensor(starts), closure, num_keys)
    assert mask.shape == (len(starts), 1, len(parents), num_keys)
    for row, start in enumerate(starts):
        for node in range(len(parents)):
            seen = [*range(start), *(start + step for step in root_path(parents, node))]
            assert mask[row, 0, node].nonzero().flatten().tolist() == seen


@given(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_a_chain_mask_is_the_tree_mask_of_a_chain(length, starts):
    closure = ancestor_closure(torch.arange(-1, length - 1).expand(len(starts), -1))
    num_keys = max(starts) + length
    tree_mask = tree.tree_mask(torch.tensor(starts), closure, num_keys)
    assert torch.equal(tree.chain_mask(torch.tensor(starts), length, num_keys), tree_mask)


def test_cached_chain_masks_equal_chain_masks():
    stairs = tree.ChainMasks(torch.device("cpu"))
    for start, num_queries, num_keys in [
        (0, 1, 32),
        (7, 5, 32),
        (31, 1, 32),
        (60, 4, 64),
        (300, 8, 320),
        (5, 40, 64),
    ]:
        expected = tree.chain_mask(torch.tensor([start]), num_queries, num_keys)
        assert torch.equal(stairs.mask(start, num_queries, num_keys), expected)
