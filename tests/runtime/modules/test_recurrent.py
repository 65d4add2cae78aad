"""Modules with recurrent states: snapshots, replayed tokens, reuse and the check at loading.

Their logits are compared in `test_families.py`.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import transformers

from families import (
    LLAMA_LIKE,
    RECURRENT,
    VOCAB_SIZE,
    assert_near,
    needs_kernels,
    plain_logits,
    plain_model,
    random_tokens,
    row_of,
    runtime_of,
    trees,
    write_checkpoint,
)
from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.modules import scans
from secondguess.runtime.modules.recurrent import MAX_REPLAYED, RecurrentForward
from secondguess.runtime.modules.recurrent_cache import MAX_REWIND, RecurrentCache, Snapshot
from secondguess.runtime.modules.scans import RecordedScan, recording
from secondguess.runtime.modules.transformers import TransformersRuntime

PROMPT = random_tokens(9, seed=1)
ROUNDS = [(4, 0), (0, 0), (3, 3), (4, 1), (4, 1), (4, 1), (4, 0), (2, 1), (0, 0)]
"""Numbers of drafted and of accepted tokens of successive rounds."""
MAMBA = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 2,
    "time_step_rank": 4,
    "initializer_range": 0.15,
    "max_position_embeddings": 96,
    "bos_token_id": None,
    "eos_token_id": 0,
}


class Model:
    """A checkpoint read twice: by our runtime, and plainly."""

    def __init__(self, config, directory):
        path = write_checkpoint(config, directory)
        self.runtime = runtime_of(path)
        self.plain = plain_model(path)

    def expected(self, tokens, num_last):
        return plain_logits(self.plain, tokens)[-num_last:]


@pytest.fixture(scope="module", params=["qwen3-next", "lfm2", "falcon-h1", "mamba"])
def model(request, tmp_path_factory):
    config = transformers.MambaConfig(**MAMBA) if request.param == "mamba" else RECURRENT[request.param]()
    return Model(config, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    return Model(RECURRENT["qwen3-next"](), tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(autouse=True)
def empty(request):
    yield
    for name in {"model", "hybrid"} & set(request.fixturenames):
        request.getfixturevalue(name).runtime.free()


@pytest.fixture(params=["recorded", "replayed", "serial"])
def recorded(request, model, monkeypatch):
    """Ways on after a rejection: states known after each token, or accepted tokens run again.

    In serial mode, that of Mamba-1, each token has a pass of its own.
    """
    if request.param == "serial":
        monkeypatch.setattr(model.runtime.forward, "single_steps", True)
    if request.param == "replayed":
        if model.runtime.forward.single_steps:
            pytest.skip("single steps always have the state after each token")
        monkeypatch.setattr(model.runtime.forward, "records_states", False)
    return request.param != "replayed"


def play(runtime, rows, rounds):
    """Run rounds whose drafted and sampled tokens depend on the text only, and return each round's logits."""
    logits = []
    for drafted, accepted in rounds:
        drafts = [random_tokens(drafted, seed=len(row.tokens)) for row in rows]
        logits.append(runtime.score(rows, Draft.chains(drafts)).logits)
        runtime.keep(rows, [list(range(accepted))] * len(rows))
        for row, draft in zip(rows, drafts, strict=True):
            row.tokens += [*draft[:accepted], 5 + len(row.tokens)]
    return logits


def states_of(runtime, row):
    state = runtime.slots[row]
    return runtime.cache.states_at(state.slot, state.length)


def test_states_after_rounds_equal_those_after_single_tokens(model, recorded, monkeypatch):
    runtime, rows, widths = model.runtime, [row_of(PROMPT), row_of(PROMPT[:3])], []
    runtime.begin(rows)
    call = runtime.forward.call
    monkeypatch.setattr(
        runtime.forward, "call", lambda *inputs: widths.append(inputs[0].shape[1]) or call(*inputs)
    )
    logits = play(runtime, rows, ROUNDS)
    if not runtime.forward.single_steps:
        assert max(widths) <= (1 + 4 if recorded else MAX_REPLAYED + 1 + 4)
        assert (len(widths) == len(rows) * len(ROUNDS)) == recorded
    # In serial mode the bits are equal after equal prompts, which are computed at once.
    starts = (len(PROMPT), 3) if runtime.forward.single_steps else (2, 2)
    single = [row_of(row.tokens[:start]) for row, start in zip(rows, starts, strict=True)]
    runtime.begin(single)
    for one, row in zip(single, rows, strict=True):
        while len(one.tokens) < len(row.tokens):
            runtime.score([one], Draft.empty(1))
            runtime.keep([one], [[]])
            one.tokens.append(row.tokens[len(one.tokens)])
        expected = states_of(runtime, one)
        found = states_of(runtime, row)
        assert found
        assert found.keys() == expected.keys()
        for key, state in found.items():
            assert_near(state, expected[key])
            assert not runtime.forward.single_steps or torch.equal(state, expected[key])
    assert_near(logits[-1][0], model.expected(rows[0].tokens[:-1], 1))
    assert_near(
        logits[-2][1, :3], model.expected(rows[1].tokens[:-3] + random_tokens(2, len(rows[1].tokens) - 3), 3)
    )


