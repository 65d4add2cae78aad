"""Every family: logits over ragged rows and trees equal those of the module, token by token."""

from __future__ import annotations

import pytest
import torch

from families import (
    CASES,
    FAMILIES,
    WINDOW,
    assert_near,
    oracle_of,
    plain_logits,
    plain_model,
    random_tokens,
    root_path,
    row_of,
    runtime_of,
    trees,
    write_checkpoint,
)
from secondguess.core import Draft

PROMPT = random_tokens(3 * WINDOW, seed=1)
NODES = random_tokens(7, seed=2)
PARENTS = [-1, 0, 0, -1, 2, 2, 3]


class Family:
    """A checkpoint read twice: by our runtime, and plainly."""

    def __init__(self, name, runtime, directory):
        path = write_checkpoint(FAMILIES[name](), directory)
        self.path = path
        self.kind = runtime
        self.runtime = runtime_of(path, runtime=runtime)
        self.plain = oracle_of(path, runtime)

    def expected(self, tokens, num_last):
        return plain_logits(self.plain, tokens)[-num_last:]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def family(request, tmp_path_factory):
    return Family(*request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture
def runtime(family):
    yield family.runtime
    family.runtime.free()


def begun(runtime, tokens):
    row = row_of(tokens)
    runtime.begin([row])
    return row


def chain_of(*tokens):
    return Draft.chains([list(tokens)])


def test_the_logits_of_a_chain_equal_the_models(family, runtime):
    row = begun(runtime, PROMPT)
    logits = runtime.score([row], chain_of(*NODES)).logits[0]
    assert_near(logits, family.expected(PROMPT + NODES, len(NODES) + 1))


def test_the_logits_of_every_tree_path_equal_its_chain(family, runtime):
    row = begun(runtime, PROMPT)
    logits = runtime.score([row], trees((NODES, PARENTS))).logits[0]
    assert_near(logits[0], family.expected(PROMPT, 1)[0])
    for node in range(len(NODES)):
        path = [NODES[index] for index in root_path(PARENTS, node)]
        assert_near(logits[node + 1], family.expected(PROMPT + path, 1)[0])


@pytest.mark.parametrize("path", [[], [0, 2, 5], [3, 6], [0]], ids=str)
def test_keeping_a_path_equals_a_new_prefill(family, runtime, path):
    row = begun(runtime, PROMPT)
    runtime.score([row], trees((NODES, PARENTS)))
    runtime.keep([row], [path])
    row.tokens += [NODES[node] for node in path] + [5]
    following = [7, 8]
    logits = runtime.score([row], chain_of(*following)).logits[0]
    assert_near(logits, family.expected(row.tokens + following, 3))


@pytest.mark.parametrize("length", [WINDOW + 3, 2])
def test_rewound_rows_score_other_tokens(family, runtime, length):
    row = begun(runtime, PROMPT)
    runtime.score([row], chain_of(*NODES))
    runtime.rewind([row], [length])
    row.tokens[length:] = random_tokens(4, seed=3)
    logits = runtime.score([row], chain_of(9)).logits[0]
    assert_near(logits, family.expected([*row.tokens, 9], 2))


def test_ragged_rows_do_not_affect_each_other(family, runtime):
    prompts = [PROMPT, PROMPT[5:7], [11], PROMPT[: WINDOW + 4]]
    drafts = [(NODES, PARENTS), (NODES[:3], [-1, -1, 0]), ([], []), (NODES[2:5], [-1, 0, 1])]
    rows = [row_of(prompt) for prompt in prompts]
    runtime.begin(rows)
    logits = runtime.score(rows, trees(*drafts)).logits
    assert torch.isfinite(logits).all()
    for index, (prompt, (tokens, parents)) in enumerate(zip(prompts, drafts, strict=True)):
        assert_near(logits[index, 0], family.expected(prompt, 1)[0])
        for node in range(len(tokens)):
            path = [tokens[step] for step in root_path(parents, node)]
            assert_near(logits[index, node + 1], family.expected(prompt + path, 1)[0])


def test_the_logits_of_ragged_chains_equal_the_models(family, runtime):
    prompts = [PROMPT, PROMPT[4:7], PROMPT[: WINDOW + 4]]
    rows = [row_of(prompt) for prompt in prompts]
    runtime.begin(rows)
    drafts = [NODES[:3], NODES[3:4], []]
    logits = runtime.score(rows, Draft.chains(drafts)).logits
    for index, (prompt, nodes) in enumerate(zip(prompts, drafts, strict=True)):
        assert_near(logits[index, : len(nodes) + 1], family.expected(prompt + nodes, len(nodes) + 1))
    runtime.keep(rows, [[0, 1], [], []])
    for row, accepted in zip(rows, [NODES[:2], [], []], strict=True):
        row.tokens += [*accepted, 6]
    logits = runtime.score(rows, Draft.empty(3)).logits
    for index, row in enumerate(rows):
        assert_near(logits[index], family.expected(row.tokens, 1))


def test_prefill_in_chunks_equals_one_pass(family, runtime):
    row = row_of(PROMPT)
    runtime.prefill_chunk = 5
    try:
        runtime.begin([row])
    finally:
        runtime.prefill_chunk = 512
    assert_near(
        runtime.score([row], chain_of(*NODES)).logits[0], family.expected(PROMPT + NODES, len(NODES) + 1)
    )


def test_rows_catch_up_on_different_numbers_of_tokens(family, runtime):
    """A draft model's cache may lag by a few tokens, another number in each row; drafts may hang below."""
    rows = [row_of(PROMPT[:6]), row_of(PROMPT[:9])]
    runtime.begin(rows)
    rows[0].tokens += [4, 5, 6]
    rows[1].tokens += [7]
    drafts = [(NODES[:3], [-1, 0, 0]), (NODES[3:5], [-1, -1])]
    logits = runtime.score(rows, trees(*drafts)).logits
    for index, (tokens, parents) in enumerate(drafts):
        assert_near(logits[index, 0], family.expected(rows[index].tokens, 1)[0])
        for node in range(len(tokens)):
            path = [tokens[step] for step in root_path(parents, node)]
            assert_near(logits[index, node + 1], family.expected(rows[index].tokens + path, 1)[0])


def test_the_logits_at_the_end_of_the_context_equal_the_models(family, runtime):
    """Padding of a short row's neighbour must not look up positions beyond the context."""
    full = random_tokens(runtime.context_length, seed=4)
    rows = [row_of(full), row_of(PROMPT)]
    runtime.begin(rows)
    logits = runtime.score(rows, Draft.chains([[], NODES])).logits
    assert_near(logits[0, 0], family.expected(full, 1)[0])
    assert_near(logits[1], family.expected(PROMPT + NODES, len(NODES) + 1))


def test_hidden_states_equal_the_models(family, tmp_path):
    runtime = runtime_of(family.path, runtime=family.kind)
    runtime.request_hidden_states((0, 1, -1))
    rows = [row_of(PROMPT), row_of(PROMPT[:4])]
    runtime.begin(rows)
    rows[1].tokens.append(3)
    hidden = runtime.score(rows, Draft.chains([NODES[:2], NODES[:2]])).hidden
    assert set(hidden) == {0, 1, -1}
    for index, row in enumerate(rows):
        with torch.no_grad():
            states = family.plain(
                torch.tensor([row.tokens + NODES[:2]]), output_hidden_states=True
            ).hidden_states
        for layer in (0, 1, -1):
            assert_near(hidden[layer][index], states[layer][0, -3:])


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in ("mistral", "gemma3") for kind in ("transformers", "fused")]
    + [("llama4", "transformers")],
)
def test_prompts_of_about_a_window(name, kind, tmp_path):
    path = write_checkpoint(FAMILIES[name](), tmp_path)
    runtime, plain = runtime_of(path, kind), plain_model(path)
    for length in range(WINDOW - 1, 2 * WINDOW + 2):
        row = row_of(random_tokens(length, seed=length))
        runtime.begin([row])
        assert_near(runtime.score([row], Draft.empty(1)).logits[0], plain_logits(plain, row.tokens)[-1:])
        runtime.release(row)
