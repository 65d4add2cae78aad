"""gpt-oss with experts in MXFP4: read as Transformers reads it, and run from the stored codes."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints import write_tokenizer
from families import FAMILIES, needs_kernels, row_of
from gguf_files import finish, writer_for
from secondguess.checkpoint.loader import load_model, module_of
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.quantised import FP4_LEVELS
from secondguess.checkpoint.source import open_source
from secondguess.core import Draft
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.cpu.weights import Arena, pack_blocks, unpack_blocks
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.decoder.stored import GroupedWeight, StoredModel, WeightRows
from secondguess.runtime.weight_format import INT8_GROUPS, MXFP4, STORED_INT4

TOKENS = [5, 6, 7, 8, 9, 40, 41]
WIDTH = 64
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
UNITS = library.units()


def write(folder: Path, **changes: float) -> Path:
    """Write a random gpt-oss whose experts have random codes in MXFP4, with changes of its configuration."""
    config = FAMILIES["gpt-oss"]()
    config.update(changes)
    config.hidden_size = config.intermediate_size = WIDTH
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        tensors = {}
        for name, value in model.state_dict().items():
            if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
                num_experts, num_inputs, num_outputs = value.shape
                shape = num_experts, num_outputs, num_inputs // 32
                tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
                tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
            else:
                is_random = name.endswith(("bias", "sinks"))
                tensors[name] = torch.randn_like(value) * 0.2 if is_random else value.clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described |= {
        "quantization_config": QUANTISED,
        "architectures": ["GptOssForCausalLM"],
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(described))
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write(tmp_path_factory.mktemp("mxfp4"))


@pytest.fixture(scope="module")
def by_transformers(checkpoint):
    """The model as Transformers dequantises it, without the experts' own kernels."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    ).eval()


def test_the_weights_are_those_that_transformers_reads(checkpoint, by_transformers):
    module = module_of(Checkpoint.resolve(checkpoint, dtype="bfloat16", device="cpu"))
    expected = by_transformers.state_dict()
    assert module.state_dict().keys() == expected.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


def stored_model(folder):
    source = open_source(str(folder))
    return StoredModel(source.config, source.weights(torch.device("cpu")), torch.bfloat16)


def test_experts_stay_in_the_file(checkpoint, by_transformers):
    experts = stored_model(checkpoint).model.layers[1].mlp.experts[2]
    joined = by_transformers.model.layers[1].mlp.experts
    assert torch.equal(experts.gate_proj.weight, joined.gate_up_proj[2].T[::2])
    assert torch.equal(experts.up_proj.weight, joined.gate_up_proj[2].T[1::2])
    assert torch.equal(experts.up_proj.bias, joined.gate_up_proj_bias[2][1::2])
    assert torch.equal(experts.down_proj.weight, joined.down_proj[2].T)
    assert torch.equal(experts.down_proj.bias, joined.down_proj_bias[2])
    rows = experts.gate_proj.rows()
    assert rows.weight_format == MXFP4
    found = unpack_blocks(pack_blocks(rows, None, Arena(), MXFP4))[: len(rows)]
    assert torch.equal(found, experts.gate_proj.weight.float())


@needs_kernels
def test_the_least_and_largest_exponents(tmp_path):
    folder = write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj_scales"
    for exponent in (0, 1, 127, 230, 231):
        tensors[name].fill_(exponent)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        down = stored_model(folder).model.layers[0].mlp.experts[0].down_proj
        if exponent > 230:
            with pytest.raises(CheckpointError, match="exponents up to 230, got 231"):
                down.rows()
            continue
        found = unpack_blocks(pack_blocks(down.rows(), None, Arena(), MXFP4))
        assert found.isfinite().all()
        expected = torch.tensor(6 * 2.0 ** (exponent - 127))
        assert found.abs().max() == (expected if exponent > 1 else 0)  # the least ones are subnormal


