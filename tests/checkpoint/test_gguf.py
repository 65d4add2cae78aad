"""GGUF files, written by gguf's own writer: dequantised by Transformers, with codes kept or rounded to 8 bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from checkpoints import random_llama, write_tokenizer
from families import needs_kernels, row_of
from secondguess.checkpoint import resolve
from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.core import Draft
from secondguess.errors import BadInputError, CheckpointError
from secondguess.runtime.stored import StoredLinear

TOKENS = [5, 6, 7, 8, 9, 40, 41]
HEADS = {"attn_q": 4, "attn_k": 2}
WIDTH = 256


def blocks(weight: Tensor, kind: str) -> tuple[object, Tensor]:
    """A tensor in blocks of a type, and what these blocks hold.

    gguf quantises to types of 32 numbers; for those of 256 the blocks are random, with scales near 0.001.
    """
    gguf = pytest.importorskip("gguf")
    numpy = pytest.importorskip("numpy")
    wanted = gguf.GGMLQuantizationType[kind]
    if kind.endswith("_K"):
        size = gguf.GGML_QUANT_SIZES[wanted][1]
        random = numpy.random.default_rng(4)
        data = random.integers(0, 256, (len(weight), weight.shape[1] // 256, size), dtype=numpy.uint8)
        scales = numpy.array([0.001, 0.002], dtype=numpy.float16).view(numpy.uint8)
        place = slice(size - 2, size) if kind == "Q6_K" else slice(0, 4)
        data[:, :, place] = scales[: 2 if kind == "Q6_K" else 4]
        data = data.reshape(len(weight), -1)
    else:
        data = gguf.quants.quantize(weight.numpy(), wanted)
    return data, torch.from_numpy(gguf.quants.dequantize(data, wanted).copy())


def interleaved(weight: Tensor, heads: int, *, back: bool = False) -> Tensor:
    """Rows as llama.cpp orders them: the halves of a head in turn."""
    sizes = (-1, 2) if back else (2, -1)
    return weight.unflatten(0, (heads, *sizes)).transpose(1, 2).flatten(0, 2)


def writer_for(folder: Path, architecture: str, config: Any) -> Any:
    """Return a writer of `model.gguf` that has a model's sizes and a tokenizer."""
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    write_tokenizer(folder)
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(300)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary["vocab"], key=vocabulary["vocab"].get))
    writer.add_token_merges([" ".join(merge) for merge in vocabulary["merges"]])
    writer.add_eos_token_id(0)
    return writer


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(
    folder: Path, kind: str, mixed: str | None = None, tied: bool = False, rope_factors: Tensor | None = None
) -> tuple[Path, nn.Module]:
    """Write a random Llama with its linear layers in a type, some in another; return it in float32.

    A tied head is written as llama.cpp does, as the embeddings, and in the other type.
    """
    gguf = pytest.importorskip("gguf")
    model = random_llama(
        3,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        vocab_size=300,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    config = model.config
    writer = writer_for(folder, "llama", config)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        place = names.get_name(name.removesuffix(".weight"))
        if tied and place == "output":
            continue
        if value.dim() == 1 or (place in ("token_embd", "output") and not tied):
            writer.add_tensor(f"{place}.weight", value.numpy())
            continue
        used = mixed if mixed and place.endswith(("ffn_down", "attn_v", "token_embd")) else kind
        heads = HEADS.get(place.rpartition(".")[2])
        data, held = blocks(value if heads is None else interleaved(value, heads), used)
        value.copy_(held if heads is None else interleaved(held, heads, back=True))
        writer.add_tensor(f"{place}.weight", data, raw_dtype=gguf.GGMLQuantizationType[used])
    finish(writer)
    return folder / "model.gguf", model


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
    state = exact.read_module().state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())
    module = Checkpoint.resolve(file, dtype="bfloat16", device="cpu").read_module(layer_by_layer=True)
    num_kept = sum(isinstance(each, StoredLinear) for each in module.modules())
    assert num_kept == 15
    loaded = Checkpoint.resolve(file, device="cpu").load()
    description = "native" if bits is None else f"native, weights in {bits} bits"
    assert (loaded.runtime_description, loaded.end_tokens) == (description, frozenset({0}))
    assert loaded.tokenizer.decode(loaded.encode("def f(x):")) == "def f(x):"
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0, -1]
    row = row_of(TOKENS)
    loaded.runtime.begin([row])
    found = loaded.runtime.score([row], Draft.empty(1)).logits[0, 0]
    assert (found - expected).norm() < (0.04 if bits is None else 0.06) * expected.norm()


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
    for layer_by_layer in (False, True):
        config = checkpoint.read_module(layer_by_layer).config
        assert config.rope_parameters == LLAMA_3
    (tmp_path / "other").mkdir()
    file, _ = write(tmp_path / "other", "Q8_0", rope_factors=factors.sqrt())
    with pytest.raises(CheckpointError, match=r"as Llama 3 does, got other factors \(1 to 2.83\)"):
        Checkpoint.resolve(file, device="cpu")


