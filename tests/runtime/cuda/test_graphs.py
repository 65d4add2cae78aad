"""The runtime with CUDA graphs; on a machine without a GPU, the same passes without capturing."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

from families import FAMILIES, GRAPHS_DEVICE, graphs_of, random_tokens, row_of, write_checkpoint
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.core import Draft, Row
from secondguess.drafters.mirroring import TokenDrafter
from secondguess.errors import SecondGuessError, UnsupportedModelError
from secondguess.preparation import preparation_time
from secondguess.proof.certificate import CertifyOptions, certify, tiny_system
from secondguess.runtime import cache, coverage
from secondguess.runtime.chains import ChainRequest, KernelSettings
from secondguess.runtime.coverage import unsupported_reason
from secondguess.runtime.cuda import chains
from secondguess.runtime.cuda import runtime as graphs
from secondguess.runtime.cuda.capture import MAX_GRAPHS, Graph, GraphCache, bucket
from secondguess.runtime.cuda.runtime import to_graphs
from secondguess.runtime.decoder.fused import fuse_for_kernels
from secondguess.runtime.modules.tiny import tiny_pair
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.probs import compute_draft_probs
from secondguess.sampling.truncation import kernel_settings

pytestmark = pytest.mark.gpu
PROMPT = random_tokens(9, seed=1)
NUM_NODES = 7


def tiny_runtime(which):
    checked = fuse_for_kernels(tiny_pair()[which].to(GRAPHS_DEVICE))
    return to_graphs(checked)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(FAMILIES["llama"](), tmp_path_factory.mktemp("graphs"))


@pytest.fixture(scope="module")
def runtime(checkpoint):
    return graphs_of(checkpoint)


@pytest.fixture
def row(runtime):
    row = row_of(PROMPT)
    runtime.begin([row])
    yield row
    runtime.release(row)
    runtime.reset_prefix_cache()


def noise_of(params, coupled):
    row = Row(list(PROMPT), params, seed=7, coupled=coupled)
    return KeyedNoise.from_rows([row], GRAPHS_DEVICE)


def request(params, coupled=False, num_nodes=NUM_NODES):
    noise = noise_of(params, coupled).of_rows()[0]
    return ChainRequest(num_nodes, 300, kernel_settings(params), noise)


def draw(runtime, row, request, decision=None):
    """Draw a chain for one row; None if it must be drawn token by token."""
    drawn = runtime.draft_chains([row], [request], decision)
    return drawn and DrawnChain(drawn.tokens[0], drawn.probs if drawn.probs is None else drawn.probs[0])


class DrawnChain(NamedTuple):
    """Tokens `[node]` and probabilities `[node, vocab]`."""

    tokens: list[int]
    probs: torch.Tensor | None


def drawn_one_by_one(runtime, params, coupled, num_nodes=NUM_NODES):
    """Tokens and probabilities of a chain, by the operations of drafters that draw token by token."""
    row, noise = Row(list(PROMPT), params), noise_of(params, coupled)
    runtime.begin([row])
    tokens, dists = [], []
    for depth in range(num_nodes):
        logits = runtime.score([row], Draft.empty(1)).logits[:, 0].to(GRAPHS_DEVICE)
        dist, _ = compute_draft_probs(logits, [row], torch.empty(1, 0, dtype=torch.int64))
        tokens.append(int(noise.draft(dist, depth)))
        dists.append(dist[0])
        row.tokens.append(tokens[-1])
    runtime.release(row)
    runtime.reset_prefix_cache()
    return tokens, torch.stack(dists)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=1.3),
        SamplingParams(temperature=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_a_chain_drawn_at_once_equals_one_drawn_token_by_token(runtime, row, params, coupled):
    num_nodes = chains.UNDECIDED_SEGMENT + 2
    expected, dists = drawn_one_by_one(runtime, params, coupled, num_nodes)
    for _ in range(2):  # captured, then replayed
        found = draw(runtime, row, request(params, coupled, num_nodes))
        assert found.tokens == expected
        assert row.tokens == PROMPT + expected
        if params.temperature:
            torch.testing.assert_close(found.probs, dists)
        else:
            assert found.probs is None
        del row.tokens[len(PROMPT) :]
        runtime.rewind([row], [len(PROMPT) - 1])


def test_a_chain_continues_after_two_uncached_tokens(runtime, row):
    params = SamplingParams(temperature=0)
    expected, _ = drawn_one_by_one(runtime, params, coupled=False)
    row.tokens += expected[:1]
    assert draw(runtime, row, request(params, num_nodes=3)).tokens == expected[1:4]
    row.tokens += expected[4:7]
    assert runtime.num_to_prefill(row) == 3
    assert draw(runtime, row, request(params)) is None  # too many: scored first


def test_a_drawn_chain_is_cached(runtime, row):
    params = SamplingParams(temperature=0)
    tokens = draw(runtime, row, request(params, num_nodes=5)).tokens
    assert runtime.num_to_prefill(row) == 0
    after = runtime.score([row], Draft.empty(1)).logits
    other = row_of(PROMPT + tokens)
    runtime.begin([other])
    torch.testing.assert_close(after, runtime.score([other], Draft.empty(1)).logits)
    runtime.release(other)


@pytest.mark.parametrize("stop_after", [0, 2, 3, 5])
def test_chains_end_where_the_callback_says(runtime, row, stop_after):
    """Nodes are drawn in segments, but decided on one by one."""
    asked = []

    def keep_drafting(rows, logits, depth, confidences):
        asked.append(depth)
        assert list(rows) == [0]
        assert logits.shape == (1, 300)
        assert confidences == [pytest.approx(float(logits.softmax(-1).amax()), rel=1e-5)]
        return [depth < stop_after]

    params = SamplingParams(temperature=0)
    expected, _ = drawn_one_by_one(runtime, params, coupled=False)
    found = draw(runtime, row, request(params), keep_drafting)
    assert found.tokens == expected[: stop_after + 1]
    assert asked == list(range(stop_after + 1))


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("verifier", ["block", "coupled"])
def test_drawn_chains_keep_the_distribution(verifier, batch_size):
    """Chains of two nodes, those of a batch drawn together."""
    system = tiny_system(verifier=verifier)
    drafter = TokenDrafter(tiny_runtime(1), "model:tiny", 3)
    system = replace(system, components=replace(system.components, target=tiny_runtime(0), drafter=drafter))
    certificate = certify(system, CertifyOptions(num_samples=2000, limit=0.12, batch_size=batch_size))
    assert certificate.passed, str(certificate)
    assert certificate.acceptance_length > 1.5


def test_settings_that_graphs_do_not_draw_with_are_left_to_the_loop(runtime, row):
    for params in (SamplingParams(temperature=1, top_k=5), SamplingParams(temperature=1, top_p=0.9)):
        assert draw(runtime, row, request(params)) is None
    wider = ChainRequest(2, 301, KernelSettings(0, 0, 2, 0), request(SamplingParams()).noise)
    assert draw(runtime, row, wider) is None


def test_broken_weights_are_reported(checkpoint):
    runtime = graphs_of(checkpoint)
    runtime.decoder.norm.weight.fill_(torch.nan)
    row = row_of(PROMPT)
    runtime.begin([row])
    with pytest.raises(SecondGuessError, match="its weights are broken"):
        draw(runtime, row, request(SamplingParams(temperature=0)))
    assert row.tokens == PROMPT


def test_kernels_that_differ_from_the_module_are_not_used(checkpoint, monkeypatch, caplog):
    from checkpoints import read_module

    monkeypatch.setattr(graphs, "run_decoder", wrong_decoder(graphs.run_decoder))
    checked = fuse_for_kernels(read_module(str(checkpoint), torch.float32).to(GRAPHS_DEVICE).eval())
    assert to_graphs(checked) is None
    assert "the graphs runtime is not used" in caplog.text


def test_kernels_that_fail_are_not_used(checkpoint, monkeypatch, caplog):
    from checkpoints import read_module

    def fail(*_, **__):
        raise ValueError("out of resource: shared memory")

    checked = fuse_for_kernels(read_module(str(checkpoint), torch.float32).to(GRAPHS_DEVICE).eval())
    monkeypatch.setattr(graphs, "run_decoder", fail)
    assert to_graphs(checked) is None
    assert "got ValueError: out of resource: shared memory" in caplog.text


def wrong_decoder(run):
    def run_wrongly(*arguments, **options):
        output = run(*arguments, **options)
        return type(output)(output.logits * 1.01, output.hidden)

    return run_wrongly


@pytest.mark.parametrize(
    ("family", "dtype", "device", "has_triton", "reason"),
    [
        ("llama", "float32", "cuda", True, None),
        ("llama", "float32", "cpu", True, "CUDA graphs need a CUDA device, got cpu"),
        ("llama", "float64", "cuda", True, "the kernels of graphs compute in float32, not in float64"),
        ("llama", "float32", "cuda", False, "the kernels of graphs need Triton, which is not installed"),
        ("mixtral", "float32", "cuda", True, "it has mixtures of experts"),
    ],
)
def test_what_graphs_do_not_cover(family, dtype, device, has_triton, reason, monkeypatch):
    monkeypatch.setattr(coverage, "find_spec", lambda _: object() if has_triton else None)
    found = unsupported_reason("graphs", FAMILIES[family](), getattr(torch, dtype), torch.device(device))
    assert found == reason


def test_the_reason_against_graphs_is_reported(checkpoint):
    with pytest.raises(
        UnsupportedModelError, match=r"CUDA graphs need a CUDA device, got cpu\); use runtime auto"
    ):
        load_model(Checkpoint.resolve(checkpoint, runtime="graphs", device="cpu"))


def test_passes_are_padded_to_few_shapes(runtime, row):
    assert [bucket(number, (1, 2, 4, 8)) for number in (1, 3, 8, 9, 17)] == [1, 4, 8, 16, 24]
    runtime.score([row], Draft.chains([random_tokens(8, seed=2)]))
    before = len(runtime.forward.graphs._graphs)
    runtime.rewind([row], [len(PROMPT) - 1])
    runtime.score([row], Draft.chains([random_tokens(9, seed=2)]))  # 10 queries as well
    assert len(runtime.forward.graphs._graphs) == before


def test_graphs_are_captured_again_after_the_cache_was_replaced(checkpoint):
    runtime = graphs_of(checkpoint)
    row = row_of(PROMPT)
    runtime.begin([row])
    expected = runtime.score([row], Draft.empty(1)).logits
    first = next(iter(runtime.forward.graphs._graphs.values()))
    runtime.rewind([row], [len(PROMPT) - 1])
    runtime.reserve(3, 2000)
    torch.testing.assert_close(runtime.score([row], Draft.empty(1)).logits, expected)
    assert first not in runtime.forward.graphs._graphs.values()


def test_capturing_counts_as_preparation():
    def slow():
        time.sleep(0.02)
        return torch.zeros(1)

    before = preparation_time()
    graph = Graph(slow, torch.device("cpu"))
    after = preparation_time()
    assert after >= before + 0.02
    graph()
    assert preparation_time() == after


def test_tables_that_another_runtime_replaced_are_not_read(checkpoint):
    """A drafter that skips layers shares the rotary tables, and may need longer ones first."""
    runtime = graphs_of(checkpoint)
    row = row_of(PROMPT)
    runtime.begin([row])
    expected = runtime.score([row], Draft.empty(1)).logits
    tables = list(runtime.forward._captured_tables)
    runtime.skip_layers([0]).forward.reserve(0, 3000)
    runtime.rewind([row], [len(PROMPT) - 1])
    assert torch.equal(runtime.score([row], Draft.empty(1)).logits, expected)
    assert not any(
        held is table for held, table in zip(runtime.forward._captured_tables, tables, strict=True)
    )


def test_first_layers_may_run_before_any_other_pass(checkpoint):
    runtime = graphs_of(checkpoint)
    row = row_of(PROMPT[:1])
    runtime.begin([row])
    empty = Draft.empty(1, GRAPHS_DEVICE)
    runtime.run_first_layers([row], empty, 1)
    runtime.release(row)  # an interrupted round
    other = row_of(PROMPT)
    runtime.begin([other])
    expected = graphs_of(checkpoint)
    expected.begin([other])
    torch.testing.assert_close(
        runtime.score([other], Draft.empty(1)).logits, expected.score([other], Draft.empty(1)).logits
    )


def test_the_remaining_layers_follow_the_first(runtime, row):
    nodes = Draft.chains([random_tokens(3, seed=6)])
    expected = runtime.score([row], nodes).logits
    runtime.rewind([row], [len(PROMPT) - 1])
    on_device = Draft(*(each.to(GRAPHS_DEVICE) for each in (nodes.tokens, nodes.parents, nodes.lengths)))
    runtime.run_first_layers([row], on_device, 1)
    torch.testing.assert_close(runtime.score([row], nodes).logits, expected)


def test_a_chain_is_drawn_in_any_slot_while_the_cache_grows(checkpoint, monkeypatch):
    params = SamplingParams(temperature=0)
    runtime = graphs_of(checkpoint)
    expected, _ = drawn_one_by_one(runtime, params, coupled=False, num_nodes=12)
    monkeypatch.setattr(cache, "MIN_CAPACITY", 4)
    runtime.free()
    rows = [row_of(PROMPT[:2]), row_of(PROMPT)]
    runtime.begin(rows)
    before = runtime.cache.capacity
    assert draw(runtime, rows[1], request(params, num_nodes=12)).tokens == expected
    assert runtime.cache.capacity > before
    assert runtime.num_to_prefill(rows[0]) == 0


def test_a_pass_is_not_captured_if_memory_is_short(runtime, row, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    nodes = Draft.chains([random_tokens(5, seed=9)])
    expected = runtime.score([row], nodes).logits
    runtime.rewind([row], [len(PROMPT) - 1])
    runtime.forward.graphs.clear()
    monkeypatch.setattr(runtime.forward, "_scoring_pass", fail)
    torch.testing.assert_close(runtime.score([row], nodes).logits, expected)


def test_large_passes_are_not_captured(runtime, monkeypatch):
    rows = [row_of(PROMPT), row_of(PROMPT[:5])]
    runtime.begin(rows)
    nodes = Draft.chains([random_tokens(6, seed=3), random_tokens(4, seed=4)])
    expected = runtime.score(rows, nodes).logits
    runtime.rewind(rows, [len(PROMPT) - 1, 4])
    monkeypatch.setattr(graphs, "MAX_TOKENS", 4)
    monkeypatch.setattr(runtime.forward, "_scoring_pass", None)
    monkeypatch.setattr(graphs.CachedRuntime, "_run_queries", None)
    found = runtime.score(rows, nodes).logits
    for row, length in enumerate((6, 4)):
        torch.testing.assert_close(found[row, : length + 1], expected[row, : length + 1])
    for row in rows:
        runtime.release(row)


def test_scratch_memory_is_bounded(runtime, row, monkeypatch):
    expected = runtime.score([row], Draft.chains([PROMPT])).logits
    runtime.rewind([row], [len(PROMPT) - 1])
    monkeypatch.setattr(graphs, "MAX_ATTENTION_BYTES", 0)
    monkeypatch.setattr(runtime.forward, "_scoring_pass", None)
    torch.testing.assert_close(runtime.score([row], Draft.chains([PROMPT])).logits, expected)


def test_the_graph_used_least_recently_is_dropped():
    graphs = GraphCache(torch.device("cpu"))
    for number in range(MAX_GRAPHS):
        graphs.get(number, lambda number=number: number)
    graphs.get(0, lambda: "made again")
    graphs.get("new", lambda: "new")
    assert graphs.get(0, lambda: "made again") == 0
    assert graphs.get(1, lambda: "made again") == "made again"


def test_drafts_wider_than_a_graph_are_scored(runtime, row):
    nodes = random_tokens(70, seed=5)
    logits = runtime.score([row], Draft.chains([nodes])).logits
    runtime.rewind([row], [len(PROMPT) - 1])
    torch.testing.assert_close(logits[:, :4], runtime.score([row], Draft.chains([nodes[:3]])).logits)


@pytest.mark.skipif(GRAPHS_DEVICE == "cpu", reason="this machine has no CUDA device")
def test_the_bits_of_a_token_do_not_depend_on_what_follows_it(tmp_path):
    """In bfloat16, with products whose inputs several programs share, and passes of up to 32 tokens."""
    config = FAMILIES["llama"]()
    config.hidden_size = config.intermediate_size = 2048
    config.initializer_range = 0.02
    runtime = graphs_of(write_checkpoint(config, tmp_path), torch.bfloat16)
    row, nodes = row_of(PROMPT), random_tokens(31, seed=2)
    runtime.begin([row])
    expected = runtime.score([row], Draft.chains([nodes])).logits
    for length in (0, 3, 7, 12, 20):
        runtime.rewind([row], [len(PROMPT) - 1])
        found = runtime.score([row], Draft.chains([nodes[:length]]) if length else Draft.empty(1)).logits
        assert torch.equal(found, expected[:, : length + 1])
