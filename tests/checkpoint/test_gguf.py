"""GGUF files, written by gguf's own writer: dequantised by Transformers, with codes kept or rounded to 8 bits."""

from __future__ import annotations

import random
import tracemalloc
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor, nn

from checkpoints import random_llama
from families import needs_kernels, row_of
from gguf_files import WIDTH, blocks, finish, write_model, writer_for
from gguf_files import write_llama as write
from secondguess.checkpoint.gguf.file import GgufFile
from secondguess.checkpoint.gguf.weights import GgufWeights
from secondguess.checkpoint.loader import load_model, module_of
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.source import open_source
from secondguess.core import Draft
from secondguess.errors import BadInputError, CheckpointError, SecondGuessError
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.weights import Arena, pack_blocks, unpack_blocks
from secondguess.runtime.weight_format import BFLOAT16, INT4_GROUPS, INT8, INT8_GROUPS

TOKENS = [5, 6, 7, 8, 9, 40, 41]


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "mixed", "tied", "bits"),
    [
        ("Q4_0", None, False, 4),
        ("Q4_1", "Q6_K", False, 4),
        ("Q8_0", None, False, 8),
        ("Q4_K", "Q6_K", True, 4),
        ("Q5_K", "Q5_0", False, 8),
        ("F16", None, False, None),
    ],
)
def test_logits_are_those_of_the_dequantised_weights(kind, mixed, tied, bits, tmp_path):
    file, model = write(tmp_path, kind, mixed, tied)
    exact = Checkpoint.resolve(file, dtype="float32", device="cpu", runtime="transformers")
    state = module_of(exact).state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    loaded = load_model(Checkpoint.resolve(file, device="cpu"))
    description = "native" if bits is None else f"native, weights in {bits} bits"
    assert (loaded.runtime_description, loaded.end_tokens) == (description, frozenset({0}))
    assert loaded.tokenizer.decode(loaded.encode("def f(x):")) == "def f(x):"
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0, -1]
    row = row_of(TOKENS)
    loaded.runtime.begin([row])
    found = loaded.runtime.score([row], Draft.empty(1)).logits[0, 0]
    assert (found - expected).norm() < (0.04 if bits is None else 0.06) * expected.norm()


@needs_kernels
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_that_are_stored_quantised_are_not_quantised_again(quantize, tmp_path):
    file, _ = write(tmp_path, "Q4_K", "Q6_K", tied=True)
    with pytest.raises(BadInputError, match="whose weights are all stored quantised"):
        Checkpoint.resolve(file, device="cpu", quantize=quantize)
    (tmp_path / "other").mkdir()
    file, _ = write(tmp_path / "other", "Q8_0")  # its embeddings and its head are not
    assert Checkpoint.resolve(file, device="cpu", quantize=quantize).runtimes[0] == "native"


LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama_3_factors(size: int) -> Tensor:
    """Return the factors that llama.cpp's converter writes for a head of this size."""
    frequencies = 10000.0 ** -(torch.arange(0, size, 2) / size)
    wavelengths = 2 * torch.pi / frequencies
    smooth = ((8192 / wavelengths - 1) / 3).clamp(0, 1)
    return 1 / ((1 - smooth) / 8 + smooth)


