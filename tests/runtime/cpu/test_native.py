"""The kernels: accuracy, bits that depend only on a token's prefix, and the cases in which they are not used."""

from __future__ import annotations

import ctypes
import gc
import math
import shutil
import weakref
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import read_module
from families import (
    COVERED,
    FAMILIES,
    SIMILAR,
    needs_kernels,
    plain_model,
    random_tokens,
    row_of,
    trees,
    write_checkpoint,
    write_varied,
)
from secondguess import load
from secondguess.checkpoint.loader import load_model, module_of, reference_module
from secondguess.checkpoint.memory import peak_memory
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.quantised import FP4_LEVELS
from secondguess.checkpoint.source import open_source
from secondguess.core import Draft
from secondguess.errors import (
    BadInputError,
    CheckpointError,
    OutOfMemoryError,
    SecondGuessError,
    UnsupportedModelError,
)
from secondguess.runtime.coverage import missing_kernels_reason, unsupported_reason
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.decoder import NativeDecoder, PackedDecoder
from secondguess.runtime.cpu.forward import KernelForward
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.cpu.sources import hash_sources
from secondguess.runtime.cpu.weights import (
    Arena,
    interleaved,
    pack_blocks,
    unpack_blocks,
)
from secondguess.runtime.decoder import families as runtime_families
from secondguess.runtime.decoder import fused
from secondguess.runtime.decoder.families import missing_weights
from secondguess.runtime.decoder.feed_forward import Experts
from secondguess.runtime.decoder.fused import fuse, fuse_for_kernels, probe_passes
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.decoder.stored import GroupedWeight, StoredModel, WeightRows
from secondguess.runtime.weight_format import (
    BFLOAT16,
    INT4,
    INT4_GROUPS,
    INT8,
    INT8_GROUPS,
    MXFP4,
    QUANTIZATIONS,
)

pytestmark = needs_kernels

TOKENS = torch.tensor([random_tokens(40, seed=6), random_tokens(40, seed=7)])
UNITS = [pytest.param(unit, id=unit.name) for unit in library.units()]
QUANTISED = [INT8, INT4, INT8_GROUPS]
every_format = pytest.mark.parametrize("weight_format", [BFLOAT16, *QUANTISED], ids=lambda each: each.name)
quantised = pytest.mark.parametrize("weight_format", QUANTISED, ids=lambda each: each.name)
by_name = pytest.mark.parametrize("name", QUANTIZATIONS)


