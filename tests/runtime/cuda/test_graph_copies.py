"""Copies in 4 bits that draft in the cache of a target with CUDA graphs; without a GPU nothing is captured."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from checkpoints import read_module
from families import (
    FAMILIES,
    GRAPHS_DEVICE,
    VOCAB_SIZE,
    graphs_of,
    logits_after_a_move,
    random_tokens,
    row_of,
    trees,
    write_checkpoint,
)
from secondguess.builtin import builtin_paths
from secondguess.checkpoint.plan import Checkpoint
from secondguess.cli.verify import _runtime_for as runtime_for
from secondguess.core import Draft, Row
from secondguess.drafters.self import SelfDrafter
from secondguess.errors import UnsupportedModelError
from secondguess.pairing import default_drafter
from secondguess.proof.certificate import CertifyOptions, certify, tiny_system
from secondguess.runtime.chains import ChainRequest
from secondguess.runtime.cuda.quantised import BLOCK, GROUP, QuantisedProduct, quantised_copy
from secondguess.runtime.cuda.runtime import GraphRuntime, to_graphs
from secondguess.runtime.decoder.fused import fuse_for_kernels
from secondguess.runtime.decoder.products import PackableLinear
from secondguess.runtime.modules.tiny import tiny_pair
from secondguess.runtime.weight_format import INT4, INT8
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.sampling.truncation import kernel_settings

pytestmark = pytest.mark.gpu
TOKENS = random_tokens(24, seed=3)
TOLERANCE = 1e-5 if GRAPHS_DEVICE == "cpu" else 2e-3
"""The kernels round states to the precision of TF32 in products with weights in 4 bits."""
ROWS = ((0, 8), (1, 13))
"""Slot and number of cached tokens of each row."""


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3", "phi"])
def checkpoint(request, tmp_path_factory):
    """Tied and untied heads, biases, norms of outputs, parallel layers."""
    return write_checkpoint(FAMILIES[request.param](), tmp_path_factory.mktemp("copied"))


@pytest.fixture
def target(checkpoint):
    return graphs_of(checkpoint)


def assert_near(found, expected):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def chains(*lists):
    return Draft.chains([list(each) for each in lists], device=torch.device(GRAPHS_DEVICE))


def on_device(draft):
    return Draft(*(each.to(GRAPHS_DEVICE) for each in (draft.tokens, draft.parents, draft.lengths)))


def begun(target):
    rows = [row_of(TOKENS[:9]), row_of(TOKENS[:14])]
    target.begin(rows)
    return rows


def noise_of(row):
    return KeyedNoise.from_rows([row], torch.device(GRAPHS_DEVICE))


def request_for(row, num_nodes, vocab_size):
    return ChainRequest(num_nodes, vocab_size, kernel_settings(row.params), noise_of(row).of_rows()[0])


def draw(copy, row, request):
    """Return the chain drawn for one row; None if it must be drawn token by token."""
    drawn = copy.draft_chains([row], [request], None)
    return drawn and drawn.tokens[0]


def entries(target):
    blocks = [*target.cache.keys, *target.cache.values]
    return [torch.stack([block[slot, :, :length] for block in blocks]) for slot, length in ROWS]


@pytest.mark.parametrize("num_inputs", [GROUP, 96, BLOCK, BLOCK + 8])
def test_weights_are_the_nearest_of_16_multiples_of_a_scale(num_inputs):
    weight = torch.randn(24, num_inputs, generator=torch.Generator().manual_seed(0))
    weight[5, :GROUP] = 0
    product = QuantisedProduct(PackableLinear(weight, None, False))
    found = product.weight
    assert found.shape == weight.shape
    assert (found[5, :GROUP] == 0).all()
    for first in range(0, num_inputs, GROUP):
        of_group = found[:, first : first + GROUP]
        assert all(len(row.unique()) <= 16 for row in of_group)
        part = weight[:, first : first + GROUP]
        step = part.abs().amax(1, keepdim=True).clamp(min=1e-6) / 7
        plain = (part / step).round() * step
        assert ((of_group - part).norm(dim=1) <= (plain - part).norm(dim=1) * 1.01).all()
    error = (found - weight).norm() / weight.norm()
    assert 0.05 < error < 0.09
    values = torch.randn(3, num_inputs)
    assert_near(product(values), functional.linear(values, found))


def test_a_copy_drafts_behind_the_cache_of_its_target(target):
    """Step by step or at once, in chains and trees; committed entries and the target's logits stay the same."""
    copy, rows = target.quantised_copy(INT4), begun(target)
    of_target = chains(TOKENS[9:13], TOKENS[14:18])
    expected = target.score(rows, of_target).logits
    target.rewind(rows, [8, 13])
    before = entries(target)
    at_once = copy.draft_logits(rows, of_target, 0)
    parts = [copy.draft_logits(rows, chains(TOKENS[9 : 9 + n], TOKENS[14 : 14 + n]), n) for n in range(5)]
    assert_near(torch.cat(parts, 1), at_once)
    error = (at_once.cpu() - expected.cpu()).norm() / expected.cpu().norm()
    assert 0.01 < error < 0.6
    tree = trees(([5, TOKENS[9], TOKENS[10]], [-1, -1, 1]), ([TOKENS[14], 6, TOKENS[15]], [-1, 0, 0]))
    of_tree = copy.draft_logits(rows, on_device(tree), 0)
    assert_near(of_tree[0, [0, 2, 3]], at_once[0, :3])
    assert_near(of_tree[1, [0, 1, 3]], at_once[1, :3])
    assert_near(copy.draft_logits(rows, on_device(tree), 2), of_tree[:, 2:])
    assert all(map(torch.equal, entries(target), before))
    assert_near(target.score(rows, of_target).logits, expected)