def test_rows_are_right_after_a_round_that_was_interrupted(model, recorded, monkeypatch):
    runtime, rows = model.runtime, [row_of(PROMPT), row_of(PROMPT[:4])]
    runtime.begin(rows)
    play(runtime, rows, ROUNDS[:2])
    # After a pass in which layers have written states, and between the passes of two rows.
    head, calls = runtime.model.get_output_embeddings(), []

    def fail(*_):
        calls.append(0)
        if len(calls) == 2:
            raise KeyboardInterrupt

    hook = head.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        play(runtime, rows, [(4, 2)])
    hook.remove()
    logits = runtime.score(rows, Draft.chains([[7, 8], [7, 8]])).logits
    # cancelled after the pass: never kept
    other = runtime.score(rows, Draft.chains([[9], [9]])).logits
    for index, row in enumerate(rows):
        assert_near(logits[index], model.expected([*row.tokens, 7, 8], 3))
        assert_near(other[index], model.expected([*row.tokens, 9], 2))


@pytest.mark.parametrize("shared", ["nothing", "part", "all"])
def test_a_slot_is_reused_from_its_snapshot_or_from_nothing(model, shared):
    runtime, first = model.runtime, row_of(PROMPT)
    runtime.begin([first])
    play(runtime, [first], [(3, 1), (0, 0)])
    whole = len(first.tokens) - 1
    assert runtime.slots[first].length == whole
    runtime.release(first)
    text = {"nothing": PROMPT[::-1], "part": [*PROMPT[:-2], 4, 4, 4], "all": [*first.tokens, 4, 6]}[shared]
    row = row_of(text)
    assert runtime.admit([row]) == [whole if shared == "all" else 0]
    runtime.prefill([row])
    assert_near(runtime.score([row], Draft.chains([[7]])).logits[0], model.expected([*text, 7], 2))


def test_rows_with_one_prompt_share_its_states(model):
    runtime, rows = model.runtime, [row_of(PROMPT), row_of(PROMPT)]
    before = runtime.num_prefilled
    runtime.admit(rows)
    runtime.prefill(rows)
    late = row_of(PROMPT)
    assert runtime.admit([late]) == [len(PROMPT) - 1] == [runtime.num_prefilled - before]
    play(runtime, [rows[0]], [(2, 1)])
    logits = runtime.score([rows[1], late], Draft.chains([[7], [8, 9]])).logits
    assert_near(logits[0, :2], model.expected([*PROMPT, 7], 2))
    assert_near(logits[1], model.expected([*PROMPT, 8, 9], 3))


def test_a_draft_model_is_rewound_without_starting_over(hybrid):
    """Its tokens are scored as text and rewound, as `ModelDrafter` does."""
    runtime, row = hybrid.runtime, row_of(PROMPT)
    runtime.begin([row])
    for rejected in (0, 3, 5):
        committed = len(row.tokens)
        for token in random_tokens(6, seed=rejected):
            runtime.score([row], Draft.empty(1))
            row.tokens.append(token)
        runtime.rewind([row], [committed + 5 - rejected])
        del row.tokens[committed + 6 - rejected :]
        assert len(row.tokens) - runtime.slots[row].length <= MAX_REPLAYED
        assert_near(runtime.score([row], Draft.chains([[7]])).logits[0], hybrid.expected([*row.tokens, 7], 2))
        row.tokens.append(9)


def test_snapshots_stay_close_and_few():
    cache = RecurrentCache(torch.device("cpu"))
    for length in range(1, 200):
        cache.add(0, length - 1, Snapshot(length, dict))
        lengths = [each.length for each in cache.snapshots[0]]
        assert lengths[-1] == length
        assert len(lengths) <= 6
        assert length - lengths[0] <= MAX_REWIND
        distances = [length - each for each in lengths]
        assert all(far <= 4 * near + 3 for far, near in pairwise(distances))
    assert cache.restore(0, 150) == 0


