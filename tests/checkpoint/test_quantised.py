"""Quantised checkpoints: their weights are decoded as their formats define, and run without another rounding.

The `compressed-tensors` library writes its own checkpoint where it is installed; the layouts of GPTQ and AWQ are written here
as gptqmodel 7.7 (`pack_original`) and AutoAWQ (`WQLinear_GEMM`) write them, since neither installs with our versions.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from checkpoints import random_llama, write_tokenizer
from families import needs_kernels, row_of
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.loader import load_model, module_of
from secondguess.checkpoint.plan import Checkpoint, check_dtype_of_torchao
from secondguess.checkpoint.source import open_source
from secondguess.core import Draft
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.cpu.weights import Arena, pack_blocks, unpack_blocks
from secondguess.runtime.decoder.stored import GroupedWeight
from secondguess.runtime.weight_format import INT4_GROUPS, INT8_GROUPS

TOKENS = [5, 6, 7, 8, 9, 40, 41]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""Output that AutoAWQ stores in each nibble of an int32."""


@dataclass
class Rounded:
    """A weight on a grid: `scale * (code - zero)`, per output and group of inputs."""

    codes: Tensor
    zeros: Tensor
    scale: Tensor
    groups: Tensor
    bits: int

    @property
    def weight(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]) * self.scale.float()[:, self.groups]