@needs_kernels
@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
def test_logits_are_those_of_the_dequantised_weights(checkpoint, by_transformers, unit):
    with torch.inference_mode():
        expected = copy.deepcopy(by_transformers).float()(torch.tensor([TOKENS])).logits[0]
    decoder = NativeDecoder(FusedDecoder(stored_model(checkpoint), packed=False), STORED_INT4, unit)
    found = NativeRuntime(decoder).probe(torch.tensor([TOKENS])).logits[0]
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05
    for count in (1, 2, 6, 7):  # all numbers of rows of a product, with the same bits
        few = NativeRuntime(decoder).probe(torch.tensor([TOKENS[:count]])).logits[0]
        assert torch.equal(few, found[:count])


@needs_kernels
def test_it_is_loaded_and_decodes_from_its_codes(checkpoint):
    resolved = Checkpoint.resolve(checkpoint, device="cpu")
    in_experts = 2 * 4 * 3 * WIDTH * WIDTH
    assert sum(resolved._num_stored.values()) == in_experts
    num_others = sum(
        each.numel()
        for name, each in load_file(checkpoint / "model.safetensors").items()
        if not name.endswith(("_blocks", "_scales"))
    )
    assert resolved.memory(0).weights == int(2 * num_others + in_experts * 4.5 / 8)
    loaded = load_model(resolved)
    assert loaded.runtime_description == "native, weights in 4 bits"
    row = row_of(TOKENS)
    loaded.runtime.begin([row])
    single = loaded.runtime.score([row], Draft.empty(1)).logits[0, 0]
    loaded.runtime.release(row)
    assert torch.equal(loaded.runtime.probe(torch.tensor([TOKENS])).logits[0, -1], single)


@needs_kernels
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_other_weights_are_rounded_on_request(checkpoint, by_transformers, quantize):
    resolved = Checkpoint.resolve(checkpoint, device="cpu", quantize=quantize)
    runtime = load_model(resolved).runtime
    decoder = runtime.decoder
    layer = decoder.described.layers[1]
    encodings = [
        layer.experts[2].gate_up,
        layer.experts[2].down,
        layer.qkv,
        layer.router,
        decoder.head.weight,
    ]
    names = [library.ENCODINGS[each.encoding] for each in encodings]
    assert names == ["mxfp4", "mxfp4", quantize, "bfloat16", "int8"]
    assert resolved.memory(0).weights < Checkpoint.resolve(checkpoint, device="cpu").memory(0).weights
    with torch.inference_mode():
        expected = by_transformers(torch.tensor([TOKENS])).logits[0].float()
    found = runtime.probe(torch.tensor([TOKENS])).logits[0]
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < (0.05 if quantize == "int8" else 0.3)


YARN = {
    "rope__scaling__type": "yarn",
    "rope__scaling__factor": 32.0,
    "rope__scaling__original_context_length": 4096,
}


def write_gguf(checkpoint: Path, folder: Path, **fields: int | float | str) -> Path:
    """Write the weights of a checkpoint as llama.cpp's converter does."""
    gguf = pytest.importorskip("gguf")
    config = transformers.AutoConfig.from_pretrained(checkpoint)
    writer = writer_for(
        folder,
        "gpt-oss",
        config,
        expert_count=config.num_local_experts,
        expert_used_count=config.num_experts_per_tok,
        expert_feed_forward_length=config.intermediate_size,
        attention__key_length=config.head_dim,
        attention__sliding_window=config.sliding_window,
        rope__freq_base=config.rope_parameters["rope_theta"],
        **fields,
    )
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, config.num_hidden_layers)
    tensors = load_file(checkpoint / "model.safetensors")

    def add_experts(name: str, stored: torch.Tensor) -> None:
        stem, _, suffix = name.partition("_proj_")
        place, _, part = stem.rpartition(".")
        for each, outputs in (
            {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
            if part == "gate_up"
            else {"down": slice(None)}
        ).items():
            found = names.get_name(f"{place}.{each}_proj")
            if suffix == "bias":
                writer.add_tensor(f"{found}.bias", stored[:, outputs].float().numpy())
            elif suffix == "blocks":
                codes = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)[:, outputs]
                scales = tensors[name.replace("blocks", "scales")][:, outputs, :, None]
                packed = torch.cat((scales, codes[..., :16] | codes[..., 16:] << 4), -1).flatten(2)
                writer.add_tensor(
                    f"{found}.weight", packed.numpy(), raw_dtype=gguf.GGMLQuantizationType.MXFP4
                )

    for name, value in tensors.items():
        if ".experts." in name:
            add_experts(name, value)
        elif name.endswith("sinks"):
            writer.add_tensor(f"{names.get_name(name)}.weight", value.float().numpy())
        else:
            stem, _, suffix = name.rpartition(".")
            writer.add_tensor(f"{names.get_name(stem)}.{suffix}", value.float().numpy())
    finish(writer)
    return folder / "model.gguf"