@pytest.fixture(scope="module", params=COVERED)
def checkpoint(request, tmp_path_factory):
    return write_varied(request.param, tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module", params=["llama", "gemma3", "phi", "qwen3-moe-mixed"])
def some_checkpoint(request, tmp_path_factory):
    return write_varied(request.param, tmp_path_factory.mktemp("native"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_varied("llama", tmp_path_factory.mktemp("native"))


def native_runtime(path, weight_format=BFLOAT16, unit=None, hidden_layers=()):
    decoder = fuse(read_module(str(path), torch.bfloat16).eval(), packed=False)
    runtime = NativeRuntime(NativeDecoder(decoder, weight_format, unit))
    runtime.request_hidden_states(hidden_layers)
    return runtime


def family_of(model):
    return runtime_families.FAMILIES[model.config.model_type]


def error(logits, exact):
    return float((logits - exact).float().square().mean().sqrt())


@pytest.mark.parametrize("unit", UNITS)
def test_the_error_is_that_of_the_module_in_bfloat16(checkpoint, unit):
    rounded = read_module(str(checkpoint), torch.bfloat16).eval()
    exact = read_module(str(checkpoint), torch.bfloat16).float().eval()
    with torch.inference_mode():
        truth = exact(TOKENS, use_cache=False).logits
        of_module = rounded(TOKENS, use_cache=False).logits
    found = native_runtime(checkpoint, unit=unit).probe(TOKENS).logits
    assert found.dtype == torch.float32
    assert typical_error(found, truth) < 1.2 * typical_error(of_module, truth)


@pytest.mark.skipif(
    "amx" not in [unit.name for unit in library.units()], reason="this processor has no matrix tiles"
)
@quantised
def test_quantised_products_are_bit_identical_with_tiles_and_vectors(checkpoint, weight_format):
    """Sums of whole numbers are exact in either."""
    tiles, vectors = (native_runtime(checkpoint, weight_format, each) for each in library.units()[:2])
    assert torch.equal(tiles.probe(TOKENS).logits, vectors.probe(TOKENS).logits)


@pytest.mark.parametrize("name", SIMILAR)
def test_similar_families_have_the_error_of_their_module(name, tmp_path):
    path = write_varied(name, tmp_path)
    model = read_module(str(path), torch.bfloat16).eval()
    with torch.inference_mode():
        of_module = model(TOKENS, use_cache=False).logits
        truth = model.float()(TOKENS, use_cache=False).logits
    loaded = load_model(Checkpoint.resolve(path, dtype="bfloat16", device="cpu"))
    assert loaded.kind == "native"
    found = loaded.runtime.probe(TOKENS).logits
    assert typical_error(found, truth) < 1.2 * typical_error(of_module, truth)


@quantised
def test_quantised_weights_differ_by_rounding(checkpoint, weight_format):
    """Of the inputs, from a model of rounded weights; also of the head's weights, from that."""
    model = read_module(str(checkpoint), torch.bfloat16).eval()
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and name != "lm_head":
            module.weight.data = as_rounded(module.weight.data, weight_format).bfloat16()
        if name.endswith(".experts"):
            is_transposed = model.config.model_type == "gpt_oss"
            for weight in (*module.gate_up_proj.data, *module.down_proj.data):
                weight = weight.T if is_transposed else weight
                weight.copy_(as_rounded(weight, weight_format))
    expected = NativeRuntime(NativeDecoder(fuse(model, packed=False))).probe(TOKENS).logits
    found = native_runtime(checkpoint, weight_format).probe(TOKENS).logits
    assert not torch.equal(found, expected)
    assert typical_error(found, expected) < 0.1 * typical_error(expected, expected.mean())


@pytest.mark.parametrize("unit", UNITS)
@every_format
def test_a_tokens_bits_depend_only_on_its_prefix(checkpoint, weight_format, unit):
    """Not on the chunks of a prefill, the neighbours in a batch, the shape of a draft, nor the number of threads."""
    runtime = native_runtime(checkpoint, weight_format, unit)
    whole = runtime.probe(TOKENS[:1]).logits[0]
    tokens = TOKENS[0].tolist()
    before = torch.get_num_threads()
    try:
        for threads, chunk, place in ((1, 512, 3), (2, 7, 17), (3, 16, 33), (2, 1, 9)):
            torch.set_num_threads(threads)
            runtime.prefill_chunk = chunk
            row, neighbour = row_of(tokens[:place]), row_of(random_tokens(5 + place, seed=place))
            runtime.begin([neighbour, row])
            drafted = tokens[place : place + 6]
            chain = runtime.score([row], Draft.chains([drafted])).logits[0]
            assert torch.equal(chain, whole[place - 1 : place + 6])
            runtime.rewind([row], [place - 1])
            # the same path among siblings, in a batch
            tree = trees(([9, 9], [-1, 0]), ([8, drafted[0], 7, drafted[1], drafted[2]], [-1, -1, 1, 1, 3]))
            logits = runtime.score([neighbour, row], tree).logits[1]
            for node, depth in ((1, 1), (3, 2), (4, 3)):
                assert torch.equal(logits[node + 1], whole[place - 1 + depth])
            for each in (row, neighbour):
                runtime.release(each)
    finally:
        torch.set_num_threads(before)


CHANGES = {
    **{f"head of {size}": {"head_dim": size} for size in (6, 24, 64, 80, 128, 256)},
    "wide": {"hidden_size": 200, "intermediate_size": 328},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "scaled": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "one key head": {"num_key_value_heads": 1},
    "three key heads": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_other_shapes_have_the_same_bits_in_a_draft(change, tmp_path):
    """The error is that of the module, and a draft has the same bits as one forward pass."""
    config = FAMILIES["llama"]()
    for field, value in CHANGES[change].items():
        setattr(config, field, value)
    path = write_checkpoint(config, tmp_path)
    model = plain_model(path)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    rounded = read_module(str(path), torch.bfloat16).eval()
    with torch.inference_mode():
        truth = read_module(str(path), torch.bfloat16).float().eval()(TOKENS, use_cache=False).logits
        of_module = rounded(TOKENS, use_cache=False).logits
    runtime = native_runtime(path)
    whole = runtime.probe(TOKENS).logits
    assert error(whole, truth) < 1.2 * error(of_module, truth)
    row = row_of(TOKENS[1, :21].tolist())
    runtime.begin([row])
    drafted = runtime.score([row], Draft.chains([TOKENS[1, 21:].tolist()])).logits[0]
    assert torch.equal(drafted, whole[1, 20:])


def test_hidden_states_are_those_of_the_module(checkpoint):
    rounded = read_module(str(checkpoint), torch.bfloat16).eval()
    exact = read_module(str(checkpoint), torch.bfloat16).float().eval()
    with torch.inference_mode():
        of_module, truth = (
            each(TOKENS, output_hidden_states=True, use_cache=False).hidden_states
            for each in (rounded, exact)
        )
    found = native_runtime(checkpoint, hidden_layers=(0, 1, 2, -1)).probe(TOKENS).hidden
    assert torch.equal(found[0], of_module[0])
    assert torch.equal(found[2], found[-1])
    is_mixture = any(family_of(rounded).has_experts(rounded.config))
    size = typical_error if is_mixture else error  # of tokens that select the same experts
    for layer in (1, 2):
        assert size(found[layer], truth[layer]) < 1.2 * size(of_module[layer], truth[layer])


def test_a_released_runtime_can_be_used_again(llama):
    runtime = native_runtime(llama)
    tokens = TOKENS[0].tolist()
    logits = []
    for _ in range(2):
        row = row_of(tokens)
        runtime.begin([row])
        with pytest.raises(BadInputError, match="no row in the cache, got 1"):
            runtime.probe(TOKENS)
        logits.append(runtime.score([row], Draft.empty(1)).logits)
        runtime.free()
        assert runtime.cache.keys == []
    assert torch.equal(*logits)


@by_name
def test_quantised_weights_have_no_module(llama, name):
    loaded = load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", quantize=name))
    with pytest.raises(UnsupportedModelError, match=f"weights in {QUANTIZATIONS[name].bits} bits"):
        reference_module(loaded)


def test_int4_needs_the_kernels(llama, monkeypatch):
    assert Checkpoint.resolve(llama, dtype="float32", device="cpu", quantize="int4").runtimes == [
        "transformers"
    ]
    monkeypatch.setattr("secondguess.checkpoint.plan.can_quantise", lambda device: False)
    with pytest.raises(UnsupportedModelError, match=r"kernels run.*int4.*not float32.*int8"):
        Checkpoint.resolve(llama, dtype="float32", device="cpu", quantize="int4")
    with pytest.raises(UnsupportedModelError, match=r"int4.*runtime fused"):
        Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", quantize="int4", runtime="fused")


@by_name
def test_the_peak_memory_of_loading_quantised_weights_is_estimated(llama, name):
    need = Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", quantize=name).memory(0)
    assert need.loading > need.weights
    assert need.excess == need.loading - need.total


class Product(PackedDecoder):
    """Decoder without layers, whose head is one product."""

    num_layers = num_key_heads = head_size = 0

    def __init__(self, weight, weight_format, unit, held=None):
        """`held` are the bytes of the blocks in place of those that packing has written."""
        super().__init__(unit)
        self.rotaries, width = [], weight.width if isinstance(weight, WeightRows) else weight.shape[1]
        blocks = self._pack(weight, None, weight_format)
        if held is not None:
            blocks.tensors[-1].copy_(held)
        head = blocks.weight
        self.described = library.Decoder(width=width, head=head, amx=self.unit.has_tiles)
        self.multiply = KernelForward(self, 0).unembed


def typical_error(logits, exact):
    """The median of the tokens' errors: in bfloat16 a few may select other experts."""
    return float((logits.float() - exact.float()).norm(dim=-1).median())


def as_rounded(weight, weight_format):
    """Return a weight `[output, input]` as its encoding rounds it."""
    if weight_format is BFLOAT16:
        return weight
    padded = torch.nn.functional.pad(weight, (0, -weight.shape[1] % 64))
    return in_groups(padded, weight_format).dequantised()[:, : weight.shape[1]]


INT4_LEVELS = torch.tensor([0, 6, 11, 16, 21, 24, 27, 30, 33, 36, 39, 42, 47, 52, 57, 64], dtype=torch.uint8)


def in_groups(weight, weight_format):
    """Return a weight `[output, input]` in groups, rounded as `packing.h` does, with the same bits."""
    if weight_format.bits == 8:
        return in_8_bits(weight)
    groups = weight.float().view(len(weight), -1, 32)
    most, least = groups.amax(2, keepdim=True), groups.amin(2, keepdim=True)
    limit = torch.where(most < -least, least, most)
    levels = INT4_LEVELS.float() - 30
    nearest = (torch.arange(65)[:, None] - INT4_LEVELS.int()).abs().argmin(1)  # of two, the lower one
    least_error, scale = (
        torch.full(limit.shape, math.inf),
        (limit * (torch.tensor(1.0) / 34)).bfloat16().float(),
    )

    def codes(scale):
        whole = (groups * (1 / scale)).round().nan_to_num(-30).clamp(-30, 34)
        return nearest[whole.long() + 30]

    for last in (0.95, 1.0, 1.05, -1.1):
        tried = limit * (torch.tensor(last) / 34)
        for _ in range(2):
            tried = tried.bfloat16().float()
            found = levels[codes(tried)]
            difference = (groups.double() - found.double() * tried.double()).float()
            error = sum_in_order(difference, difference)
            scale = torch.where(error < least_error, tried, scale)
            least_error = torch.minimum(error, least_error)
            tried = sum_in_order(groups, found) / sum_in_order(found, found)
    found = codes(scale).to(torch.uint8).flatten(1)
    return GroupedWeight(found, 4, scale[..., 0], -30 * scale[..., 0], levels=INT4_LEVELS)


def sum_in_order(first, second):
    """Sum the products of two tensors over the last dimension, one after the other, as fused products and sums."""
    total = torch.zeros_like(first[..., :1])
    for a, b in zip(first.double().split(1, -1), second.double().split(1, -1), strict=True):
        total = (total.double() + a * b).float()  # rounded once
    return total


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("bits", "scale", "minimum"), [(8, 1, -128), (8, 1, -100), (6, 2, -3), (4, 1, 2)])
def test_sums_of_stored_codes_are_exact(bits, scale, minimum, unit):
    """Whole inputs, and codes, scales and minima that are exact, at the limits of 16-bit sums."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 2**bits, (33, 192), generator=generator)
    codes[0], codes[1] = 0, 2**bits - 1
    states = torch.randint(-127, 128, (17, 192), generator=generator)
    states[:, 31::32], states[4] = 127, 127
    expected = (states @ (scale * codes + minimum).T).float()
    parameters = (torch.full((33, 6), float(each)) for each in (scale, minimum))
    stored = GroupedWeight(codes.to(torch.uint8), bits, *parameters)
    for weight_format in (INT8_GROUPS, INT4_GROUPS)[: 2 if bits == 4 else 1]:
        multiply = Product(stored.rows(), weight_format, unit).multiply
        for num_rows in range(1, 18):
            assert torch.equal(multiply(states[-num_rows:].bfloat16()), expected[-num_rows:])


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("weight_format", "levels", "zero"), [(INT4, INT4_LEVELS, 30), (MXFP4, FP4_LEVELS, 12)]
)
def test_sums_of_levels_are_exact(weight_format, levels, zero, unit):
    """Whole inputs, and scales that are exact, at the limits of 16-bit sums."""
    generator = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 16, (96, 64), generator=generator, dtype=torch.uint8)
    codes[0], codes[1] = levels.argmax(), levels.argmin()
    states = torch.randint(-127, 128, (17, 64), generator=generator)
    states[:, 31::32], states[4], states[5] = 127, 127, -127
    scale = torch.tensor([0.5, 2.0]).repeat(96, 1)
    expected = (levels.float() - zero)[codes.long()] * scale.repeat_interleave(32, 1)
    stored = GroupedWeight(codes, 4, scale, -zero * scale, levels=levels)
    assert torch.equal(stored.dequantised(), expected)
    multiply = Product(expected, weight_format, unit, in_blocks(stored, weight_format)).multiply
    if weight_format is MXFP4:
        packed = pack_blocks(stored.rows(), None, Arena(), MXFP4)
        assert torch.equal(packed.tensors[-1], in_blocks(stored, MXFP4))
        assert torch.equal(unpack_blocks(packed), expected)
    for num_rows in range(1, 18):
        found = multiply(states[-num_rows:].bfloat16())
        assert torch.equal(found, states[-num_rows:].float() @ expected.T)


def test_levels_of_mxfp4_are_those_of_the_standard():
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    assert torch.equal((FP4_LEVELS.float() - 12) / 2, torch.cat((magnitudes, -magnitudes)))


@pytest.mark.parametrize("unit", UNITS)
@every_format
@pytest.mark.parametrize("num_rows", [1, 3, 5, 9, 10, 11, 16, 17, 33, 70])
@pytest.mark.parametrize("shape", [(96, 64), (33, 200), (300, 48)])
def test_products_equal_torch(shape, num_rows, weight_format, unit):
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator).bfloat16()
    states = torch.randn(num_rows, shape[1], generator=generator).bfloat16()
    expected = states.double() @ as_rounded(weight, weight_format).double().T
    multiply = Product(weight, weight_format, unit).multiply
    found = multiply(states)
    assert all(
        torch.equal(multiply(state[None])[0], of_row) for state, of_row in zip(states, found, strict=True)
    )
    found = found.double()
    tolerance = 0.02 if weight_format.is_quantised else 0.006  # quantised inputs
    assert (found - expected).abs().max() < tolerance * expected.abs().max()


@every_format
def test_a_weight_that_is_not_a_number_shows_in_its_output(weight_format):
    weight = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    weight[8, 35] = math.nan
    found = Product(weight, weight_format, library.units()[0]).multiply(torch.ones(3, 64).bfloat16())
    assert found.isnan().any(0).nonzero().flatten().tolist() == [8]


def test_interleaved_rows_are_padded_with_zeros():
    found = interleaved(torch.cat((torch.full((20,), 1.0), torch.full((20,), 2.0))))
    assert found.tolist() == [1.0] * 16 + [2.0] * 16 + [1.0] * 4 + [0.0] * 12 + [2.0] * 4 + [0.0] * 12


def test_a_block_contains_every_weight_once():
    weight = torch.arange(40 * 70).reshape(40, 70).bfloat16()
    blocks = pack_blocks(weight, None, Arena(), weight_format=BFLOAT16)
    assert (blocks.weight.num_outputs, blocks.weight.num_inputs) == (40, 128)
    held = blocks.tensors[-1].view(torch.bfloat16)
    assert held.numel() == 64 * 128
    assert sorted(held[held != 0].tolist()) == sorted(weight[weight != 0].tolist())


def in_8_bits(weight):
    """Round a weight to whole numbers with the largest magnitude of a group at most 127, and scales in float16."""
    groups = weight.float().view(len(weight), -1, 32)
    exact = (groups.abs().amax(2) / 127).clamp_min(2.0**-24)
    nearest = exact.half()
    scale = torch.where(
        nearest.float() < exact, (nearest.view(torch.int16) + 1).view(torch.float16), nearest
    ).float()
    numbers = (groups / scale[:, :, None]).round() + 128
    return GroupedWeight(numbers.to(torch.uint8).flatten(1), 8, scale, -128 * scale)


def in_slices(rows):
    """The bytes of rows `[output, input]`: per block of 32 outputs, 4 bytes of each in turn."""
    return rows.contiguous().view(torch.uint8).view(-1, 32, rows[0].nbytes // 4, 4).transpose(1, 2).flatten()


def in_blocks(weight, weight_format):
    """The bytes of a weight in groups: per block of 32 outputs and group, the codes in slices and then the parameters."""
    codes, minimum = weight.codes.view(len(weight.codes), -1, 32), weight.minimum
    if weight_format.bits == 8:
        codes, minimum = codes ^ 128, minimum + 128 * weight.scale
    parameters = [weight.scale.bfloat16() if weight_format.has_levels else weight.scale.half()]
    parameters += [minimum.half()] if weight_format.has_minima else []
    fours = codes.reshape(-1, 32, codes.shape[1], 8, 4)
    if weight_format.bits == 4:
        low, high = fours.view(*fours.shape[:3], 4, 2, 4).unbind(4)
        fours = low | high << 4
    slices = fours.permute(0, 2, 3, 1, 4).flatten(2)
    tables = [
        each.view(-1, 32, codes.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)
        for each in parameters
    ]
    return torch.cat((slices, *tables), 2).flatten()


@pytest.mark.parametrize("unit", UNITS)
@every_format
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("shape", "gated"), [((96, 64), False), ((33, 200), False), ((300, 48), False), ((74, 90), True)]
)
def test_weights_are_packed_as_defined(shape, gated, dtype, weight_format, unit, monkeypatch):
    monkeypatch.setattr(library, "units", lambda: (unit,))
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    weight[5], weight[6, :32], weight[7] = 0, 3, weight[7].abs()
    weight[8, 3], weight[8, 20] = 4, -4
    found = pack_blocks(weight, None, Arena(), weight_format, gated)
    rows = torch.stack([interleaved(column) for column in weight.unbind(1)], 1) if gated else weight
    rows = torch.nn.functional.pad(rows, (0, -shape[1] % 64, 0, -len(rows) % 32))
    if weight_format is BFLOAT16:
        assert torch.equal(found.tensors[-1], in_slices(rows.bfloat16()))
    else:
        rounded = in_groups(rows, weight_format)
        assert torch.equal(found.tensors[-1], in_blocks(rounded, weight_format))
        assert torch.equal(unpack_blocks(found), rounded.dequantised())


@pytest.mark.parametrize("size", [3e-6, 1e-3, 1.0, 1e3])
def test_a_weight_in_8_bits_is_within_half_a_step(size):
    weight = size * torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
    found = unpack_blocks(pack_blocks(weight, None, Arena(), INT8))[:6]
    steps = (found - weight).view(6, 2, 32).abs() / in_8_bits(weight).scale[:, :, None]
    assert steps.max() <= 0.5001
    assert (found - weight).norm() < (0.2 if size < 1e-4 else 0.008) * weight.norm()


@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e12])
def test_levels_have_a_smaller_error_than_even_steps(size):
    weight = size * torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
    groups = weight.view(64, -1, 32)
    step = groups.abs().amax(2, keepdim=True) / 7.5
    even = (((groups / step - 0.5).round() + 0.5) * step).flatten(1)  # 16 levels on both sides of 0
    packed = pack_blocks(weight, None, Arena(), INT4).tensors[-1]
    assert torch.equal(packed, in_blocks(in_groups(weight, INT4), INT4))
    found = (as_rounded(weight, INT4) - weight).double().norm()
    assert found < 0.88 * (even - weight).double().norm()
    assert found < 0.08 * weight.double().norm()


def test_an_arena_accepts_tensors_larger_than_its_pieces(monkeypatch):
    monkeypatch.setattr("secondguess.runtime.cpu.weights.ARENA", 256)
    arena = Arena()
    held = [arena.allocate(4 * count).view(torch.float32).fill_(count) for count in (3, 1000, 5, 60)]
    assert [set(each.tolist()) for each in held] == [{3.0}, {1000.0}, {5.0}, {60.0}]


def test_bfloat16_models_are_native_and_described_as_such(llama):
    loaded = load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu"))
    assert (loaded.kind, loaded.runtime_description) == ("native", "native")
    drafting = load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", drafts=True))
    assert drafting.runtime_description == "native, weights in 8 bits"
    small = load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", quantize="int8"))
    assert small.runtime_description == "native, weights in 8 bits"
    assert load_model(Checkpoint.resolve(llama, dtype="float32", device="cpu")).kind == "fused"


def test_a_draft_model_needs_half_the_memory(llama):
    plain, drafting = (
        Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", drafts=drafts).memory()
        for drafts in (False, True)
    )
    linear = sum(
        module.weight.numel() for module in plain_model(llama).modules() if type(module) is torch.nn.Linear
    )
    assert 0.9 * linear < plain.weights - drafting.weights <= linear


def test_weights_are_held_once(llama):
    model = read_module(str(llama), torch.bfloat16).eval()
    released = [weakref.ref(model.model.layers[0]), weakref.ref(model.model.layers[1].mlp.down_proj.weight)]
    decoder = fuse(model, packed=False)
    released += [weakref.ref(decoder.layers[1].feed_forward.inner.weight)]
    made = NativeDecoder(decoder)
    gc.collect()
    assert made.num_layers == 2
    assert all(reference() is None for reference in released)


def test_weights_packed_from_the_files_are_those_of_the_module(checkpoint, tmp_path):
    """But of gpt-oss in bfloat16, whose experts are joined in its files."""
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    for file in tmp_path.glob("*.safetensors"):
        rounded = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    checkpoint, source = tmp_path, open_source(str(tmp_path))
    weights = source.weights(torch.device("cpu"))
    assert bool(missing_weights(source.config, weights)) == (source.config.model_type == "gpt_oss")
    if source.config.model_type == "gpt_oss":
        return
    decoder = FusedDecoder(StoredModel(source.config, weights, torch.bfloat16), packed=False)
    found = NativeRuntime(NativeDecoder(decoder)).probe(TOKENS).logits
    assert torch.equal(found, native_runtime(checkpoint).probe(TOKENS).logits)


def test_vectors_of_files_are_not_rounded(tmp_path):
    """Norms and biases are in float32 in GGUF files."""
    source = open_source(str(write_varied("qwen2", tmp_path)))
    model = StoredModel(source.config, source.weights(torch.device("cpu")), torch.bfloat16)
    assert model.model.norm.weight.dtype == model.model.layers[0].self_attn.q_proj.bias.dtype == torch.float32
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16


def test_an_expert_of_another_size_is_refused(tmp_path):
    """One that the probe does not select may be too large for the buffers."""
    path = write_varied("mixtral", tmp_path)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    tensors[name] = torch.zeros(tensors[name].shape[0], 1000)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"w2.weight of shape \(32, 1000\), not \(32, 48\)"):
        load_model(Checkpoint.resolve(path, dtype="bfloat16", device="cpu"))


def test_more_selected_experts_than_there_are_is_no_case_for_the_kernels():
    config = FAMILIES["mixtral"]()
    config.num_experts_per_tok = 5
    assert (
        unsupported_reason("native", config, torch.bfloat16, torch.device("cpu"))
        == "5 of 4 experts are to be selected"
    )


@pytest.mark.parametrize("unit", UNITS)
def test_experts_are_those_of_the_largest_logits(unit, tmp_path):
    """With a router of ones and minus ones the experts are known: only these change a token's logits."""
    path = write_varied("mixtral", tmp_path)
    model = read_module(str(path), torch.bfloat16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight[:] = torch.tensor([[0.0], [1.0], [0.0], [-1.0]])
            layer.mlp.experts.down_proj[:2] = 0  # experts 0 and 1, or 3 and 0, by the sign of the sum
            layer.mlp.experts.down_proj[3] = 0
    decoder = fuse(model.eval(), packed=False)
    found = NativeRuntime(NativeDecoder(decoder, unit=unit)).probe(TOKENS).logits
    without = read_module(str(path), torch.bfloat16)
    with torch.no_grad():
        for layer in without.model.layers:
            layer.mlp.experts.down_proj.zero_()
    expected = (
        NativeRuntime(NativeDecoder(fuse(without.eval(), packed=False), unit=unit)).probe(TOKENS).logits
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("unit", UNITS)
def test_layers_can_be_run_in_two_parts(some_checkpoint, unit):
    """A draft is read ahead as it grows, and scored from there: in the bits of one forward, for rows of any length."""
    whole, parts = (native_runtime(some_checkpoint, unit=unit, hidden_layers=(0, 2, -1)) for _ in range(2))
    for drafts in GROWING:
        rows = {
            runtime: [row_of(TOKENS[0].tolist()[:20]), row_of(TOKENS[1].tolist()[:13])]
            for runtime in (whole, parts)
        }
        for runtime, those in rows.items():
            runtime.begin(those)
            if runtime is parts:
                for draft in drafts:
                    # in another order than their slots'
                    parts.run_first_layers(those[::-1], draft.select(torch.tensor([1, 0])), 1)
        expected, found = (runtime.score(those, drafts[-1]) for runtime, those in rows.items())
        is_real = torch.cat(
            (torch.ones(2, 1, dtype=torch.bool), drafts[-1].mask), 1
        )  # values at padding differ
        assert torch.equal(found.logits[is_real], expected.logits[is_real])
        for layer in whole.hidden_layers:
            assert torch.equal(found.hidden[layer][is_real], expected.hidden[layer][is_real])
        for runtime, those in rows.items():
            for row in those:
                runtime.release(row)


GROWING = [
    [
        Draft.chains([[], []]),
        Draft.chains([[5], [6]]),
        Draft.chains([[5, 7], [6]]),
        Draft.chains([[5, 7], [6]]),
    ],
    [
        Draft.chains([[], []]),
        trees(([5, 6], [-1, -1]), ([7, 8], [-1, -1])),
        trees(([5, 6, 9, 4], [-1, -1, 0, 1]), ([7, 8, 3], [-1, -1, 1])),
    ],
    [
        Draft.chains([[], []]),
        trees(([5, 6], [-1, -1]), ([], [])),
        trees(([5, 6, 9], [-1, -1, 0]), ([0], [-1])),
    ],
]
"""Chains and trees, as drafters show them more and more of; at last a row that somebody else drafted for, with the token that
padding is made of."""


def test_first_layers_are_not_run_again(llama):
    """The rows' slots are not in their order, since an earlier row has ended."""
    runtime = native_runtime(llama)
    calls = []
    run = runtime.forward._kernels.secondguess_run

    class Counting:
        secondguess_free = runtime.forward._kernels.secondguess_free

        @staticmethod
        def secondguess_run(decoder, forward, workspace):
            calls.append((forward.num_tokens, forward.first_layer, forward.last_layer))
            return run(decoder, forward, workspace)

    ended, *rows = (row_of(TOKENS[0].tolist()[:20]) for _ in range(3))
    runtime.begin([ended, *rows])
    runtime.release(ended)
    assert [runtime.slots[row].slot for row in rows] == [1, 0]
    runtime.forward._kernels = Counting
    two = torch.tensor([0, 0])
    for draft in GROWING[0][:3]:
        runtime.run_first_layers(rows, draft.select(two), 1)
    runtime.score(rows, GROWING[0][2].select(two))
    assert calls == [(2, 0, 1), (2, 0, 1), (2, 0, 1), (6, 1, runtime.num_layers)]


@every_format
def test_embeddings_and_head_are_shared(checkpoint, weight_format):
    runtime = native_runtime(checkpoint, weight_format, hidden_layers=(0, -1))
    read, embedding_and_head = runtime.probe(TOKENS), runtime.embedding_and_head()
    assert torch.equal(embedding_and_head.embed(TOKENS), read.hidden[0])
    difference = (
        embedding_and_head.unembed(read.hidden[-1]) - read.logits
    )  # of hidden states rounded to bfloat16
    assert difference.norm() < 0.02 * read.logits.norm()
    assert embedding_and_head.unembed(read.hidden[-1][:, :0]).shape == (2, 0, runtime.vocab_size)


def test_logits_of_many_states_leave_room_for_the_experts_of_later_passes(tmp_path):
    """The head shares the buffers of the layers; without theirs, a pass would write beyond them."""
    path = write_varied("qwen3-moe-mixed", tmp_path)
    fresh, used = native_runtime(path), native_runtime(path)
    embedding_and_head = used.embedding_and_head()
    embedding_and_head.unembed(torch.zeros(200, embedding_and_head.width, dtype=embedding_and_head.dtype))
    tokens = TOKENS.repeat(1, 10)[:, :90]
    assert torch.equal(used.probe(tokens).logits, fresh.probe(tokens).logits)


def test_gradients_reach_through_a_tied_head(tmp_path):
    config = FAMILIES["llama"]()
    config.tie_word_embeddings = True
    embedding_and_head = native_runtime(write_checkpoint(config, tmp_path)).embedding_and_head()
    states = torch.randn(3, embedding_and_head.width, dtype=embedding_and_head.dtype)
    logits = embedding_and_head.unembed(states.requires_grad_())
    logits.sum().backward()
    assert states.grad.abs().sum() > 0
    error = (logits.detach().float() - embedding_and_head.unembed(states.detach())).abs().max()
    assert error < 0.02 * logits.detach().abs().max()


def test_layers_can_be_left_out(some_checkpoint):
    runtime = native_runtime(some_checkpoint)
    fewer = runtime.skip_layers([0])
    decoder = fuse(read_module(str(some_checkpoint), torch.bfloat16).eval(), packed=False)
    expected = NativeRuntime(NativeDecoder(decoder.without([0])))
    assert fewer.num_layers == runtime.num_layers - 1
    assert torch.equal(fewer.probe(TOKENS).logits, expected.probe(TOKENS).logits)
    assert not torch.equal(fewer.probe(TOKENS).logits, runtime.probe(TOKENS).logits)
    for wrong in ([runtime.num_layers], list(range(runtime.num_layers))):
        with pytest.raises(BadInputError, match="to be left out"):
            runtime.skip_layers(wrong)


def test_without_kernels_torch_is_used_with_a_warning(llama, monkeypatch, caplog):
    monkeypatch.setattr(library, "units", lambda: ())
    assert load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu")).kind == "fused"
    (warning,) = caplog.messages
    assert "this installation of secondguess has no kernels" in warning
    assert "install its wheel for this processor" in warning
    with pytest.raises(UnsupportedModelError, match="native runtime covers"):
        load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", runtime="native"))


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("sys.platform", "darwin", "the kernels need Linux"),
        ("secondguess.runtime.cpu.library.processor_supports", lambda kind: False, "has neither AVX2"),
    ],
)
def test_missing_kernels_are_explained_by_the_system(attribute, value, expected, monkeypatch):
    monkeypatch.setattr(attribute, value)
    assert expected in missing_kernels_reason()


def test_kernels_with_other_results_are_not_used(llama, monkeypatch):
    made = NativeDecoder.__init__

    def slightly_off(self, *arguments, **options):
        made(self, *arguments, **options)
        self.described.scaling *= 3

    monkeypatch.setattr(NativeDecoder, "__init__", slightly_off)
    assert load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu")).kind == "fused"


def test_kernels_of_other_sources_are_refused(monkeypatch):
    """Also where the structures have kept their sizes."""
    monkeypatch.setattr(library, "hash_sources", lambda _: "of other sources")
    with pytest.raises(SecondGuessError, match=r"got others in .*_(avx|neon).*build_ext --inplace --force"):
        library.units.__wrapped__()


def test_kernels_without_their_sources_are_called(monkeypatch):
    monkeypatch.setattr(library, "hash_sources", lambda _: None)
    assert [unit.name for unit in library.units.__wrapped__()] == [unit.name for unit in library.units()]


def test_kernels_built_from_other_sources_are_not_called(monkeypatch):
    class Larger(ctypes.Structure):
        _fields_ = [("weight", library.Weight), ("more", ctypes.c_int64)]

    monkeypatch.setattr(library, "Weight", Larger)
    with pytest.raises(SecondGuessError, match="rebuild"):
        library.units.__wrapped__()


def test_kernels_that_lack_a_function_are_refused(monkeypatch):
    """As those that were built from older sources do."""
    monkeypatch.setattr(ctypes, "CDLL", lambda path: object())
    with pytest.raises(SecondGuessError, match="rebuild"):
        library.units.__wrapped__()


def test_every_header_counts_in_the_hash_of_the_sources(tmp_path):
    assert hash_sources(tmp_path) is None
    found = set()
    for name, text in (("a.h", "1"), ("a.h", "2"), ("b.h", ""), ("b.h", "3")):
        (tmp_path / name).write_text(text)
        found.add(hash_sources(tmp_path))
    assert len(found) == 4


def test_kernels_show_only_their_own_functions():
    """So that the kernels of two kinds of processors share neither code nor threads."""
    kernels = library.units()[0].kernels
    assert hasattr(kernels, "secondguess_run")
    assert not hasattr(kernels, "_ZN4Team8instanceE")


@pytest.mark.parametrize(("error", "passes"), [(0.02, True), (0.04, False), (math.nan, False)])
def test_the_error_of_a_probe_is_a_root_mean_square(error, passes, caplog):
    expected = torch.randn(2, 16, 300, generator=torch.Generator().manual_seed(0))
    assert probe_passes("fused", expected * (1 + error), expected, 0.03) == passes
    assert ("the fused runtime is not used" in caplog.text) == (not passes)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen3-moe-mixed"])
def test_a_probe_forces_the_experts(name, unit, tmp_path):
    """Rounding would make some tokens select others."""
    model = read_module(str(write_varied(name, tmp_path)), torch.bfloat16).eval()
    checked = fuse_for_kernels(model)
    config, generator = model.config, torch.Generator().manual_seed(1)
    others = {
        layer: torch.rand(2, 16, config.num_experts, generator=generator).argsort(-1)[
            ..., : selected.shape[-1]
        ]
        for layer, selected in checked.experts.items()
    }
    with torch.inference_mode(), fused._forcing_experts(checked.decoder, others):
        positions = torch.arange(16).expand(2, -1)
        expected = fused._prefill(fused.FusedRuntime(checked.decoder), checked.tokens, positions, 16)
    runtime = NativeRuntime(NativeDecoder(checked.decoder, unit=unit))
    found = runtime.probe_with_experts(checked.tokens, others)
    assert probe_passes("native", found, expected, 0.03)
    assert not probe_passes("native", runtime.probe(checked.tokens).logits, expected, 0.03)
    as_the_module = runtime.probe_with_experts(checked.tokens, checked.experts)
    assert probe_passes("native", as_the_module, checked.logits, 0.03)


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "qwen3-moe-mixed"])
def test_another_selection_of_experts_fails_the_probe(name, tmp_path, monkeypatch, caplog):
    """The forced experts give the right logits."""
    path = str(write_varied(name, tmp_path))
    monkeypatch.setattr(Experts, "select", lambda self, probs: (-probs).topk(self.num_selected).indices)
    assert fuse_for_kernels(read_module(path, torch.bfloat16).eval()) is None
    assert "expected tokens to select at least 75 % of the model's experts" in caplog.text
    assert fuse(read_module(path, torch.float32).eval(), packed=False) is None


@pytest.mark.parametrize("name", ["mixtral", "gpt-oss", "olmoe"])
def test_wrong_routing_weights_fail_the_probe(name, tmp_path, monkeypatch):
    model = read_module(str(write_varied(name, tmp_path)), torch.bfloat16).eval()
    mixture = runtime_families.FAMILIES[model.config.model_type].experts
    family = replace(
        runtime_families.FAMILIES[model.config.model_type],
        experts=replace(
            mixture, normalises_routing_weights=lambda config: not mixture.normalises_routing_weights(config)
        ),
    )
    monkeypatch.setitem(runtime_families.FAMILIES, model.config.model_type, family)
    assert fuse_for_kernels(model) is None


def test_a_mixture_with_adapters_runs_as_a_module(tmp_path):
    path = write_varied("mixtral", tmp_path)
    model = read_module(str(path), torch.float32).eval()

    class Adapted(type(model.model.layers[0].mlp.experts)):
        pass

    Adapted.__module__ = "adapters"
    model.model.layers[0].mlp.experts.__class__ = Adapted
    assert fuse(model, packed=False) is None


def test_one_logit_further_off_than_the_tolerance_passes_a_probe(caplog):
    """The largest of many errors of a correct model may be: 2 of 1,035 random models were refused for it."""
    expected = torch.randn(2, 16, 300, generator=torch.Generator().manual_seed(0))
    found = expected.clone()
    found[0, 0, 0] += 0.031 * expected.abs().max()
    assert probe_passes("fused", found, expected, 0.03)
    assert caplog.text == ""


def test_threads_of_a_forward_are_those_of_the_quota(llama, monkeypatch):
    runtime = native_runtime(llama)
    monkeypatch.setattr("secondguess.runtime.cpu.forward.num_threads", lambda: 3)
    runtime.probe(TOKENS)
    assert runtime.forward._arguments.num_threads == 3


def test_auto_without_matching_kernels_is_as_without_kernels(llama, monkeypatch):
    monkeypatch.setattr("secondguess.checkpoint.plan.has_bfloat16", lambda _: False)
    assert load_model(Checkpoint.resolve(llama, device="cpu")).dtype == "bfloat16"
    monkeypatch.setattr("secondguess.checkpoint.loader._native_runtime", lambda *_: None)
    found = load_model(Checkpoint.resolve(llama, device="cpu"))
    assert (found.kind, found.dtype) == ("fused", "float32")


def test_prompts_are_checked_against_the_cache_in_use(llama, monkeypatch):
    """With float32 instead of the requested bfloat16 a token needs twice the bytes."""
    monkeypatch.setattr("secondguess.checkpoint.plan.has_bfloat16", lambda _: False)
    picked = load(llama, "none", device="cpu").cache_bytes
    monkeypatch.setattr("secondguess.checkpoint.loader._native_runtime", lambda *_: None)
    assert load(llama, "none", device="cpu").cache_bytes == 2 * picked


def test_the_memory_estimate_is_that_of_the_requested_runtime(llama, monkeypatch):
    monkeypatch.setattr("secondguess.checkpoint.plan.has_bfloat16", lambda _: False)
    needs = {
        kind: Checkpoint.resolve(llama, device="cpu", runtime=kind).memory() for kind in ("auto", "fused")
    }
    assert needs["fused"].cache == 2 * needs["auto"].cache
    assert needs["fused"].weights > needs["auto"].weights


def test_memory_is_checked_again_before_weights_are_read_again(llama, monkeypatch):
    """Those of a draft model would have taken 8 bits each."""
    checkpoint = Checkpoint.resolve(llama, dtype="bfloat16", device="cpu", drafts=True)
    enough = peak_memory([checkpoint.memory()])
    monkeypatch.setattr("secondguess.checkpoint.memory.available_memory", lambda _: enough)
    assert load_model(checkpoint).kind == "native"
    monkeypatch.setattr("secondguess.checkpoint.loader._native_runtime", lambda *_: None)
    with pytest.raises(OutOfMemoryError, match="expected models that fit"):
        load_model(checkpoint)


def test_a_module_that_fails_its_check_is_freed_before_another_is_read(llama, monkeypatch):
    read, modules = module_of, []

    def read_one(checkpoint):
        gc.collect()
        assert not any(each() for each in modules)
        module = read(checkpoint)
        modules.append(weakref.ref(module))
        return module

    monkeypatch.setattr("secondguess.checkpoint.loader.module_of", read_one)
    monkeypatch.setattr("secondguess.checkpoint.loader._native_runtime", lambda *_: None)
    monkeypatch.setattr("secondguess.runtime.decoder.fused.fuse", lambda *_: None)
    assert load_model(Checkpoint.resolve(llama, dtype="bfloat16", device="cpu")).kind == "transformers"
    assert len(modules) == 2


def test_running_out_of_memory_between_layers_is_reported(llama, monkeypatch):
    runtime = native_runtime(llama)

    class Full:
        secondguess_free = runtime.forward._kernels.secondguess_free

        @staticmethod
        def secondguess_run(*_):
            return 1

    monkeypatch.setattr(runtime.forward, "_kernels", Full)
    with pytest.raises(OutOfMemoryError, match="forward over 80 tokens"):
        runtime.probe(TOKENS)


def test_a_token_outside_the_vocabulary_is_refused(llama):
    runtime = native_runtime(llama)
    for token in (-1, 300):
        with pytest.raises(BadInputError, match=f"token ids from 0 to 299, got .*{token}"):
            runtime.probe(torch.tensor([[5, token]]))


def test_the_reason_for_not_using_the_kernels_is_given():
    config = FAMILIES["llama"]()
    place = torch.device("cpu")
    assert unsupported_reason("native", config, torch.bfloat16, place) is None
    assert "not float32" in unsupported_reason("native", config, torch.float32, place)
    assert "not on cuda" in unsupported_reason("native", config, torch.bfloat16, torch.device("cuda"))
    config.head_dim = 1024
    assert "heads of 1024" in unsupported_reason("native", config, torch.bfloat16, place)
    assert "gpt2 is not among" in unsupported_reason("native", FAMILIES["gpt2"](), torch.bfloat16, place)


@pytest.mark.parametrize("hidden_layers", [(), (1, -1)])
@pytest.mark.parametrize("is_tree", [False, True], ids=["chains", "trees"])
def test_rows_of_different_lengths_are_run_without_padding(
    some_checkpoint, hidden_layers, is_tree, monkeypatch
):
    """Drafts of different lengths, and rows that have to catch up: each row's bits are those of the row alone."""
    runtime = native_runtime(some_checkpoint, hidden_layers=hidden_layers)
    call, num_tokens = runtime.forward, []
    monkeypatch.setattr(
        runtime,
        "forward",
        lambda cache, inputs: num_tokens.append(inputs.tokens.numel()) or call(cache, inputs),
    )
    chains = [[5, 9, 2, 7, 3], [], [8], [4, 4, 1]]
    draft = Draft.chains(chains)
    if is_tree:
        parents = torch.tensor([[-1, -1, 0, 1, 1], [-1] * 5, [-1] * 5, [-1, 0, 0, -1, -1]])
        draft = Draft(draft.tokens, parents, draft.lengths)
    rows = [row_of(random_tokens(10 + number, seed=number)) for number in range(4)]
    runtime.begin(rows)
    rows[2].tokens += [3, 1, 4]
    del num_tokens[:]
    together = runtime.score(rows, draft)
    assert num_tokens == [sum(len(chain) + 1 for chain in chains) + 3]
    assert torch.isfinite(together.logits).all()
    for number, row in enumerate(rows):
        alone_row, alone_draft = row_of(list(row.tokens)), draft.select(torch.tensor([number]))
        alone_runtime = native_runtime(some_checkpoint, hidden_layers=hidden_layers)
        alone_runtime.begin([alone_row])
        alone = alone_runtime.score([alone_row], alone_draft)
        num_queries = len(chains[number]) + 1
        assert torch.equal(together.logits[number, :num_queries], alone.logits[0, :num_queries])
        for layer in hidden_layers:
            found, expected = together.hidden[layer][number], alone.hidden[layer][0]
            assert torch.equal(found[:num_queries], expected[:num_queries])