def test_files_that_are_read_wrongly_otherwise_are_refused_by_name(tmp_path, monkeypatch):
    file, _ = write(tmp_path, "Q8_0")
    checkpoint = Checkpoint.resolve(file, dtype="float32", device="cpu")
    monkeypatch.setattr("secondguess.checkpoint.gguf.ARCHITECTURES", ("qwen2",))
    with pytest.raises(
        CheckpointError, match=r"architecture whose weights the kernels read \(qwen2\), got llama"
    ):
        checkpoint.read_module(layer_by_layer=True)


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
    writer = writer_for(folder, "qwen3moe", config)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_key_length(64)
    writer.add_value_length(64)
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
    exact = Checkpoint.resolve(file, dtype="float32", device="cpu", runtime="transformers").read_module()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in exact.state_dict().items())
    tokens = torch.arange(2, 34)[None]
    with torch.inference_mode():
        expected = exact(input_ids=tokens).logits[0]
    checkpoint = Checkpoint.resolve(file, device="cpu")
    in_experts = 2 * 4 * 3 * 128 * WIDTH
    assert sum(checkpoint._num_stored.values()) > in_experts
    assert checkpoint.memory(0).weights < 1.3 * sum(each.numel() for each in model.parameters())
    loaded = checkpoint.load()
    assert loaded.runtime_description == f"native, weights in {bits} bits"
    errors = (loaded.runtime.read(tokens).logits[0] - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.06  # rounding makes some tokens select other experts


@pytest.mark.parametrize(
    ("kind", "is_kept"), [("Q4_K", True), ("Q8_0", True), ("Q5_K", False), ("Q6_K", False)]
)
def test_codes_are_kept_and_other_levels_rounded_by_half_a_step_of_8_bits(kind, is_kept, tmp_path):
    """Beside that, the limits of a group are rounded to float16."""
    file, _ = write(tmp_path, kind)
    checkpoint = Checkpoint.resolve(file, dtype="float32", device="cpu")
    module, stored = checkpoint.read_module(), checkpoint.read_module(layer_by_layer=True)
    names = [name for name, each in module.named_modules() if type(each) is nn.Linear]
    for name in names:
        assert torch.equal(stored.get_submodule(name).weight, module.get_submodule(name).weight)
        kept = stored.get_submodule(name).read_codes()
        if name == "lm_head":
            assert kept is None
            continue
        exact, found = (
            each.unflatten(1, (-1, 32)) for each in (module.get_submodule(name).weight, kept.dequantised())
        )
        limits = (exact.amax(2) - exact.amin(2)) / 509 + exact.abs().amax(2) * 2**-11
        assert ((found - exact).abs() <= (0 if is_kept else limits[:, :, None])).all()


@needs_kernels
def test_memory_is_that_of_the_kept_encodings(tmp_path):
    file, model = write(tmp_path, "Q4_K", "Q6_K", tied=True)
    layers = sum(each.weight.numel() for each in model.model.modules() if isinstance(each, nn.Linear))
    in_8_bits = 2 * (WIDTH * WIDTH + WIDTH * model.config.num_key_value_heads * model.config.head_dim)
    embeddings, norms = 300 * WIDTH, 5 * WIDTH
    expected = (layers - in_8_bits) * 5 / 8 + (in_8_bits + embeddings) * 9 / 8 + (embeddings + norms) * 2
    assert Checkpoint.resolve(file, device="cpu").memory().weights == int(expected)


def test_a_truncated_file_is_refused(tmp_path):
    file, _ = write(tmp_path, "Q4_0")
    whole = file.read_bytes()
    for size in (len(whole) // 2, 100):
        file.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"expected .*model\.gguf.*got") as refused:
            Checkpoint.resolve(file, device="cpu").load()
        assert "\n" not in str(refused.value)


def test_a_missing_file_or_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(resolve, "find_spec", lambda name: name)
    with pytest.raises(CheckpointError, match=r"expected a GGUF file.*got '.*none\.gguf'.*hf download"):
        Checkpoint.resolve(tmp_path / "none.gguf")
    monkeypatch.setattr(resolve, "find_spec", lambda name: None)
    with pytest.raises(BadInputError, match=r"none\.gguf needs gguf and accelerate.*secondguess\[gguf\]"):
        Checkpoint.resolve(tmp_path / "none.gguf")