@needs_kernels
def test_a_gguf_file_gives_the_logits_of_the_safetensors_checkpoint(tmp_path):
    """Like llama.cpp, a file has no limit of the gates, which is 7 in all models."""
    (tmp_path / "original").mkdir()
    checkpoint = write(tmp_path / "original", swiglu_limit=7.0)
    file = write_gguf(checkpoint, tmp_path)
    original, resolved = (Checkpoint.resolve(path, device="cpu") for path in (checkpoint, file))
    for name in (
        "rope_parameters",
        "layer_types",
        "sliding_window",
        "num_experts_per_tok",
        "head_dim",
        "attention_bias",
    ):
        assert getattr(resolved.config, name) == getattr(original.config, name), name
    assert resolved.memory(0).weights == original.memory(0).weights
    loaded = load_model(resolved)
    assert loaded.runtime_description == "native, weights in 4 bits"
    assert loaded.tokenizer("def f(x):").input_ids == original.tokenizer("def f(x):").input_ids
    tokens = torch.tensor([TOKENS])
    assert torch.equal(loaded.runtime.probe(tokens).logits, load_model(original).runtime.probe(tokens).logits)


def test_the_rotary_positions_of_a_gguf_file_are_those_of_the_original(checkpoint, tmp_path):
    scaled = Checkpoint.resolve(write_gguf(checkpoint, tmp_path, **YARN), device="cpu").config.rope_parameters
    expected = transformers.GptOssConfig().rope_parameters
    assert scaled == {name: expected[name] for name in scaled} | {"rope_theta": scaled["rope_theta"]}
    assert (expected["beta_fast"], expected["beta_slow"]) == (32, 1), "those of a scaling that names none"


@needs_kernels
def test_a_gguf_file_is_refused_without_the_kernels(checkpoint, tmp_path):
    file = write_gguf(checkpoint, tmp_path, **YARN)
    with pytest.raises(
        UnsupportedModelError, match="expected a runtime with our kernels for a GGUF file of gpt-oss"
    ):
        load_model(Checkpoint.resolve(file, dtype="float32", device="cpu"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("broken", ["missing", "another shape"])
def test_a_broken_checkpoint_gives_one_error(broken, dtype, tmp_path):
    folder = write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :1].contiguous()
    if broken == "missing":
        del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"down_proj.*download the checkpoint again"):
        load_model(Checkpoint.resolve(folder, dtype=dtype, device="cpu"))


def test_a_product_of_weights_with_levels_and_others_is_not_kept_in_codes():
    """Its parts have different parameters: queries in MXFP4 and values in 8 bits, for example."""
    scale, codes = torch.ones(8, 2), torch.full((8, 64), 7, dtype=torch.uint8)
    levels = GroupedWeight(codes, 4, scale, -12 * scale, levels=FP4_LEVELS).rows()
    even = GroupedWeight(codes, 8, scale, -128 * scale).rows()
    assert WeightRows.joined([levels, even]).weight_format is None
    assert WeightRows.joined([levels, levels]).weight_format == MXFP4
    assert WeightRows.joined([even]).weight_format == INT8_GROUPS


def test_rotary_positions_of_yarn_are_not_truncated(tmp_path):
    (tmp_path / "original").mkdir()
    file = write_gguf(write(tmp_path / "original"), tmp_path, **YARN)
    found = Checkpoint.resolve(file, device="cpu").config.rope_parameters
    assert found["truncate"] is transformers.GptOssConfig().rope_parameters["truncate"] is False
