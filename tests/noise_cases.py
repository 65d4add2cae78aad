"""Several rounds of drafting and verification with keyed noise, over a table of distributions, without a runtime."""

from __future__ import annotations

from functools import cache
from itertools import product

import torch

from secondguess.core import Draft, Row
from secondguess.proof.certificate import g_test
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.tensors import padded_tensor
from secondguess.verifiers import make_verifier

# First-order distributions over three tokens: row t is the distribution after token t.
TARGET = torch.tensor([[0.8, 0.15, 0.05], [0.2, 0.3, 0.5], [0.1, 0.6, 0.3]], dtype=torch.float64)
# Mistakes about later rounds show with drafts that often fail, mistakes about corrections where these have a choice.
CRUDE = torch.tensor([[0.3, 0.3, 0.4], [0.6, 0.3, 0.1], [0.4, 0.2, 0.4]], dtype=torch.float64)
ONE_SIDED = torch.tensor([[0.3, 0.1, 0.6], [0.6, 0.1, 0.3], [0.05, 0.9, 0.05]], dtype=torch.float64)
NUM_TEXTS, NUM_TOKENS = 20_000, 5
CHAIN = (-1, 0, 1)
TREE = (-1, -1, 0, 0, 1)
"""Parents of the nodes: a chain, and two children of pending with two children and one."""


def chained_texts(
    verifier: str,
    num_texts: int,
    seed: int = 0,
    coupled: bool = False,
    drafter: torch.Tensor = CRUDE,
    parents: tuple[int, ...] = CHAIN,
    without_replacement: bool = True,
) -> torch.Tensor:
    """Return texts `[text, NUM_TOKENS]` of as many rounds as needed; every text is a stream of one seed."""
    rule = make_verifier(verifier)
    keys = KeyedNoise.from_rows(streams(num_texts, seed, coupled))
    # Each round writes after the committed tokens; those beyond NUM_TOKENS are not used.
    texts = torch.zeros(num_texts, 1 + NUM_TOKENS + len(parents), dtype=torch.long)
    ends = torch.ones(num_texts, dtype=torch.long)
    while len(left := (ends <= NUM_TOKENS).nonzero()[:, 0]):
        chosen, starts = keys.select(left), ends[left]
        noise = KeyedNoise(chosen.keys, starts.tolist(), chosen.coupled, chosen.greedy)
        pending = texts[left, starts - 1]
        draft = drawn_tree(drafter, pending, noise, parents, without_replacement)
        queried = torch.cat([pending[:, None], draft.tokens], 1)
        verdict = rule.verify(draft, TARGET[queried], noise)
        lengths = torch.tensor(verdict.lengths)
        paths = padded_tensor(verdict.paths, 0, lengths.device)
        for place in range(paths.shape[1] + 1):
            tokens = torch.tensor(verdict.next_tokens)
            if place < paths.shape[1]:
                drafted = draft.tokens.gather(1, paths[:, place, None])[:, 0]
                tokens = torch.where(place < lengths, drafted, tokens)
            writes = place <= lengths
            texts[left[writes], starts[writes] + place] = tokens[writes]
        ends[left] = starts + lengths + 1
    return texts[:, 1 : NUM_TOKENS + 1]


@cache
def streams(num_rows: int, seed: int, coupled: bool) -> list[Row]:
    """Return rows with one seed, each with a sample index of its own."""
    params = SamplingParams(temperature=1.0)
    return [Row([0], params, seed=seed, sample_index=sample, coupled=coupled) for sample in range(num_rows)]


def drawn_tree(
    drafter: torch.Tensor,
    pending: torch.Tensor,
    noise: KeyedNoise,
    parents: tuple[int, ...],
    without_replacement: bool,
) -> Draft:
    """Draw a tree of this shape after every row's pending token `[row]`."""
    tokens, depths = [pending], [-1]
    dists: list[torch.Tensor] = []
    for node, parent in enumerate(parents):
        depths.append(depths[parent + 1] + 1)
        dists.append(drafter[tokens[parent + 1]])
        offer = dists[-1].clone()
        if without_replacement:
            for earlier in (other for other in range(node) if parents[other] == parent):
                offer.scatter_(1, tokens[earlier + 1][:, None], 0.0)
        tokens.append(noise.draft(offer, depths[-1], node))
    form = torch.tensor(parents).expand(len(pending), len(parents))
    lengths = torch.full((len(pending),), len(parents))
    return Draft(torch.stack(tokens[1:], 1), form, lengths, torch.stack(dists, 1), without_replacement)


def chained_text_p_value(
    verifier: str,
    coupled: bool = False,
    drafter: torch.Tensor = CRUDE,
    parents: tuple[int, ...] = CHAIN,
    without_replacement: bool = True,
) -> float:
    """Return the p-value of the G-test of `NUM_TEXTS` texts against the table's distribution."""
    weights = 3 ** torch.arange(NUM_TOKENS - 1, -1, -1)
    texts = chained_texts(verifier, NUM_TEXTS, 0, coupled, drafter, parents, without_replacement)
    counts = torch.bincount(texts @ weights, minlength=3**NUM_TOKENS).tolist()
    expected = []
    for text in product(range(3), repeat=NUM_TOKENS):
        chance = float(NUM_TEXTS)
        for before, token in zip((0, *text), text, strict=False):
            chance *= float(TARGET[before, token])
        expected.append(chance)
    return g_test(counts, expected)