def test_the_rope_scaling_of_llama_3_is_read(tmp_path):
    """Transformers ignores the factors, which are all that the file has."""
    factors = llama_3_factors(64)
    assert 1 < factors[-8:].min() < factors.max() == 8
    file, _ = write(tmp_path, "Q8_0", rope_factors=factors)
    checkpoint = Checkpoint.resolve(file, dtype="float32", device="cpu")
    assert checkpoint.config.rope_parameters == LLAMA_3
    assert module_of(checkpoint).config.rope_parameters == LLAMA_3
    (tmp_path / "other").mkdir()
    file, _ = write(tmp_path / "other", "Q8_0", rope_factors=factors.sqrt())
    with pytest.raises(CheckpointError, match=r"factors \(1 to 2.83\) that are not Llama 3's"):
        Checkpoint.resolve(file, device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_number_of_heads_that_does_not_fit_the_weights_is_refused(dtype, tmp_path):
    model = random_llama(3, hidden_size=WIDTH, intermediate_size=WIDTH, vocab_size=300)
    config = transformers.LlamaConfig.from_dict(model.config.to_dict() | {"num_key_value_heads": 3})
    write_model(writer_for(tmp_path, "llama", config, rope__freq_base=1e4), model, "Q8_0")
    with pytest.raises(CheckpointError, match=r"weights that can be read in .*model\.gguf, got: .*again"):
        load_model(Checkpoint.resolve(tmp_path / "model.gguf", dtype=dtype, device="cpu"))


def write_mixture(folder: Path, kind: str) -> nn.Module:
    """Write a random Qwen3-MoE with its experts and its attention in a type; return it in float32."""
    gguf = pytest.importorskip("gguf")
    config = transformers.Qwen3MoeConfig(
        hidden_size=WIDTH, num_experts=4, num_experts_per_tok=2, num_hidden_layers=2, moe_intermediate_size=128,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, vocab_size=300, initializer_range=0.1,
        eos_token_id=0, max_position_embeddings=128, norm_topk_prob=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    writer = writer_for(
        folder,
        "qwen3moe",
        config,
        expert_count=4,
        expert_used_count=2,
        expert_feed_forward_length=config.moe_intermediate_size,
        attention__key_length=64,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 2)

    def add(place: str, value: Tensor) -> None:
        data, held = blocks(value.contiguous(), kind)
        value.copy_(held)
        writer.add_tensor(f"{place}.weight", data, raw_dtype=gguf.GGMLQuantizationType[kind])

    with torch.no_grad():
        for name, value in model.state_dict().items():
            layer = "".join(filter(str.isdigit, name))
            if name.endswith("gate_up_proj"):
                for part, half in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                    add(f"blk.{layer}.ffn_{part}_exps", half)
            elif name.endswith("experts.down_proj"):
                add(f"blk.{layer}.ffn_down_exps", value)
            elif "self_attn" in name and value.dim() == 2:
                add(names.get_name(name.removesuffix(".weight")), value)
            else:
                writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", value.numpy())
    finish(writer)
    return model


@needs_kernels
@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q8_0", 8)])
def test_the_codes_of_experts_are_kept(kind, bits, tmp_path):
    model = write_mixture(tmp_path, kind)
    file = tmp_path / "model.gguf"
    exact = module_of(Checkpoint.resolve(file, dtype="float32", device="cpu", runtime="transformers"))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in exact.state_dict().items())
    tokens = torch.arange(2, 34)[None]
    with torch.inference_mode():
        expected = exact(input_ids=tokens).logits[0]
    checkpoint = Checkpoint.resolve(file, device="cpu")
    in_experts = 2 * 4 * 3 * 128 * WIDTH
    assert sum(checkpoint._num_stored.values()) > in_experts
    assert checkpoint.memory(0).weights < 1.3 * sum(each.numel() for each in model.parameters())
    loaded = load_model(checkpoint)
    assert loaded.runtime_description == f"native, weights in {bits} bits"
    errors = (loaded.runtime.probe(tokens).logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.06  # rounding makes some tokens select other experts


TYPES = [
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q8_0",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ4_NL",
    "IQ4_XS",
    "F16",
    "BF16",
]
KEPT = {
    "Q4_0": INT4_GROUPS,
    "Q4_1": INT4_GROUPS,
    "Q5_0": INT8,
    "Q5_1": INT8_GROUPS,
    "Q8_0": INT8,
    "Q4_K": INT4_GROUPS,
    "Q5_K": INT8_GROUPS,
}


def stored_tensor(folder: Path, kind: str) -> tuple[GgufWeights, Tensor]:
    """Write a tensor of a type as the first layer's values; return the weights, and what gguf decodes."""
    gguf, numpy = pytest.importorskip("gguf"), pytest.importorskip("numpy")
    wanted = gguf.GGMLQuantizationType[kind]
    numbers, size = gguf.GGML_QUANT_SIZES[wanted]
    generator = numpy.random.default_rng(4)
    if numbers == 1:
        data = gguf.quants.quantize(generator.normal(size=(96, WIDTH)).astype(numpy.float32), wanted)
    else:
        data = generator.integers(0, 256, (96, WIDTH // numbers, size), dtype=numpy.uint8)
        halves = {
            "Q2_K": (80, 82),
            "Q3_K": (108,),
            "Q6_K": (208,),
            "Q4_1": (0, 2),
            "Q5_1": (0, 2),
            "Q4_K": (0, 2),
            "Q5_K": (0, 2),
        }
        for place in halves.get(kind, (0,)):  # scales near 0.001
            scales = generator.uniform(0.001, 0.002, data.shape[:2]).astype(numpy.float16)
            data[:, :, place : place + 2] = scales[:, :, None].view(numpy.uint8)
        data = data.reshape(96, -1)
    expected = torch.from_numpy(gguf.quants.dequantize(data, wanted).astype(numpy.float32))
    config = random_llama(hidden_size=WIDTH, vocab_size=300).config
    writer = writer_for(folder, "llama", config)
    writer.add_tensor("token_embd.weight", numpy.zeros((300, WIDTH), dtype=numpy.float32))
    writer.add_tensor("blk.0.attn_v.weight", data, raw_dtype=wanted)
    finish(writer)
    source = open_source(str(folder / "model.gguf"))
    return source.weights(torch.device("cpu")), expected


@needs_kernels
@pytest.mark.parametrize("unit", library.units(), ids=lambda unit: unit.name)
@pytest.mark.parametrize("kind", TYPES)
def test_types_are_read_as_by_llama_cpp(kind, unit, tmp_path, monkeypatch):
    """Codes of evenly spaced levels are kept, others rounded by half a step of 8 bits."""
    monkeypatch.setattr(library, "units", lambda: (unit,))
    weights, expected = stored_tensor(tmp_path, kind)
    name = "model.layers.0.self_attn.v_proj.weight"
    torch.testing.assert_close(weights.read(name), expected, rtol=1e-6, atol=1e-9)
    rows = weights.rows(name)
    is_float = kind in ("F16", "BF16")
    assert rows.weight_format == (None if is_float else KEPT.get(kind, INT8))
    found = unpack_blocks(pack_blocks(rows, None, Arena(), rows.weight_format or BFLOAT16))[:96]
    groups, steps = expected.view(96, -1, 32), (found - expected).view(96, -1, 32).abs()
    if is_float:
        assert torch.equal(found, expected.bfloat16().float())
    elif kind in KEPT:  # but parameters are rounded to float16
        assert (steps <= groups.abs().amax(2, keepdim=True) * 2**-9).all()
    else:
        assert (steps <= groups.abs().amax(2, keepdim=True) / 127 * 0.501).all()


@needs_kernels
def test_memory_is_that_of_the_kept_encodings(tmp_path):
    file, model = write(tmp_path, "Q4_K", "Q6_K", tied=True)
    layers = sum(each.weight.numel() for each in model.model.modules() if isinstance(each, nn.Linear))
    in_8_bits = 2 * (WIDTH * WIDTH + WIDTH * model.config.num_key_value_heads * model.config.head_dim)
    embeddings, norms = 300 * WIDTH, 5 * WIDTH
    expected = (layers - in_8_bits) * 5 / 8 + (in_8_bits + embeddings) * 8.5 / 8 + (embeddings + norms) * 2
    assert Checkpoint.resolve(file, device="cpu").memory().weights == int(expected)


def test_a_truncated_file_is_refused(tmp_path):
    file, _ = write(tmp_path, "Q4_0")
    whole = file.read_bytes()
    for size in (len(whole) // 2, 100):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"expected .*model\.gguf.*got") as refused:
            load_model(Checkpoint.resolve(file, device="cpu"))
        assert "\n" not in str(refused.value)


EXTREMES = [number.to_bytes(8, "little") for number in (0, 2**32, 2**40, 2**63 - 1, 2**64 - 1)]


def mutated(whole: bytes, num_in_header: int, generator: random.Random) -> bytes:
    """Return a file with other, extreme or missing bytes in its header."""
    changed = bytearray(whole)
    for _ in range(generator.choice((1, 1, 2, 8))):
        place, kind = generator.randrange(num_in_header), generator.randrange(4)
        if kind == 0:
            changed[place] = generator.randrange(256)
        elif kind == 1:
            changed[place] ^= 1 << generator.randrange(8)
        elif kind == 2:
            changed[place : place + 8] = generator.choice(EXTREMES)
        else:
            del changed[place : place + generator.randrange(1, 9)]
    return bytes(changed)


@pytest.mark.parametrize("seed", range(4))
def test_broken_headers_give_one_clear_error(seed, tmp_path):
    """4,000 files, over all seeds."""
    file, _ = write(tmp_path, "Q4_0")
    whole, generator = file.read_bytes(), random.Random(seed)
    start = min(tensor.offset for tensor in open_source(str(file)).file.tensors.values())
    messages = []
    for _ in range(1000):
        file.write_bytes(mutated(whole, start, generator))
        try:
            plan = Checkpoint.resolve(file, device="cpu")
            plan.memory()
            _ = plan.tokenizer
        except SecondGuessError as refused:
            messages.append(str(refused))
    assert len(messages) > 800
    assert all("expected" in message and "\n" not in message for message in messages)


@pytest.mark.parametrize("value", EXTREMES[1:])
def test_lengths_beyond_the_file_take_no_memory(value, tmp_path):
    """Each 8 bytes of the header are such a length once; a value of a byte takes 8 bytes in a list."""
    file, _ = write(tmp_path, "Q4_0")
    whole = file.read_bytes()
    start = min(tensor.offset for tensor in open_source(str(file)).file.tensors.values())
    tracemalloc.start()
    for place in range(0, start, 40):
        file.write_bytes(whole[:place] + value + whole[place + 8 :])
        with suppress(CheckpointError):
            GgufFile(file)
    assert tracemalloc.get_traced_memory()[1] < 10 * len(whole)
    tracemalloc.stop()


def test_tokens_beyond_the_vocabulary_are_left_out(tmp_path):
    config = random_llama(hidden_size=WIDTH, vocab_size=300).config
    writer = writer_for(tmp_path, "llama", config)
    writer.add_uint32("tokenizer.ggml.padding_token_id", 2**32 - 1)
    writer.add_tensor("output_norm.weight", torch.ones(WIDTH).numpy())
    finish(writer)
    assert open_source(str(tmp_path / "model.gguf")).config.pad_token_id is None


def test_a_part_of_a_model_is_refused(tmp_path):
    config = random_llama(hidden_size=WIDTH, vocab_size=300).config
    writer = writer_for(tmp_path, "llama", config)
    writer.add_uint16("split.count", 3)
    writer.add_tensor("output_norm.weight", torch.ones(WIDTH).numpy())
    finish(writer)
    with pytest.raises(
        CheckpointError, match=r"cannot load .*gguf: it is one of 3 parts of a model\. Join them"
    ):
        Checkpoint.resolve(tmp_path / "model.gguf", device="cpu")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"expected a GGUF file.*got '.*none\.gguf'.*hf download"):
        Checkpoint.resolve(tmp_path / "none.gguf")