def test_a_tree_that_is_too_large_for_a_graph_is_run_without_one(target):
    copy, rows = target.quantised_copy(INT4), begun(target)
    nodes = [token % VOCAB_SIZE for token in range(5, 75)]
    large = trees((nodes, [-1] * 70), (nodes, [-1] * 70))
    found = copy.draft_logits(rows, on_device(large), 0)
    few = copy.draft_logits(rows, on_device(trees((nodes[:4], [-1] * 4), (nodes[:4], [-1] * 4))), 0)
    torch.testing.assert_close(found[:, :5], few, rtol=10 * TOLERANCE, atol=10 * TOLERANCE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chain_drawn_at_once_equals_one_drawn_token_by_token(target, temperature):
    copy, params = target.quantised_copy(INT4), SamplingParams(temperature=temperature)
    row = Row(TOKENS[:9], params, seed=7)
    target.begin([row])
    noise = noise_of(row)
    expected: list[int] = []
    for depth in range(6):
        logits = copy.draft_logits([row], chains(expected), depth)[:, -1]
        expected.append(int(noise.draft(logits.softmax(-1) if temperature else logits, depth)))
    request = request_for(row, 6, VOCAB_SIZE)
    for _ in range(2):  # captured, then replayed
        assert draw(copy, row, request) == expected
    assert row.tokens == TOKENS[:9]
    assert (
        draw(copy, row, replace(request, settings=kernel_settings(SamplingParams(temperature=1, top_k=3))))
        is None
    )


def test_entries_of_a_draft_move_with_their_row(target):
    """Another thread may release its row between two steps of a draft."""
    found, expected = logits_after_a_move(target, TOKENS)
    assert_near(found, expected)


def test_a_copy_follows_the_cache_when_it_is_replaced(checkpoint, target):
    copy = target.quantised_copy(INT4)
    for tokens in (TOKENS[:9], TOKENS[5:14]):
        row = row_of(tokens)
        target.begin([row])
        found = copy.draft_logits([row], chains([]), 0)
        target.free()
    fresh = graphs_of(checkpoint)
    fresh.begin([row])
    assert_near(found, fresh.quantised_copy(INT4).draft_logits([row], chains([]), 0))


def test_copies_are_in_4_bits(target):
    with pytest.raises(UnsupportedModelError, match="int8"):
        target.quantised_copy(INT8)


def fail(*_):
    raise RuntimeError("out of resource")


def zeros(_, tokens):
    return torch.zeros(2, *tokens.shape, VOCAB_SIZE, device=GRAPHS_DEVICE)


@pytest.mark.parametrize(("broken", "reason"), [(fail, "out of resource"), (zeros, "other logits")])
def test_a_copy_whose_kernels_fail_is_refused(target, monkeypatch, broken, reason):
    monkeypatch.setattr(GraphRuntime, "probe_both_paths", broken)
    with pytest.raises(UnsupportedModelError, match=reason):
        target.quantised_copy(INT4)


def test_a_row_with_other_tokens_to_run_is_left_to_the_loop(target):
    """As after an interrupted round."""
    copy, row = target.quantised_copy(INT4), row_of(TOKENS[:9])
    target.begin([row])
    for length in (0, 5, 9):
        target.slots[row].length = length
        assert draw(copy, row, request_for(row, 3, VOCAB_SIZE)) is None


def test_graphs_are_dropped_if_the_cache_finds_no_room(target, monkeypatch):
    copy, row = target.quantised_copy(INT4), row_of(TOKENS[:9])
    target.begin([row])
    draw(copy, row, request_for(row, 3, VOCAB_SIZE))
    target.score([row], chains(TOKENS[9:12]))
    reserve, dropped = target.cache.reserve, []

    def fail_once(*arguments):
        if not dropped:
            dropped.append(True)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return reserve(*arguments)

    monkeypatch.setattr(target.cache, "reserve", fail_once)
    target.reserve(2, 40)
    assert not target.forward.graphs._graphs
    assert not copy.forward.graphs._graphs
    target.rewind([row], [8])
    assert draw(copy, row, request_for(row, 3, VOCAB_SIZE))


@pytest.mark.parametrize(("verifier", "batch_size"), [("coupled", 1), ("block", 5)])
def test_drawn_chains_keep_the_distribution(verifier, batch_size):
    """The other verifier and batch size of each are tested with a draft model, whose nodes are drawn alike."""
    system = tiny_system(verifier=verifier)
    target = to_graphs(fuse_for_kernels(tiny_pair()[0].to(GRAPHS_DEVICE)))
    drafter = SelfDrafter(target, "self:int4")
    system = replace(system, components=replace(system.components, target=target, drafter=drafter))
    certificate = certify(system, CertifyOptions(num_samples=2000, limit=0.12, batch_size=batch_size))
    assert certificate.passed, str(certificate)
    assert certificate.acceptance_length > 1.5


def test_the_memory_of_a_copy_is_estimated(monkeypatch):
    """It is no default: it gains less than on a CPU."""
    monkeypatch.setattr(Checkpoint, "runtimes", ["graphs"])
    target = Checkpoint.resolve("builtin", dtype="bfloat16", device="cpu")
    decoder = fuse_for_kernels(read_module(target.path, torch.bfloat16).eval()).decoder
    layers = quantised_copy(decoder).layers
    products = [
        each for layer in layers for each in vars(layer).values() if isinstance(each, QuantisedProduct)
    ]
    products += [part for layer in layers for part in (layer.feed_forward.inner, layer.feed_forward.output)]
    num_bytes = sum(4 * (each.codes.numel() + each.scales.numel()) for each in products)
    assert 0.98 < num_bytes / target.copy_bytes(INT4) < 1.02
    assert default_drafter("other", target) == "suffix"
    settings = {"model": "builtin", "dtype": "float32", "device": "cpu", "drafter": "self:int4"}
    assert runtime_for(settings) == "auto"


def test_a_quantised_target_has_no_copy(monkeypatch):
    pytest.importorskip("torchao", reason="needs the extra quant")
    monkeypatch.setattr(Checkpoint, "runtimes", ["graphs"])
    with pytest.raises(UnsupportedModelError, match="int8"):
        Checkpoint.resolve("builtin", dtype="bfloat16", device="cpu", quantize="int8").copy_bytes(INT4)


def test_a_copy_agrees_with_a_trained_target():
    module = read_module(str(builtin_paths().target), torch.float32).to(GRAPHS_DEVICE).eval()
    target = to_graphs(fuse_for_kernels(module))
    copy, row = target.quantised_copy(INT4), row_of(range(300, 304))
    target.begin([row])
    written = draw(copy, row, request_for(row, 40, target.vocab_size))
    probs = [
        found.softmax(-1)
        for found in (
            copy.draft_logits([row], chains(written), 0),
            target.score([row], chains(written)).logits,
        )
    ]
    assert torch.minimum(*probs).sum(-1).mean() > 0.8
