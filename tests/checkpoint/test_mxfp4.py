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
from secondguess.checkpoint.checkpoint import Checkpoint
from secondguess.core import Draft
from secondguess.errors import CheckpointError
from secondguess.runtime.feed_forward import StoredExperts
from secondguess.runtime.fused import fuse
from secondguess.runtime.native import library
from secondguess.runtime.native.decoder import NativeDecoder
from secondguess.runtime.native.runtime import NativeRuntime
from secondguess.runtime.weight_format import MXFP4, STORED_INT4

TOKENS = [5, 6, 7, 8, 9, 40, 41]
WIDTH = 64
QUANTISED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
UNITS = library.units()


def write(folder: Path) -> Path:
    """Write a random gpt-oss whose experts have random codes in MXFP4."""
    config = FAMILIES["gpt-oss"]()
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
    module = Checkpoint.resolve(checkpoint, dtype="bfloat16", device="cpu").read_module()
    expected = by_transformers.state_dict()
    assert module.state_dict().keys() == expected.keys()
    for name, value in module.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_experts_stay_in_the_file(checkpoint, by_transformers):
    module = Checkpoint.resolve(checkpoint, device="cpu").read_module(layer_by_layer=True)
    experts, joined = module.model.layers[1].mlp.experts, by_transformers.model.layers[1].mlp.experts
    assert isinstance(experts, StoredExperts)
    (gate, up), down = experts.linears[2]
    assert torch.equal(gate.weight, joined.gate_up_proj[2].T[::2])
    assert torch.equal(up.weight, joined.gate_up_proj[2].T[1::2])
    assert torch.equal(up.bias, joined.gate_up_proj_bias[2][1::2])
    assert torch.equal(down.weight, joined.down_proj[2].T)
    assert torch.equal(down.bias, joined.down_proj_bias[2])
    assert gate.read_codes().weight_format == MXFP4
    assert torch.equal(gate.read_codes().dequantised(), gate.weight.float())
    tokens = torch.tensor([TOKENS])
    with torch.inference_mode():
        torch.testing.assert_close(
            module(tokens).logits, by_transformers(tokens).logits, atol=0.05, rtol=0.05
        )


@needs_kernels
def test_exponents_that_float16_does_not_hold(tmp_path):
    folder = write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    scales = tensors["model.layers.0.mlp.experts.down_proj_scales"]
    for exponent in (0, 103, 104, 140, 141):
        scales.fill_(exponent)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        module = Checkpoint.resolve(folder, device="cpu").read_module(layer_by_layer=True)
        _, down = module.model.layers[0].mlp.experts.linears[0]
        if exponent > 140:
            with pytest.raises(CheckpointError, match="exponents up to 140, got 141"):
                down.read_codes()
            continue
        stored = down.read_codes()
        packed = stored.in_bytes(MXFP4)
        assert torch.equal(packed[..., -4:].view(torch.float16).float()[..., 0], stored.scale)
        assert torch.equal(packed[..., -4:].view(torch.float16).float()[..., 1], stored.minimum)
        assert (stored.dequantised().abs().max() == 0) == (exponent < 104)


@needs_kernels
@pytest.mark.parametrize("unit", UNITS, ids=[unit.name for unit in UNITS])
def test_logits_are_those_of_the_dequantised_weights(checkpoint, by_transformers, unit):
    with torch.inference_mode():
        expected = copy.deepcopy(by_transformers).float()(torch.tensor([TOKENS])).logits[0]
    module = Checkpoint.resolve(checkpoint, device="cpu").read_module(layer_by_layer=True)
    decoder = NativeDecoder(fuse(module, packed=False), STORED_INT4, unit)
    found = NativeRuntime(decoder).read(torch.tensor([TOKENS])).logits[0]
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() < 0.05
    for count in (1, 2, 6, 7):  # all numbers of rows of a product, with the same bits
        few = NativeRuntime(decoder).read(torch.tensor([TOKENS[:count]])).logits[0]
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
    assert resolved.memory(0).weights == int(2 * num_others + in_experts * 5 / 8)
    loaded = resolved.load()
    assert loaded.runtime_description == "native, weights in 4 bits"
    row = row_of(TOKENS)
    loaded.runtime.begin([row])
    single = loaded.runtime.score([row], Draft.empty(1)).logits[0, 0]
    loaded.runtime.release(row)
    assert torch.equal(loaded.runtime.read(torch.tensor([TOKENS])).logits[0, -1], single)


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
        Checkpoint.resolve(folder, dtype=dtype, device="cpu").load()
