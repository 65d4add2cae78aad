"""Rows that join and leave, subsets in any order, growth of the cache, and release of the model, on Llama."""

from __future__ import annotations

from inspect import Parameter, Signature

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from families import (
    FAMILIES,
    KINDS,
    assert_near,
    oracle_of,
    plain_logits,
    plain_model,
    random_tokens,
    row_of,
    runtime_of,
    trees,
    write_checkpoint,
)
from model_coverage.tiny import tiny_config
from secondguess.core import Draft
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.runtime import cache
from secondguess.runtime.cpu.forward import KernelForward
from secondguess.runtime.modules import attention
from secondguess.runtime.modules.support import cache_parameter
from secondguess.runtime.modules.transformers import TransformersRuntime, last_norm

NODES = random_tokens(4, seed=5)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(FAMILIES["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def plain(checkpoint, kind):
    return oracle_of(checkpoint, kind)


@pytest.fixture
def runtime(checkpoint, kind):
    return runtime_of(checkpoint, runtime=kind)


def check_round(runtime, plain, rows, path=()):
    """Score a tree on some rows, compare every row with the row alone, and keep a path."""
    parents = [-1, 0, -1, 2]
    logits = runtime.score(rows, trees(*[(NODES, parents)] * len(rows))).logits
    for index, row in enumerate(rows):
        assert_near(logits[index, 0], plain_logits(plain, row.tokens)[-1])
        assert_near(logits[index, 4], plain_logits(plain, [*row.tokens, NODES[2], NODES[3]])[-1])
    runtime.keep(rows, [list(path)] * len(rows))
    for row in rows:
        row.tokens += [*(NODES[node] for node in path), 9]


def test_rows_join_and_leave(runtime, plain):
    first, second, third, fourth = rows = [
        row_of(random_tokens(3 + 4 * count, seed=count)) for count in range(4)
    ]
    runtime.begin([first, second])
    check_round(runtime, plain, [first, second], path=[2, 3])
    runtime.begin([third])
    check_round(runtime, plain, [first, second, third], path=[2])
    runtime.release(first)
    check_round(runtime, plain, [second, third], path=[0, 1])
    runtime.begin([fourth])
    check_round(runtime, plain, [fourth, second, third])
    for row in rows[1:]:
        runtime.release(row)
    assert runtime.num_live_rows == 0


def test_any_subset_of_rows_in_any_order_scores_the_same(runtime, plain):
    rows = [row_of(random_tokens(2 + 3 * count, seed=10 + count)) for count in range(4)]
    runtime.begin(rows)
    check_round(runtime, plain, [rows[2], rows[0]], path=[2, 3])
    check_round(runtime, plain, [rows[3]], path=[0])
    check_round(runtime, plain, [rows[1], rows[2]])
    check_round(runtime, plain, rows[::-1], path=[2])
    check_round(runtime, plain, rows)


def test_ending_a_row_keeps_the_nodes_of_a_moved_row(runtime, plain):
    rows = [row_of([5, 6]), row_of(random_tokens(6, seed=1))]
    runtime.begin(rows)
    runtime.score(rows, trees((NODES, [-1, 0, -1, 2]), (NODES, [-1, 0, -1, 2])))
    runtime.release(rows[0])
    runtime.keep([rows[1]], [[2, 3]])
    rows[1].tokens += [NODES[2], NODES[3], 7]
    check_round(runtime, plain, [rows[1]])


def test_the_cache_grows_without_losing_entries(runtime, plain, monkeypatch):
    monkeypatch.setattr(cache, "MIN_CAPACITY", 4)
    rows = [row_of(random_tokens(3, seed=20)), row_of(random_tokens(5, seed=21))]
    runtime.begin(rows[:1])
    before = runtime.cache.capacity
    check_round(runtime, plain, rows[:1], path=[0, 1])
    runtime.begin(rows[1:])
    for _ in range(6):
        check_round(runtime, plain, rows, path=[2, 3])
    assert runtime.cache.capacity >= 4 * before
    assert runtime.cache.num_slots == 2


def test_a_chain_is_kept_without_moving_anything(runtime, monkeypatch):
    row = row_of(random_tokens(5, seed=1))
    runtime.begin([row])
    runtime.score([row], Draft.chains([NODES]))
    monkeypatch.setattr(runtime.cache, "compact", lambda *_: pytest.fail("a chain was moved"))
    runtime.keep([row], [[0, 1, 2]])


def test_rows_of_similar_length_are_prefilled_together(runtime, kind, monkeypatch):
    if kind == "graphs":
        pytest.skip("prefills have a forward pass of their own")
    shapes = []
    run = runtime.run

    def spy(tokens, *others, **named):
        shapes.append(tuple(tokens.shape))
        return run(tokens, *others, **named)

    monkeypatch.setattr(runtime, "run", spy)
    runtime.prefill_chunk = 16
    runtime._prefills_together = True  # as on a device that a single prompt does not fill
    runtime.begin([row_of(random_tokens(length + 1, seed=length)) for length in (3, 4, 8, 20)])
    assert shapes == [(1, 16), (2, 8), (2, 4)]


def test_scoring_computes_only_the_requested_logits(runtime, kind, monkeypatch):
    if kind == "graphs":
        pytest.skip("captured passes have fixed shapes")
    row = row_of(random_tokens(40, seed=3))
    runtime.begin([row])
    row.tokens += random_tokens(6, seed=4)
    seen = []
    run = runtime.run

    def spy(*inputs, **named):
        output = run(*inputs, **named)
        seen.append(output.logits.shape[1])
        return output

    monkeypatch.setattr(runtime, "run", spy)
    if kind == "native":  # it runs chains in another way
        prepare = KernelForward._prepare

        def spy_on_kernels(*inputs, **named):
            call = prepare(*inputs, **named)
            seen.append(inputs[0]._arguments.num_logits)
            return call

        monkeypatch.setattr(KernelForward, "_prepare", spy_on_kernels)
    assert runtime.score([row], Draft.chains([NODES])).logits.shape == (1, 5, 300)
    assert seen == [5]


def test_half_precision_logits_are_converted_to_float32(checkpoint):
    runtime = TransformersRuntime(plain_model(checkpoint).bfloat16())
    row = row_of([5, 6, 7])
    runtime.begin([row])
    assert runtime.score([row], Draft.empty(1)).logits.dtype == torch.float32


def test_float64_stays_float64(checkpoint):
    runtime = TransformersRuntime(plain_model(checkpoint).double())
    row = row_of([5, 6, 7])
    runtime.begin([row])
    logits = runtime.score([row], Draft.empty(1)).logits
    assert logits.dtype == torch.float64
    assert_near(logits[0].float(), plain_logits(plain_model(checkpoint), [5, 6, 7])[-1:])


def test_a_closed_runtime_restores_the_model(checkpoint):
    model = plain_model(checkpoint).train()
    with TransformersRuntime(model):
        assert model.config._attn_implementation == attention.IMPLEMENTATION
        assert not model.training
    assert model.config._attn_implementation == "eager"
    assert model.training


@pytest.mark.parametrize("interrupted", ["set_attn_implementation", "eval"])
def test_an_interrupted_construction_restores_the_model(checkpoint, monkeypatch, interrupted):
    model = plain_model(checkpoint).train()
    method = getattr(model, interrupted)

    def interrupt(*arguments):
        method(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(model, interrupted, interrupt)
    with pytest.raises(KeyboardInterrupt):
        TransformersRuntime(model)
    assert model.config._attn_implementation == "eager"
    assert all(module.training for module in model.modules())


def test_an_interrupted_release_restores_the_model(checkpoint, monkeypatch):
    model = plain_model(checkpoint).train()
    runtime = TransformersRuntime(model)
    layer = model.model.layers[0]
    set_attribute, interrupts = type(layer).__setattr__, [KeyboardInterrupt]

    def interrupt(module, name, value):
        if name == "training" and interrupts:
            raise interrupts.pop()
        set_attribute(module, name, value)

    monkeypatch.setattr(type(layer), "__setattr__", interrupt)
    with pytest.raises(KeyboardInterrupt):
        runtime.close()
    assert model.config._attn_implementation == "eager"
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params", "mems"])
def test_the_cache_has_the_name_that_its_class_gives_it(name):
    """Transformers 5.24 has another one than earlier releases."""

    class Made:
        def forward(self, **inputs): ...

    Made.forward.__signature__ = Signature(
        [Parameter(each, Parameter.KEYWORD_ONLY) for each in ("labels", name)]
    )
    assert cache_parameter(Made) == ("" if name == "mems" else name)


def test_layers_may_pass_further_arguments_to_the_cache():
    """As those of Transformers 5.24."""
    entries = cache.KeyValueCache(torch.device("cpu"))
    entries.place([0], 3, [0], 3)
    new = torch.randn(1, 2, 3, 4)
    keys, values = entries.update(new, -new, 0, kwargs={"position_ids": torch.arange(3)})
    assert torch.equal(keys, new)
    assert torch.equal(values, -new)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_borrowed_model_can_be_called_by_its_owner(name, tmp_path):
    """Our attention without a step of ours: causal, with a cache, and with padding."""
    path = write_checkpoint(FAMILIES[name](), tmp_path)
    plain, model = plain_model(path), plain_model(path)
    tokens = random_tokens(20, seed=6)
    with TransformersRuntime(model), torch.no_grad():
        cache = {cache_parameter(type(model)): DynamicCache(config=model.config)}
        start = model(torch.tensor([tokens[:12]]), **cache).logits[0]
        rest = model(torch.tensor([tokens[12:]]), **cache).logits[0]
        assert_near(torch.cat([start, rest]), plain_logits(plain, tokens))
        padded = model(
            torch.tensor([[0, 0, *tokens]]), attention_mask=torch.tensor([[0, 0] + [1] * 20])
        ).logits[0, 2:]
        expected = plain(
            torch.tensor([[0, 0, *tokens]]), attention_mask=torch.tensor([[0, 0] + [1] * 20])
        ).logits
        assert_near(padded, expected[0, 2:])


def test_rows_get_the_hidden_states_requested_for_them(runtime):
    read, plain, other = rows = [row_of([first, 6, 7]) for first in range(3)]
    runtime.request_hidden_states([0])
    runtime.admit(rows)
    runtime.request_hidden_states([1], [read])
    runtime.request_hidden_states([], [plain])
    draft = Draft.chains([NODES[:2]])
    expected = [(read, {1}), (plain, set()), (other, {0})]
    for row, layers in expected:
        assert runtime.prefill([row])[0].keys() == layers
    for row, layers in [*expected, expected[0]]:
        assert runtime.score([row], draft).hidden.keys() == layers


def test_misuse_is_reported(runtime, checkpoint):
    row = row_of([5, 6])
    runtime.begin([row])
    with pytest.raises(BadInputError, match="begun already"):
        runtime.begin([row])
    runtime.score([row], Draft.chains([NODES[:2]]))
    with pytest.raises(BadInputError, match="2 nodes"):
        runtime.keep([row], [[0, 1, 2]])
    with pytest.raises(BadInputError, match="hidden layer"):
        runtime.request_hidden_states([3])


def test_an_unsupported_attention_input_is_refused():
    value = torch.zeros(1, 1, 1, 2)
    with pytest.raises(UnsupportedModelError, match="topk_indices"):
        attention.grouped_query_attention(
            torch.nn.Identity(), value, value, value, None, topk_indices=torch.zeros(1)
        )
    with pytest.raises(UnsupportedModelError, match="dropout"):
        attention.grouped_query_attention(torch.nn.Identity(), value, value, value, None, dropout=0.1)


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("llama", "norm"),
        ("opt", "decoder.final_layer_norm"),
        ("gemma3", "language_model.norm"),
        ("llama4_text", "model.norm"),
        ("bart", None),
    ],
)
def test_the_final_norm_is_found_in_the_text_decoder(model_type, name):
    """BART has a norm of the embeddings only, which its decoder has after the layers."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    if name is None:
        with pytest.raises(UnsupportedModelError, match="norm after the layers of a BartForCausalLM"):
            last_norm(model)
    else:
        assert last_norm(model) is model.base_model.get_submodule(name)
