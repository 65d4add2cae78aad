"""The Triton kernels against the torch definitions of the same operations, on a CUDA device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from secondguess.runtime.cuda import operations
from secondguess.runtime.cuda.operations import LayerCache, PassInputs
from secondguess.runtime.cuda.quantised import QuantisedProduct
from secondguess.runtime.decoder.families import Norm
from secondguess.runtime.decoder.fused_decoder import AttentionHeads
from secondguess.runtime.decoder.products import PackableLinear
from secondguess.runtime.decoder.rotary import Rotary

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 0.012}
TOLERANCES_IN_4_BITS = TOLERANCES | {torch.float32: 1e-3}  # states are rounded to the precision of TF32
CAPACITY = 9000
"""Cells of the cache, in more chunks than are merged at a time."""


def random(*shape, dtype):
    return torch.randn(*shape, device="cuda").to(dtype)


def zeros():
    return torch.zeros(operations.MAX_TILES, dtype=torch.int32, device="cuda")


def norm_of(size, dtype):
    weight = torch.rand(size, device="cuda").to(dtype) + 0.5
    return Norm(SimpleNamespace(weight=weight), 1e-6)


def assert_same(monkeypatch, compute, tolerance):
    """Compare what the kernels and torch return, tensor by tensor, by the norm of the difference."""
    found = compute()
    assert all(
        map(torch.equal, compute(), found)
    )  # after the programs of the first ones have counted themselves
    monkeypatch.setattr(operations, "uses_kernels", lambda _: False)
    for own, expected in zip(found, compute(), strict=True):
        error = (own.float() - expected.float()).norm() / expected.float().norm()
        assert error < tolerance


@pytest.mark.parametrize("activation", [None, "silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("sizes", [(96, 80), (4096, 512), (512, 4096), (1000, 4104), (40960, 64)])
@pytest.mark.parametrize("num_tokens", [1, 33, 64])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("is_quantised", [False, True], ids=["", "4 bits"])
def test_linear(is_quantised, dtype, num_tokens, sizes, activation, monkeypatch):
    torch.manual_seed(0)
    num_outputs, num_inputs = sizes
    weight = random(num_outputs, num_inputs, dtype=dtype) / num_inputs**0.5
    with_bias = PackableLinear(weight, random(num_outputs, dtype=dtype), False)
    plain = PackableLinear(weight, None, False)
    if is_quantised:
        with_bias, plain = QuantisedProduct(with_bias), QuantisedProduct(plain)
    states, norm = random(num_tokens, num_inputs, dtype=dtype), norm_of(num_inputs, dtype)
    residual = random(num_tokens, num_outputs // (2 if activation else 1), dtype=dtype)
    num_finished = zeros()

    def compute():
        return (
            operations.linear(states, with_bias, num_finished, norm, activation),
            operations.linear(states, plain, num_finished, None, activation, residual, 0.5),
        )

    assert_same(monkeypatch, compute, (TOLERANCES_IN_4_BITS if is_quantised else TOLERANCES)[dtype])
    assert not num_finished.any()


@pytest.mark.parametrize(("num_rows", "num_logits"), [(1, 100), (3, 2048), (64, 128256), (2, 262144)])
def test_most_likely_token(num_rows, num_logits, monkeypatch):
    torch.manual_seed(0)
    logits, num_finished = torch.randn(num_rows, num_logits, device="cuda"), zeros()
    logits[:, num_logits // 2] = logits[:, num_logits // 3] = 9.0  # the first of two counts
    logits[0, 2:] = -torch.inf  # in whole blocks
    found = [operations.most_likely(logits, num_finished) for _ in range(2)]
    assert not num_finished.any()
    monkeypatch.setattr(operations, "uses_kernels", lambda _: False)
    expected = operations.most_likely(logits, num_finished)
    for tokens, confidences in found:
        assert torch.equal(tokens, expected[0])
        torch.testing.assert_close(confidences, expected[1], rtol=1e-5, atol=0)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5000])
def test_the_softmax_of_broken_logits_is_nan(value, place):
    logits = torch.zeros(2, 9000, device="cuda")
    logits[1, place] = value
    tokens, confidences = operations.most_likely(logits, zeros())
    assert confidences.isnan().tolist() == [False, True]
    assert tokens.max() < 9000
    assert operations.most_likely(torch.full((1, 90), -torch.inf, device="cuda"), zeros())[1].isnan()


@pytest.mark.parametrize(
    ("num_queries", "num_keys", "size", "num_rotated"),
    [(8, 2, 32, 32), (6, 6, 24, 16), (4, 1, 128, 128), (7, 1, 80, 80), (4, 2, 256, 256)],
)
@pytest.mark.parametrize("has_extras", [False, True], ids=["plain", "pairs, norms, cap, window"])
@pytest.mark.parametrize("width", [1, 5, 9, 63, "prefill"])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_attention(dtype, width, has_extras, num_queries, num_keys, size, num_rotated, monkeypatch):
    """Four rows, one of them padding, with trees whose nodes have two children; or a prefill."""
    torch.manual_seed(0)
    starts, slots = [300, 0, -1, 8900], [2, 0, 1, 4]
    is_prefill = width == "prefill"
    width = 70 if is_prefill else width
    parents = [-1] + [node - 1 - (0 if is_prefill else node % 2) for node in range(1, width)]
    ancestors, depths = [1], [0]
    for node in range(1, width):
        ancestors.append(ancestors[parents[node]] | 1 << node)
        depths.append(depths[parents[node]] + 1)
    positions = [[max(start, 0) + depth for depth in depths] for start in starts]
    fields = (slots, starts, [[0] * width] * 4, positions)
    seen = None if is_prefill else torch.tensor([ancestors] * 4, device="cuda")
    inputs = PassInputs(*(torch.tensor(each, device="cuda") for each in fields), seen, zeros())
    heads = AttentionHeads(num_queries, num_keys, size, size**-0.5, 20.0 if has_extras else None)
    norms = (norm_of(size, dtype), norm_of(size, dtype)) if has_extras else None
    rotary = Rotary(torch.rand(num_rotated // 2, device="cuda"), 1.0, dtype, has_extras)
    rotary.table(CAPACITY)
    shape = (5, num_keys, CAPACITY, size)
    keys, values = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    qkv = random(4 * width, (num_queries + 2 * num_keys) * size, dtype=dtype)

    def compute():
        cache = LayerCache(keys.clone(), values.clone())
        queries = operations.rotate_and_store(qkv, heads, norms, rotary, cache, inputs)
        window = 100 if has_extras else None
        found = operations.attention(queries, heads, window, cache, inputs)
        # the last rows of padding are undefined
        return queries, *cache, found.view(4, width, -1)[[0, 1, 3]]

    assert_same(monkeypatch, compute, TOLERANCES[dtype])


def test_several_programs_share_the_inputs_of_products_with_few_outputs():
    """Some of the tests above have such products."""
    tiles = [operations._tile(512, None, torch.bfloat16), operations._tile_in_4_bits(None)]
    for tile in (*tiles, operations._tile(512, None, torch.float32)):
        assert operations._parts(tile, -(-512 // tile.outputs), 4096, torch.device("cuda")) > 1