def rounded(weight: Tensor, size: int, bits: int, symmetric: bool, shuffled: bool) -> Rounded:
    num_inputs, most = weight.shape[1], 2**bits - 1
    groups = torch.arange(num_inputs) // size
    if shuffled:
        groups = groups[torch.randperm(num_inputs, generator=torch.Generator().manual_seed(1))]
    scale, zeros = (torch.empty(len(weight), num_inputs // size) for _ in range(2))
    for group in range(num_inputs // size):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
        if symmetric:
            scale[:, group], zeros[:, group] = part.abs().amax(1) / (most // 2), 2 ** (bits - 1)
        else:
            scale[:, group] = (high - low) / most
            zeros[:, group] = (-low / scale[:, group]).round()
    scale = scale.half()
    codes = (weight / scale.float()[:, groups] + zeros[:, groups]).round().clamp(0, most)
    return Rounded(codes.int(), zeros.int(), scale, groups, bits)


def packed(codes: Tensor, bits: int, dim: int) -> Tensor:
    """Codes in int32 numbers, the first one in the lowest bits."""
    parts = codes.long().unflatten(dim, (-1, 32 // bits)).unbind(dim + 1)
    return (
        (sum(part << (bits * index) for index, part in enumerate(parts)) & (2**32 - 1))
        .to(torch.uint32)
        .view(torch.int32)
    )


def gptq(found: Rounded, version: int) -> dict[str, Tensor]:
    zeros = packed(found.zeros.T, found.bits, 1).view(torch.uint32).long()
    less = 0 if version == 2 else packed(torch.ones(1, 32 // found.bits), found.bits, 1).long()
    return {
        "qweight": packed(found.codes.T, found.bits, 0),
        "qzeros": ((zeros - less) % 2**32).to(torch.uint32).view(torch.int32),
        "scales": found.scale.T,
        "g_idx": found.groups.int(),
    }


def awq(found: Rounded) -> dict[str, Tensor]:
    def ordered(codes: Tensor) -> Tensor:
        return packed(codes.T.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4, 1)

    return {"qweight": ordered(found.codes), "qzeros": ordered(found.zeros), "scales": found.scale.T}


def pack_quantized(found: Rounded) -> dict[str, Tensor]:
    tensors = {
        "weight_packed": packed(found.codes, found.bits, 1),
        "weight_scale": found.scale,
        "weight_shape": torch.tensor(found.codes.shape),
    }
    if (found.zeros == 2 ** (found.bits - 1)).all():
        return tensors
    return tensors | {"weight_zero_point": packed(found.zeros, found.bits, 0)}


def by_its_library(found: Rounded) -> dict[str, Tensor]:
    """Return the tensors that compressed-tensors writes for a weight on its grid."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    arguments = quantization.QuantizationArgs(
        num_bits=found.bits, symmetric=False, strategy="group", group_size=32
    )
    state = {
        "weight": found.weight,
        "weight_scale": found.scale.float(),
        "weight_zero_point": (found.zeros - 2 ** (found.bits - 1)).to(torch.int8),
    }
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    compressor = compressors.BaseCompressor.get_value_from_registry("pack-quantized")
    return dict(compressor.compress(state, scheme))


def packed_config(bits: int = 4, **changes: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    } | changes


@dataclass(frozen=True)
class Format:
    """A way to store a model. `exact`: the kernels run the stored codes themselves."""

    write: Callable[[Rounded], dict[str, Tensor]]
    config: dict[str, Any]
    size: int = 32
    bits: int = 4
    symmetric: bool = False
    shuffled: bool = False
    exact: bool = True


FORMATS = {
    "gptq": Format(lambda found: gptq(found, 1), {"quant_method": "gptq", "bits": 4}),
    "gptq symmetric": Format(lambda found: gptq(found, 1), {"quant_method": "gptq", "bits": 4}, 64, symmetric=True),
    "gptq v2": Format(lambda found: gptq(found, 2), {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "gptq act-order": Format(lambda found: gptq(found, 1), {"quant_method": "gptq", "bits": 4}, shuffled=True, exact=False),
    "gptq 8 bits": Format(lambda found: gptq(found, 1), {"quant_method": "gptq", "bits": 8}, bits=8),
    "awq": Format(awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}, 64),
    "pack-quantized": Format(pack_quantized, packed_config()),
    "pack-quantized symmetric": Format(pack_quantized, packed_config(), 64, symmetric=True),
    "pack-quantized by its library": Format(by_its_library, packed_config()),
}  # fmt: skip


def random_mixture() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, moe_intermediate_size=64, num_experts=6, num_experts_per_tok=2, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=300, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


def write(
    folder: Path, form: Format, config: dict[str, Any] | None = None, model: Any | None = None
) -> nn.Module:
    """Write a random model, by default Llama, in a format; return it in float32 with the weights of that format."""
    if model is None:
        model = random_llama(3, hidden_size=64, intermediate_size=128, vocab_size=300, initializer_range=0.2)
    model.config.eos_token_id = 0
    tensors, own = {}, dict(model.state_dict())

    def encode(name: str, weight: Tensor) -> Tensor:
        found = rounded(weight, form.size, form.bits, form.symmetric, form.shuffled)
        tensors.update({f"{name}.{part}": value.contiguous() for part, value in form.write(found).items()})
        return found.weight

    for name, module in model.named_modules():
        if name.startswith("model.") and isinstance(module, nn.Linear):
            module.weight.data = encode(name, module.weight.data)
            del own[f"{name}.weight"]
        elif name.endswith(".experts"):  # stored one by one, as published
            for expert, joined in enumerate(module.gate_up_proj.data):
                halves = zip(("gate_proj", "up_proj"), joined.chunk(2), strict=True)
                joined.copy_(torch.cat([encode(f"{name}.{expert}.{part}", half) for part, half in halves]))
            for expert, weight in enumerate(module.down_proj.data):
                weight.copy_(encode(f"{name}.{expert}.down_proj", weight))
            del own[f"{name}.gate_up_proj"], own[f"{name}.down_proj"]
    model.config.save_pretrained(folder)
    save_file(tensors | own, folder / "model.safetensors")
    described = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": config or form.config
    }
    (folder / "config.json").write_text(json.dumps(described))
    write_tokenizer(folder)
    return model


def logits_of(loaded: LoadedModel) -> Tensor:
    row = row_of(TOKENS)
    loaded.runtime.begin([row])
    return loaded.runtime.score([row], Draft.empty(1)).logits[0, 0].float()


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_those_that_the_format_defines(name, tmp_path):
    model = write(tmp_path, FORMATS[name])
    found = module_of(Checkpoint.resolve(tmp_path, dtype="float32", device="cpu", runtime="transformers"))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in found.state_dict().items())
    assert found.generation_config.eos_token_id == 0


@needs_kernels
@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_dequantised_weights_within_the_rounding_of_inputs(name, tmp_path):
    model, form = write(tmp_path, FORMATS[name]), FORMATS[name]
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0, -1]
    loaded = load_model(Checkpoint.resolve(tmp_path, device="cpu"))
    assert loaded.runtime_description == (f"native, weights in {form.bits} bits" if form.exact else "native")
    found = logits_of(loaded)
    assert error(found, expected) < (0.06 if form.exact else 0.03)


@needs_kernels
@pytest.mark.parametrize("name", ["gptq", "awq"])
def test_stored_codes_of_experts_are_run(name, tmp_path):
    form = replace(FORMATS[name], size=32)
    model = write(tmp_path, form, model=random_mixture())
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0, -1]
    loaded = load_model(Checkpoint.resolve(tmp_path, device="cpu"))
    assert loaded.runtime_description == "native, weights in 4 bits"
    assert error(logits_of(loaded), expected) < 0.06


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("bits", "weight_format"), [(4, INT4_GROUPS), (4, INT8_GROUPS), (8, INT8_GROUPS)])
def test_packing_keeps_stored_codes_scales_and_minima(bits, weight_format, gated):
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 2**bits, (64, 128), generator=generator, dtype=torch.uint8)
    scale = torch.rand(64, 2, generator=generator).half().float()  # groups of 64 inputs
    stored = GroupedWeight(codes, bits, scale, -(2 ** (bits - 1)) * scale)
    expected = stored.dequantised()
    if gated:
        expected = torch.cat([half[part : part + 16] for part in (0, 16) for half in expected.chunk(2)])
    found = unpack_blocks(pack_blocks(stored.rows(), None, Arena(), weight_format, gated))
    assert torch.equal(found, expected)


REFUSED = {
    "bits": (FORMATS["gptq"].config | {"bits": 3}, "gptq with 3 bits"),
    "dynamic": (
        FORMATS["gptq"].config | {"dynamic": {"-:.*k_proj.*": {}, "+:.*v_proj.*": {"bits": 8}}},
        r"gptq with 4 bits and 8 for some layers \(dynamic\)",
    ),
    "marlin": (FORMATS["gptq"].config | {"checkpoint_format": "marlin"}, "gptq stored as marlin"),
    "gemv": (FORMATS["awq"].config | {"version": "gemv"}, "awq gemv"),
    "mixed": (packed_config(3), "pack-quantized weights of several or other types"),
    "rotated": (packed_config(transform_config={"config_groups": {"u": {}}}), "transformed inputs"),
    "unknown": ({"quant_method": "rot13"}, "rot13"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "no method": ({"group_size": 64, "bits": 4}, r"quantization_config \{'group_size': 64, 'bits': 4\}"),
    "ModelOpt": ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, "FP8"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_other_encodings_are_refused_by_name(config, message, tmp_path):
    write(tmp_path, FORMATS["gptq"], config)
    with pytest.raises(
        UnsupportedModelError, match=rf"expected .*got {message}.*; use the original"
    ) as refused:
        Checkpoint.resolve(tmp_path)
    assert "\n" not in str(refused.value)


def write_8_bit_floats(
    folder: Path, scale_name: str = "weight_scale", dtype: torch.dtype = torch.float8_e4m3fn
) -> None:
    """Write a random Llama with weights of 8 bits, of which its `config.json` says nothing."""
    model = random_llama(3, hidden_size=64, intermediate_size=128, vocab_size=300)
    tensors = dict(model.state_dict())
    for name in [name for name in tensors if "_proj" in name]:
        tensors[name] = tensors[name].to(dtype)
        tensors[name.replace("weight", scale_name)] = torch.ones(())
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_a_checkpoint_of_modelopt_is_refused_by_name(algorithm, tmp_path):
    write_8_bit_floats(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
    with pytest.raises(UnsupportedModelError, match=rf"got ModelOpt {algorithm} in hf_quant_config\.json"):
        Checkpoint.resolve(tmp_path)


def test_a_checkpoint_of_mlx_is_refused_by_name(tmp_path):
    write_8_bit_floats(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization"] = {"group_size": 64, "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=r"got MLX quantization \{'group_size': 64, 'bits': 4\}"):
        Checkpoint.resolve(tmp_path)


@pytest.mark.parametrize(
    ("scale_name", "dtype", "shown"),
    [
        ("weight_scale", torch.float8_e4m3fn, "F8_E4M3"),
        ("weight_scale_inv", torch.float8_e5m2, "F8_E5M2"),
        ("bias_of_another_name", torch.uint8, "U8"),
    ],
)
def test_codes_that_no_configuration_describes_are_refused(scale_name, dtype, shown, tmp_path):
    write_8_bit_floats(tmp_path, scale_name, dtype)
    with pytest.raises(UnsupportedModelError, match=rf"got weights in {shown} .*config\.json has no quant"):
        Checkpoint.resolve(tmp_path)


def test_8_bit_floats_without_scales_are_weights(tmp_path):
    write_8_bit_floats(tmp_path, "unused")
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    )
    load_model(Checkpoint.resolve(tmp_path, dtype="float32", device="cpu"))


BROKEN = {
    "missing": (lambda tensors: tensors.pop("model.layers.0.mlp.up_proj.scales"), r"up_proj.*tensor scales.*got none"),
    "shape": (
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.scales": torch.ones(2, 5)}),
        r"up_proj.*expected a scale.*got codes",
    ),
    "no groups": (
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.scales": torch.ones(0, 128)}),
        r"up_proj.*expected a scale.*got scales \(0, 128\)",
    ),
    "one dimension": (
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.scales": torch.ones(5)}),
        r"up_proj.*expected a scale.*got scales \(5,\)",
    ),
    "group out of range": (
        lambda tensors: tensors["model.layers.0.mlp.up_proj.g_idx"].add_(2), r"up_proj.*expected one of 2 groups",
    ),
    "negative group": (
        lambda tensors: tensors["model.layers.0.mlp.up_proj.g_idx"].sub_(1), r"up_proj.*expected one of 2 groups",
    ),
    "few groups": (
        lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.g_idx": torch.tensor([0, 1])}),
        r"up_proj.*expected one of 2 groups",
    ),
    "layer": (
        lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1.mlp.up_proj" in name],
        r"1 tensors are missing.*layers\.1\.mlp\.up_proj",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_broken_checkpoint_gives_one_error(change, message, dtype, tmp_path):
    write(tmp_path, FORMATS["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as refused:
        load_model(Checkpoint.resolve(tmp_path, dtype=dtype, device="cpu"))
    assert "\n" not in str(refused.value)


@needs_kernels
def test_memory_of_weights_whose_codes_the_kernels_do_not_take_is_that_of_bfloat16(tmp_path):
    config = FORMATS["gptq"].config
    sizes = {}
    for name, more in {
        "kept": {"group_size": 32}, "ordered": {"group_size": 32, "desc_act": True}, "small": {"group_size": 16},
        "rows": {"group_size": -1, "desc_act": True},
    }.items():  # fmt: skip
        folder = tmp_path / name
        folder.mkdir()
        write(folder, FORMATS["gptq"], config | more)
        sizes[name] = Checkpoint.resolve(folder, device="cpu").memory().weights
    num_quantised = 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128)
    assert sizes["rows"] == sizes["kept"]
    assert sizes["small"] == sizes["ordered"] == sizes["kept"] + num_quantised * (2 - 5 / 8)


def test_groups_need_not_divide_the_inputs_if_each_input_names_its_own(tmp_path):
    model = write(tmp_path, FORMATS["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    tensors[f"{name}.g_idx"] = torch.arange(128, dtype=torch.int32) // 48  # 48, 48 and 32 inputs
    for part in ("scales", "qzeros"):
        tensors[f"{name}.{part}"] = tensors[f"{name}.{part}"][:3].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    found = module_of(Checkpoint.resolve(tmp_path, dtype="float32", device="cpu", runtime="transformers"))
    module = found.get_submodule(name)
    first = model.get_submodule(name).weight
    assert torch.equal(module.weight[:, :32], first[:, :32])
    assert not torch.equal(module.weight[:, 32:48], first[:, 32:48])


TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Float8WeightOnlyConfig", "_data": {}}},
}
BITNET = {"quant_method": "bitnet", "linear_class": "bitlinear", "quantization_mode": "offline"}


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("config", [TORCHAO, BITNET], ids=["torchao", "bitnet"])
def test_weights_that_stay_quantised_are_not_quantised_again(config, quantize, tmp_path):
    pytest.importorskip("torchao")
    write(tmp_path, FORMATS["gptq"], config)
    with pytest.raises(UnsupportedModelError, match="already quantised"):
        Checkpoint.resolve(
            tmp_path, dtype="float32" if config is BITNET else "auto", quantize=quantize, device="cpu"
        )


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("Float8WeightOnlyConfig", ["float16", "float32", "float64"]),
        ("IntxWeightOnlyConfig", ["float16", "float32", "float64"]),
        ("Int8WeightOnlyConfig", []),
        ("Int8DynamicActivationInt8WeightConfig", ["float64"]),
    ],
)
def test_weights_of_torchao_are_refused_in_a_dtype_in_which_it_does_not_multiply_them(kind, refused):
    described = {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}
    config = transformers.LlamaConfig(dtype=torch.bfloat16, quantization_config=described)
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        is_refused = dtype in refused
        with (
            pytest.raises(UnsupportedModelError, match="load it with dtype bfloat16")
            if is_refused
            else nullcontext()
        ):
            check_dtype_of_torchao(config, getattr(torch, dtype), "tiny")


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_a_checkpoint_of_torchao_gets_the_dtype_of_its_scales_by_default(dtype, tmp_path):
    pytest.importorskip("torchao")
    write(tmp_path, FORMATS["gptq"], TORCHAO)
    described = json.loads((tmp_path / "config.json").read_text()) | {"dtype": dtype}
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert Checkpoint.resolve(tmp_path, device="cpu").dtype == getattr(torch, dtype)


def write_fp8(path: Path, rows: int, columns: int, **sizes: Any) -> Any:
    """Write a random model in FP8 with a scale per block, and return it with the decoded weights."""
    sizes = {"hidden_size": 64, "intermediate_size": 128} | sizes
    model = random_llama(3, vocab_size=300, initializer_range=0.2, **sizes)
    model.config.eos_token_id = 0
    tensors = {name: value.bfloat16() for name, value in model.state_dict().items()}
    for name in [name for name in tensors if "_proj" in name]:
        weight = tensors[name].float()
        missing = [-size % step for size, step in zip(weight.shape, (rows, columns), strict=True)]
        padded = nn.functional.pad(weight, (0, missing[1], 0, missing[0]))
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        decoded = codes.float() * scale[:, None, :, None]
        codes, decoded = (
            each.flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]].contiguous()
            for each in (codes, decoded)
        )
        tensors[name], tensors[f"{name}_scale_inv"] = codes, scale
        model.get_submodule(name.removesuffix(".weight")).weight.data = decoded
    config = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [rows, columns], "fmt": "e4m3",
    }  # fmt: skip
    model.config.save_pretrained(path)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    described = json.loads((path / "config.json").read_text()) | {"quantization_config": config}
    (path / "config.json").write_text(json.dumps(described))
    write_tokenizer(path)
    return model


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_what_a_file_of_8_bit_floats_leaves_alone_has_the_dtype_asked_for(dtype, tmp_path):
    model = write_fp8(tmp_path, 32, 32)
    loaded = load_model(Checkpoint.resolve(tmp_path, dtype=dtype, device="cpu"))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([TOKENS])).logits[0, -1]
    assert error(logits_of(loaded), expected) < 0.05


@pytest.mark.parametrize(("intermediate_size", "block"), [(96, (64, 64)), (288, (64, 64)), (96, (64, 40))])
def test_the_last_block_of_8_bit_floats_may_be_smaller(intermediate_size, block, tmp_path):
    model = write_fp8(tmp_path, *block, intermediate_size=intermediate_size)
    checkpoint = Checkpoint.resolve(tmp_path, dtype="float32", device="cpu", runtime="transformers")
    found = module_of(checkpoint).state_dict()
    for name, expected in model.state_dict().items():
        assert torch.equal(found[name], expected if "_proj" in name else expected.bfloat16().float()), name
    assert checkpoint.memory().weights == 4 * sum(each.numel() for each in model.parameters())


def test_scales_of_8_bit_floats_that_are_not_one_per_block_are_refused(tmp_path):
    write_fp8(tmp_path, 64, 64, intermediate_size=96)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(3, 1)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"up_proj \(fp8\): expected a scale for each block of 64 outputs"
    ):
        module_of(Checkpoint.resolve(tmp_path, dtype="float32", device="cpu"))


def test_8_bit_floats_of_an_fp8_checkpoint_without_their_scales_are_refused(tmp_path):
    write_fp8(tmp_path, 64, 64)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"got fp8 without .*up_proj.weight_scale_inv"):
        Checkpoint.resolve(tmp_path, dtype="float32", device="cpu")


def test_joined_experts_in_8_bit_floats_are_refused(tmp_path):
    """Transformers leaves out their scales without an error."""
    write_fp8(tmp_path, 64, 64)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = torch.zeros(2, 96, 64).to(torch.float8_e4m3fn)
    save_file(tensors | {f"{name}_scale_inv": torch.ones(2, 3, 1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"got fp8 experts in a joined weight \(.*down_proj_scale"
    ):
        Checkpoint.resolve(tmp_path, dtype="float32", device="cpu")


def test_scales_as_exponents_are_refused_if_their_last_block_is_smaller(tmp_path):
    """Transformers derives the size of a block from their number."""
    write_fp8(tmp_path, 64, 64)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    for num_blocks, is_refused in ((2, False), (5, True)):
        exponents = torch.full((num_blocks, 1), 127, dtype=torch.uint8)
        save_file(tensors | {f"{name}_scale_inv": exponents}, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedModelError, match="do not divide") if is_refused else nullcontext():
            assert open_source(str(tmp_path)).encoding(torch.device("cpu")) is None


@pytest.mark.parametrize(("capability", "is_decoded"), [((9, 0), False), ((8, 6), True)])
def test_fp8_is_decoded_for_the_device_of_the_model(capability, is_decoded, tmp_path, monkeypatch):
    write_fp8(tmp_path, 64, 64)
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device=None: asked.append(device) or capability
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device = torch.device("cuda", 1)
    assert (open_source(str(tmp_path)).encoding(device) is not None) == is_decoded
    assert set(asked) == {device}
    checkpoint = Checkpoint.resolve(tmp_path, dtype="float32", device="cpu")
    assert checkpoint.encoding is not None, "a GPU that does not run the model is irrelevant"
    assert module_of(checkpoint).dtype == torch.float32


def test_a_truncated_file_is_refused(tmp_path):
    write(tmp_path, FORMATS["awq"])
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"expected whole safetensors weights.*again"):
        load_model(Checkpoint.resolve(tmp_path, device="cpu"))


def check_weights(form, folder, model=None):
    model = write(folder, form, model=model)
    found = module_of(Checkpoint.resolve(folder, dtype="float32", device="cpu", runtime="transformers"))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())


def test_groups_of_compressed_tensors_may_be_in_any_order(tmp_path):
    def tensors(found):
        return pack_quantized(found) | {"weight_g_idx": found.groups.int()}

    check_weights(Format(tensors, packed_config(), shuffled=True, exact=False), tmp_path)


def test_biases_of_quantised_layers_are_read(tmp_path):
    config = transformers.Qwen2Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, initializer_range=0.2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for name, value in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(value)
    check_weights(FORMATS["gptq"], tmp_path, model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda groups: groups["group_0"].update(input_activations={"num_bits": 8}), "quantised activations"),
        (lambda groups: groups["group_0"]["weights"].update(type="float"), "several or other types"),
        (
            lambda groups: groups.update(group_1={"targets": [], "weights": {"num_bits": 8, "type": "int"}}),
            "several or other types",
        ),
    ],
)
def test_other_packed_weights_are_refused(change, message, tmp_path):
    config = packed_config()
    change(config["config_groups"])
    write(tmp_path, FORMATS["gptq"], config)
    with pytest.raises(UnsupportedModelError, match=message):
        Checkpoint.resolve(tmp_path, device="cpu")


def test_a_dtype_in_which_torchao_does_not_multiply_is_refused_before_weights_are_read(tmp_path):
    pytest.importorskip("torchao")
    write(tmp_path, FORMATS["gptq"], TORCHAO)
    described = json.loads((tmp_path / "config.json").read_text()) | {"dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(UnsupportedModelError, match="load it with dtype bfloat16"):
        Checkpoint.resolve(tmp_path, dtype="float32", device="cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("changes", [{"intermediate_size": 64}, {"num_key_value_heads": 4}])
def test_weights_of_other_shapes_than_the_configuration_says_are_refused(changes, dtype, tmp_path):
    write(tmp_path, FORMATS["gptq"])
    described = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(CheckpointError, match=r"of shape|other shapes"):
        load_model(Checkpoint.resolve(tmp_path, dtype=dtype, device="cpu"))