def test_branches_of_a_tree_run_from_the_snapshot(hybrid, monkeypatch):
    runtime, row = hybrid.runtime, row_of(PROMPT)
    monkeypatch.setattr(runtime.forward, "records_states", False)
    runtime.begin([row])
    nodes = [7, 8, 9, 10]
    runtime.score([row], trees((nodes, [-1, 0, 0, -1])))
    runtime.keep([row], [[0, 2]])
    row.tokens += [7, 9, 11]
    assert runtime.slots[row].length == len(PROMPT) + 2  # the path ends at a leaf, so its states are known
    assert_near(runtime.score([row], Draft.empty(1)).logits[0], hybrid.expected(row.tokens, 1))


def test_a_module_that_loses_its_states_runs_single_tokens(tmp_path):
    path = write_checkpoint(transformers.MambaConfig(**MAMBA), tmp_path)
    runtime = TransformersRuntime(plain_model(path))
    assert type(runtime.forward) is RecurrentForward
    assert runtime.forward.single_steps
    assert runtime.description == "single tokens"


def test_a_prompt_for_single_tokens_runs_in_one_pass_beyond_the_limit_of_the_call(tmp_path, monkeypatch):
    path = write_checkpoint(transformers.MambaConfig(**MAMBA), tmp_path)
    runtime, row, other = TransformersRuntime(plain_model(path)), row_of(PROMPT * 4), row_of([7, *PROMPT])
    widths, call = [], runtime.forward.call

    def counted(tokens, *others, **options):
        widths.append(tokens.shape[1])
        return call(tokens, *others, **options)

    monkeypatch.setattr(runtime.forward, "call", counted)
    runtime.admit([row, other])
    runtime.prefill([row, other], max_tokens=8)
    assert widths == [len(row.tokens) - 1], "and the other row waits"
    logits = runtime.score([row], Draft.empty(1)).logits[0]
    assert_near(logits, plain_logits(plain_model(path), row.tokens)[-1:])


def test_the_states_of_a_pass_are_also_those_of_the_layers():
    """Modules read them there before Transformers 5.21."""
    state = torch.ones(1, 2, 3)
    cache = RecurrentCache(torch.device("cpu"))
    cache.begin({}, 2)
    assert not cache.has_previous_state()
    cache.begin({("conv", 4, 0): state, ("recurrent", 4, 1): 2 * state}, 2)
    assert cache.has_previous_state()
    assert [cache.has_previous_state(layer, 0) for layer in (3, 4)] == [False, True]
    assert torch.equal(cache.layers[4].conv_states[0], state)
    assert torch.equal(cache.layers[4].recurrent_states[1], 2 * state)
    assert not cache.layers[4].record_past
    assert [*cache.layers] == []


def test_a_module_with_states_elsewhere_is_refused():
    config = transformers.RecurrentGemmaConfig(
        **LLAMA_LIKE | {"num_hidden_layers": 3}, lru_width=32, head_dim=8, attention_window_size=8
    )
    with torch.random.fork_rng():
        model = transformers.RecurrentGemmaForCausalLM(config)
    with pytest.raises(UnsupportedModelError, match=r"RecurrentGemma.*states are not in its cache"):
        TransformersRuntime(model)


@pytest.mark.parametrize("by_kernels", [False, pytest.param(True, marks=needs_kernels)])
@pytest.mark.parametrize("family", ["qwen3-next", "mamba2"])
def test_a_recorded_scan_agrees_with_the_chunked_one(family, by_kernels, monkeypatch):
    """On the inputs that a layer gives it in a pass over four tokens."""
    if not by_kernels:
        monkeypatch.setattr(scans, "can_run", lambda _: False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(RECURRENT[family]()).eval()
    runtime, calls = TransformersRuntime(model), []
    repeat = RecordedScan.__call__

    def spy(self, *inputs, **options):
        calls.append((self, inputs, options))
        return repeat(self, *inputs, **options)

    monkeypatch.setattr(RecordedScan, "__call__", spy)
    row = row_of(PROMPT)
    runtime.begin([row])
    runtime.score([row], Draft.chains([[7, 8, 9]]))
    scan, inputs, options = calls[-1]
    monkeypatch.setattr(RecordedScan, "__call__", repeat)
    states = []
    with torch.inference_mode():
        with recording(states.extend):
            outputs, last = scan(*inputs, **options)
        chunked, chunked_last = scan(*inputs, **options)
    assert len(states) == 3
    assert_near(outputs, chunked)
    assert_near(last, chunked_last)
    for state, other in pairwise(states):
        assert not torch.allclose(state, other)
