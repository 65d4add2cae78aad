"""Multi-token-prediction modules: names of three families, in a checkpoint and alone, and refusals."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from head_formats import Named, edit, head_of, named
from plain_layers import Tensors, layer_config, layer_tensors, plain_layer, plain_norm, random_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from secondguess.drafters.mtp import MtpDrafter
from secondguess.errors import BadInputError, CheckpointError, SecondGuessError, UnsupportedModelError
from secondguess.heads.folders import refuse_head
from secondguess.heads.mtp import MtpHead, contains_mtp, find_module, join_experts
from secondguess.runtime.modules.transformers import TransformersRuntime
from unrolled_cases import NUM_LAYERS, TEXT, VOCAB_SIZE, WIDTH, drafted_logits, target_model, target_of

TARGET = target_of()
Names = dict[str, str]
"""Tensor names of a family: `prefix`, `layer`, `enorm`, `hnorm`, `project`, `norm`."""

DEEPSEEK = {
    "prefix": f"model.layers.{NUM_LAYERS}.",
    "layer": "",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "project": "eh_proj",
    "norm": "shared_head.norm",
}
QWEN = {
    "prefix": "mtp.",
    "layer": "layers.0.",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "project": "fc",
    "norm": "norm",
}
MIMO = {
    "prefix": "model.mtp_layers.0.",
    "layer": "",
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}


SPECULATORS = {
    "prefix": "mtp_layers.0.",
    "layer": "",
    "enorm": "token_layernorm",
    "hnorm": "hidden_layernorm",
    "project": "input_proj",
    "norm": "final_layernorm",
}
MLX = {**QWEN, "prefix": ""}
ANGELSPEC = {
    "prefix": "",
    "layer": "midlayer.",
    "enorm": "enorm",
    "hnorm": "hnorm",
    "project": "eh_proj",
    "norm": "final_layernorm",
}
MASKED = {**QWEN}
"""Names of Qwen's modules in which the embedding at position 0 is masked."""


def module_tensors(names: Names) -> Tensors:
    prefix, layer = names["prefix"], names["prefix"] + names["layer"]
    return {
        **layer_tensors(layer, WIDTH, WIDTH, bias=names is MIMO),
        **random_tensors(
            {
                f"{layer}input_layernorm.weight": (WIDTH,),
                f"{prefix}{names['enorm']}.weight": (WIDTH,),
                f"{prefix}{names['hnorm']}.weight": (WIDTH,),
                f"{prefix}{names['project']}.weight": (WIDTH, 2 * WIDTH),
                f"{prefix}{names['norm']}.weight": (WIDTH,),
            }
        ),
    }


def write(folder: Path, names: Names, own: tuple[str, ...] = (), **config: Any) -> Path:
    """A checkpoint with a module in it: two files, as large ones have."""
    ends = {names["prefix"] + name: (VOCAB_SIZE, WIDTH) for name in own}
    tensors = module_tensors(names) | random_tensors(ends)
    half = len(tensors) // 2
    around = {
        "model.embed_tokens.weight": torch.ones(3, 3),
        "model.layers.0.mlp.up_proj.weight": torch.ones(2),
    }
    save_file(dict(list(tensors.items())[:half]) | around, folder / "model-00001-of-00002.safetensors")
    save_file(dict(list(tensors.items())[half:]), folder / "model-00002-of-00002.safetensors")
    described = layer_config(WIDTH, VOCAB_SIZE) | {"num_hidden_layers": NUM_LAYERS} | config
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def deepseek(folder: Path) -> Path:
    return write(folder, DEEPSEEK, num_nextn_predict_layers=1)


def deepseek_with_ends(folder: Path) -> Path:
    return write(folder, DEEPSEEK, own=("shared_head.head.weight", "embed_tokens.weight"))


def qwen(folder: Path) -> Path:
    return write(folder, QWEN, mtp_num_hidden_layers=1)


def mimo(folder: Path) -> Path:
    return write(folder, MIMO, model_type="mimo", attention_bias=True, num_nextn_predict_layers=1)


def part_of_a_larger_model(folder: Path) -> Path:
    write(folder, DEEPSEEK)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "sees_too", "text_config": config}))
    return folder


def write_separate(folder: Path, names: Names, **config: Any) -> Path:
    """A folder with a module alone."""
    save_file(module_tensors(names), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def described() -> dict[str, object]:
    return layer_config(WIDTH, VOCAB_SIZE) | {"num_hidden_layers": NUM_LAYERS}


def speculators(folder: Path) -> Path:
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    return write_separate(
        folder,
        SPECULATORS,
        architectures=["MTPDraftModel"],
        model_type="speculator_model",
        speculators_model_type="mtp",
        transformer_layer_config=described(),
        num_nextn_predict_layers=1,
        speculators_config={"algorithm": "mtp", "proposal_methods": [proposal]},
    )


def mlx(folder: Path) -> Path:
    return write_separate(folder, MLX, model_type="qwen3_5_mtp", block_size=3, text_config=described())


def angelspec(folder: Path) -> Path:
    fields = layer_config(WIDTH, VOCAB_SIZE) | {"model_type": "mtp", "mlp_type": "dense", "qk_norm": False}
    del fields["num_hidden_layers"]
    return write_separate(folder, ANGELSPEC, architectures=["MTPDraftModel"], tie_lm_head=True, **fields)


def angelspec_served(folder: Path) -> Path:
    """As converted for vLLM, whose layers are those of Qwen 3."""
    write(folder, MASKED, model_type="qwen3_mtp", num_nextn_predict_layers=1)
    return with_tensors(
        folder,
        lambda each, prefix: each.update(
            {f"mtp.layers.0.self_attn.{name}_norm.weight": torch.ones(8) for name in "qk"}
        ),
    )


FORMATS: dict[str, tuple[Callable[[Path], Path], Names]] = {
    "deepseek": (deepseek, DEEPSEEK),
    "deepseek-with-ends": (deepseek_with_ends, DEEPSEEK),
    "qwen": (qwen, QWEN),
    "mimo": (mimo, MIMO),
    "part-of-a-larger-model": (part_of_a_larger_model, DEEPSEEK),
}
SEPARATE: dict[str, tuple[Callable[[Path], Path], Names]] = {
    "speculators": (speculators, SPECULATORS),
    "mlx": (mlx, MLX),
    "angelspec": (angelspec, ANGELSPEC),
}
"""Formats of modules that are stored without a target."""
ALL = FORMATS | SEPARATE
in_every_target = pytest.mark.parametrize(("make", "names"), FORMATS.values(), ids=FORMATS)
every_format = pytest.mark.parametrize(("make", "names"), ALL.values(), ids=ALL)


def plain_mtp(weights: Tensors, names: Names, tokens: list[int], length: int, depth: int) -> Tensor:
    """Return the logits after `length + depth` tokens of which `depth` were drafted."""
    prefix = names["prefix"]
    model = target_model()
    of = {part: weights[f"{prefix}{names[part]}.weight"] for part in ("enorm", "hnorm", "project", "norm")}
    table = weights.get(f"{prefix}embed_tokens.weight", model.model.embed_tokens.weight)
    head = weights.get(f"{prefix}shared_head.head.weight", model.lm_head.weight)
    layer = prefix + names["layer"]
    features = model.model(torch.tensor([tokens[:length]])).last_hidden_state[0, : length - 1]
    for step in range(depth + 1):
        embedded = table[tokens[1 : length + step]].clone()
        if names is ANGELSPEC:
            embedded[0] = 0
        both = [
            plain_norm(embedded, of["enorm"]),
            plain_norm(features, of["hnorm"]),
        ]
        joined = torch.cat(both[::-1] if names is MIMO else both, -1) @ of["project"].T
        read = plain_norm(joined, weights[f"{layer}input_layernorm.weight"])
        state = plain_layer(weights, layer, joined, read)[-1]
        normed = plain_norm(state, of["norm"])
        features = torch.cat([features, (state if names is DEEPSEEK else normed)[None]])
    return normed @ head.T


def load(folder: Path) -> MtpHead:
    return MtpHead.load(folder, TARGET).double()


@every_format
def test_a_published_module_has_the_logits_of_its_paper(
    make: Callable[[Path], Path], names: Names, tmp_path: Path
) -> None:
    folder = make(tmp_path)
    weights: Tensors = {}
    for path in folder.glob("*.safetensors"):
        weights |= load_file(path)
    found = drafted_logits(load(folder), TEXT[:6], TEXT[6:9])
    for depth in range(3):
        with torch.no_grad():
            expected = plain_mtp(weights, names, TEXT, 6, depth)
        torch.testing.assert_close(found[depth], expected, atol=1e-5, rtol=1e-4)


@every_format
def test_a_written_head_is_read_back(make: Callable[[Path], Path], names: Names, tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    head = load(make(tmp_path / "from"))
    head.save(tmp_path / "to")
    assert f"model.layers.{NUM_LAYERS}.eh_proj.weight" in load_file(tmp_path / "to" / "model.safetensors")
    again = load(tmp_path / "to")
    assert torch.equal(drafted_logits(again, TEXT[:6], TEXT[6:9]), drafted_logits(head, TEXT[:6], TEXT[6:9]))


SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "attn_implementation": "eager",
}
ATTENTION = {"num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GATED = {**ATTENTION, "layer_types": ["full_attention"] * NUM_LAYERS}
SOFTMAX = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
SIGMOID = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 0,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "rope_interleave": True,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 40.0,
    "original_max_position_embeddings": 4,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
HY3 = {**DEEPSEEK, "norm": "final_layernorm"}
ERNIE = {
    "prefix": "model.",
    "layer": "mtp_block.0.",
    "enorm": "mtp_emb_norm.0",
    "hnorm": "mtp_hidden_norm.0",
    "project": "mtp_linear_proj.0",
    "norm": "",
}
NAMES_OF_HY3 = {
    "mlp.gate.weight": "mlp.router.gate.weight",
    "mlp.e_score_correction_bias": "mlp.expert_bias",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
"""Names in Transformers, and in checkpoints of Hy3."""
MASKS_FIRST = ("hy3", "ernie-4.5")
PUBLISHED: dict[str, tuple[str, str, Names, dict[str, Any]]] = {
    "qwen3.5": ("qwen3_5", "Qwen3_5Text", QWEN, GATED),
    "qwen3.5-moe": ("qwen3_5_moe", "Qwen3_5MoeText", QWEN, GATED | SOFTMAX),
    "qwen3-next": ("qwen3_next", "Qwen3Next", QWEN, GATED | SOFTMAX),
    "glm-4.5": (
        "glm4_moe",
        "Glm4Moe",
        DEEPSEEK,
        ATTENTION | SIGMOID | {"use_qk_norm": True, "attention_bias": True},
    ),
    "glm-4.7-flash": (
        "glm4_moe_lite",
        "Glm4MoeLite",
        DEEPSEEK,
        SIGMOID | LATENT | {"mlp_layer_types": ["sparse"] * NUM_LAYERS},
    ),
    "deepseek-v3": ("deepseek_v3", "DeepseekV3", DEEPSEEK, SIGMOID | LATENT),
    "hy3": (
        "hy_v3",
        "HYV3",
        HY3,
        ATTENTION
        | EXPERTS
        | {"num_experts": 4, "router_scaling_factor": 1.7, "mlp_layer_types": ["sparse"] * NUM_LAYERS},
    ),
    "ernie-4.5": ("ernie4_5", "Ernie4_5", ERNIE, ATTENTION | {"use_bias": True}),
    "deepseek-v3, YaRN": (
        "deepseek_v3",
        "DeepseekV3",
        DEEPSEEK,
        SIGMOID | LATENT | {"rope_parameters": YARN},
    ),
    "deepseek-v3, queries projected": (
        "deepseek_v3",
        "DeepseekV3",
        DEEPSEEK,
        SIGMOID | LATENT | {"q_lora_rank": None, "rope_interleave": False},
    ),
}
"""Folder and class names in Transformers, tensor names and sizes, by published family."""


def write_published(folder: Path, name: str) -> tuple[nn.ModuleDict, Any]:
    """Write a module with a layer of Transformers, as published, and return its parts and rotary embedding."""
    package, prefix, names, fields = PUBLISHED[name]
    code = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    config = getattr(transformers, f"{prefix}Config")(**SIZES | fields)
    make = {part: getattr(code, prefix.removesuffix("Text") + part) for part in ("RMSNorm", "DecoderLayer")}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        parts = nn.ModuleDict(
            {part: make["RMSNorm"](WIDTH, eps=config.rms_norm_eps) for part in ("enorm", "hnorm", "norm")}
        )
        parts["project"] = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        parts["layer"] = make["DecoderLayer"](config, 0)
        for weight in [*parts.parameters(), *parts.buffers()]:
            nn.init.normal_(weight, std=0.3)
    tensors: Tensors = {}
    for key, tensor in parts.state_dict().items():
        part, _, rest = key.partition(".")
        if names is ERNIE and part == "norm":
            continue
        if names is HY3:
            old = next((old for old in NAMES_OF_HY3 if rest.startswith(old)), "")
            rest = NAMES_OF_HY3.get(old, "") + rest.removeprefix(old)
        own = names["prefix"] + (names["layer"] + rest if part == "layer" else f"{names[part]}.{rest}")
        separate = name != "qwen3.5-moe" and own.endswith(("experts.gate_up_proj", "experts.down_proj"))
        tensors |= of_each_expert(own, tensor) if separate else {own: tensor}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    config.save_pretrained(folder)
    if (
        "moe_intermediate_size" in fields and names is QWEN
    ):  # not in the configuration of models without dense layers
        described = json.loads((folder / "config.json").read_text())
        described.pop("intermediate_size", None)
        (folder / "config.json").write_text(json.dumps(described))
    return parts.double(), getattr(code, f"{prefix}RotaryEmbedding")(config)


def of_each_expert(name: str, joined: Tensor) -> Tensors:
    start, _, projection = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
    return {
        f"{start}.{expert}.{part}.weight": matrix
        for expert, matrices in enumerate(joined)
        for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True)
    }


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_module_has_the_logits_of_its_layer_in_transformers(name: str, tmp_path: Path) -> None:
    """Gated and latent attention, experts, rotary positions on a part of each head, norm weights around 0."""
    parts, rotary = write_published(tmp_path, name)
    head, reads_normed = load(tmp_path), PUBLISHED[name][2] in (QWEN, HY3)
    head.save(tmp_path / "again")
    model = target_model()
    for each in (head, load(tmp_path / "again")):
        found = drafted_logits(each, TEXT[:6], TEXT[6:9])
        with torch.no_grad():
            features = model.model(torch.tensor([TEXT[:6]])).last_hidden_state[:, :5]
            for depth in range(3):
                embedded = model.model.embed_tokens(torch.tensor([TEXT[1 : 6 + depth]]))
                embedded[:, : int(name in MASKS_FIRST)] = 0
                both, length = (parts["enorm"](embedded), parts["hnorm"](features)), embedded.shape[1]
                joined = parts["project"](torch.cat(both, -1))
                places = torch.arange(length)[None]
                positions = rotary(joined, places.expand(3, 1, -1) if "3.5" in name else places)
                mask = torch.full((1, 1, length, length), -torch.inf).triu(1).double()
                states = parts["layer"](joined, position_embeddings=positions, attention_mask=mask)[:, -1:]
                normed = states if name == "ernie-4.5" else parts["norm"](states)
                features = torch.cat([features, normed if reads_normed else states], 1)
                torch.testing.assert_close(found[depth], model.lm_head(normed)[0, 0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_module_in_fp8_is_decoded_or_refused_before_it_is_read(is_known: bool, tmp_path: Path) -> None:
    """As that of DeepSeek-V3 is published."""
    block, (exact, coded) = 16, (tmp_path / name for name in ("exact", "coded"))
    for folder in (exact, coded):
        folder.mkdir()
        write_published(folder, "deepseek-v3")
    decoded = load_file(exact / "model.safetensors")
    stored = dict(decoded)
    for name, weight in decoded.items():
        if name.endswith("_proj.weight"):
            sizes = [-(-size // block) for size in weight.shape]
            scale = torch.rand(sizes, generator=torch.Generator().manual_seed(1)) / 64
            factors = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)
            factors = factors[: weight.shape[0], : weight.shape[1]]
            codes = (weight / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[name], stored[f"{name}_scale_inv"] = codes, scale
            decoded[name] = codes.float() * factors
    save_file(decoded, exact / "model.safetensors")
    save_file(stored, coded / "model.safetensors")
    described = (
        {"quant_method": "fp8", "weight_block_size": [block, block]} if is_known else {"quant_method": "x"}
    )
    edit(coded, quantization_config=described)
    if not is_known:
        with pytest.raises(UnsupportedModelError, match=r"weights that can be read in .*_scale_inv"):
            find_module(coded)
        return
    expected, found = (load(folder).state_dict() for folder in (exact, coded))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_the_correction_of_the_experts_load_stays_in_float32(tmp_path: Path) -> None:
    """In bfloat16 the corrections of a large model, which differ little, would become equal."""
    write_published(tmp_path, "glm-4.5")
    name = f"{DEEPSEEK['prefix']}mlp.gate.e_score_correction_bias"
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = 7 + torch.arange(8) / 1000
    save_file(tensors, tmp_path / "model.safetensors")
    router = MtpHead.load(tmp_path, TARGET).to(torch.bfloat16).layer.mlp.gate
    assert router.weight.dtype is torch.bfloat16
    assert torch.equal(router.e_score_correction_bias, tensors[name])


def drafter_of(name: str, path: Path) -> MtpDrafter:
    drafter = named(name, Named(TransformersRuntime(target_model()), str(path)))
    assert isinstance(drafter, MtpDrafter)
    return drafter


@in_every_target
def test_without_a_path_the_module_is_the_targets(
    make: Callable[[Path], Path], names: Names, tmp_path: Path
) -> None:
    assert contains_mtp(make(tmp_path))
    drafter = drafter_of("mtp,tree=2x1", tmp_path)
    assert drafter.name == "mtp,tree=2x1"
    expected = load(tmp_path).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in head_of(drafter).state_dict().items())


@pytest.mark.parametrize("make", [make for make, _ in SEPARATE.values()], ids=SEPARATE)
def test_a_folder_with_a_module_alone_is_no_target(make: Callable[[Path], Path], tmp_path: Path) -> None:
    assert not contains_mtp(make(tmp_path))
    with pytest.raises(CheckpointError, match=f"drafter of the kind mtp; write mtp:{tmp_path}"):
        refuse_head(str(tmp_path))
    (tmp_path / "target").mkdir()
    drafter = drafter_of(f"mtp:{tmp_path}", deepseek(tmp_path / "target"))
    assert torch.equal(head_of(drafter).eh_proj.weight, load(tmp_path).eh_proj.weight)


def test_a_module_of_angelspec_for_vllm_is_read(tmp_path: Path) -> None:
    head = load(angelspec_served(tmp_path))
    assert head.masks_first
    assert head.norm_output
    assert head.layer_config.model_type == "qwen3"


@pytest.mark.parametrize("name", ["hy3", "ernie-4.5"])
def test_positions_without_a_base_have_that_of_the_family(name: str, tmp_path: Path) -> None:
    write_published(tmp_path, name)
    expected = load(tmp_path).rotary.frequencies
    edit(tmp_path, rope_parameters=None, rope_theta=None)
    assert torch.equal(load(tmp_path).rotary.frequencies, expected)


def test_experts_of_angelspec_are_those_of_hy3(tmp_path: Path) -> None:
    one, other = tmp_path / "hy3", tmp_path / "angelspec"
    for folder in (one, other):
        folder.mkdir()
    write_published(one, "hy3")
    found = load_file(one / "model.safetensors")
    join_experts(found, f"{HY3['prefix']}mlp.experts.")
    tensors: Tensors = {}
    for key, tensor in found.items():
        short = key.removeprefix(HY3["prefix"])
        is_end = short.startswith(("enorm", "hnorm", "eh_proj", "final_layernorm"))
        tensors[short if is_end else f"midlayer.{short}"] = tensor
    gate, up = tensors.pop("midlayer.mlp.experts.gate_up_proj").chunk(2, 1)
    fused = {"gate": gate, "up": up, "down": tensors.pop("midlayer.mlp.experts.down_proj")}
    tensors |= {f"midlayer.mlp.experts_{part}_proj": each.transpose(1, 2) for part, each in fused.items()}
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, other / "model.safetensors")
    fields = json.loads((one / "config.json").read_text())
    del fields["num_hidden_layers"]
    (other / "config.json").write_text(json.dumps(fields | {"model_type": "mtp"}))
    expected, head = load(one).state_dict(), load(other)
    assert head.masks_first
    assert all(torch.equal(tensor, expected[key]) for key, tensor in head.state_dict().items())


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3-next"])
def test_a_module_that_speculators_has_extracted_is_that_of_the_target(name: str, tmp_path: Path) -> None:
    """Norms keep weights around 0 there; `MTPConverter` renames and joins the experts."""
    one, other = tmp_path / "target", tmp_path / "extracted"
    for folder in (one, other):
        folder.mkdir()
    write_published(one, name)
    renamed = {f"{QWEN[part]}.": f"{SPECULATORS[part]}." for part in ("enorm", "hnorm", "project", "norm")}
    tensors: Tensors = {}
    for key, tensor in load_file(one / "model.safetensors").items():
        short = key.removeprefix("mtp.").removeprefix("layers.0.")
        is_end = "layers.0." not in key
        new = next(
            (renamed[old] + short.removeprefix(old) for old in renamed if is_end and short.startswith(old)),
            short,
        )
        tensors[f"mtp_layers.0.{new}"] = tensor
    join_experts(tensors, "mtp_layers.0.mlp.experts.")
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, other / "model.safetensors")
    text = json.loads((one / "config.json").read_text())
    text["model_type"] = {"qwen3_5": "qwen3_5_text"}.get(text["model_type"], text["model_type"])
    config = {"speculators_model_type": "mtp", "transformer_layer_config": text}
    (other / "config.json").write_text(json.dumps(config))
    expected, found = load(one).state_dict(), load(other).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_experts_that_mlx_stacks_are_read(tmp_path: Path) -> None:
    """As the same tensors in the names of Transformers, with norms around 1."""
    one, other = tmp_path / "hf", tmp_path / "mlx"
    for folder in (one, other):
        folder.mkdir()
    write_published(one, "qwen3.5-moe")
    tensors: Tensors = {}
    for name, tensor in load_file(one / "model.safetensors").items():
        short = name.removeprefix("mtp.")
        if short.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, 1), strict=True):
                tensors[f"layers.0.mlp.switch_mlp.{part}_proj.weight"] = half.contiguous()
        elif short.endswith("experts.down_proj"):
            tensors["layers.0.mlp.switch_mlp.down_proj.weight"] = tensor
        else:
            tensors[short] = tensor + 1 if "norm" in short else tensor
    save_file(tensors, other / "model.safetensors")
    text = json.loads((one / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({"model_type": "qwen3_5_mtp", "text_config": text}))
    expected, found = load(one).state_dict(), load(other).state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_with_a_path_the_module_is_read_from_there(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    head = MtpHead.fresh(TARGET, seed=0)
    head.save(tmp_path / "module")
    drafter = drafter_of(f"mtp:{tmp_path / 'module'}", deepseek(tmp_path / "target"))
    assert torch.equal(head_of(drafter).state_dict()["eh_proj.weight"], head.eh_proj.weight.double())


def test_a_target_without_a_module_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(layer_config(WIDTH, VOCAB_SIZE)))
    assert not contains_mtp(tmp_path)
    assert not contains_mtp(tmp_path / "nowhere")
    with pytest.raises(BadInputError, match="expected mtp:PATH for the target tiny"):
        drafter_of("mtp", tmp_path)


def with_tensors(folder: Path, change: Callable[[Tensors, str], object]) -> Path:
    """Write the module's tensors to one file, changed by a function of the tensors and their prefix."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
        path.unlink()
    change(tensors, DEEPSEEK["prefix"])
    save_file(tensors, folder / "model.safetensors")
    return folder


def without(name: str) -> Callable[[Path], Path]:
    return lambda at: with_tensors(deepseek(at), lambda each, prefix: each.pop(prefix + name))


def beside(name: str, *size: int) -> Callable[[Path], Path]:
    return lambda at: with_tensors(
        deepseek(at), lambda each, prefix: each.update({prefix + name: torch.ones(size)})
    )


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (without("hnorm.weight"), "missing model.layers.4.hnorm.weight"),
    "none": (
        without("eh_proj.weight"),
        r"kind mtp in .*model.layers.4.eh_proj",
    ),
    "unknown": (beside("x.weight", 1), "unknown model.layers.4.x.weight"),
    "wrong shape": (beside("eh_proj.weight", WIDTH, WIDTH), r"\[32, 32\] instead of \[32, 64\]"),
    "latent attention": (beside("self_attn.kv_a_proj_with_mqa.weight", 1), r"latent attention \(MLA\)"),
    "experts": (beside("mlp.experts.0.up_proj.weight", 1), "expected the field 'moe_intermediate_size'"),
    "a router": (beside("mlp.gate.weight", 1), "unknown model.layers.4.mlp.gate.weight"),
    "linear attention": (beside("linear_attn.in_proj.weight", 1), "with linear attention"),
    "gates": (lambda at: edit(qwen(at), attn_output_gate=True), "gated attention"),
    "another layer": (lambda at: edit(deepseek(at), model_type="gpt_oss"), "got gpt_oss"),
    "another width": (lambda at: edit(deepseek(at), hidden_size=64), "width 32"),
    "another vocabulary": (lambda at: edit(deepseek(at), vocab_size=32), "got one for 32 and 4"),
    "another depth": (lambda at: edit(qwen(at), num_hidden_layers=5), "got one for 31 and 5"),
    "no sizes": (
        lambda at: edit(deepseek(at), intermediate_size=None),
        "expected the field 'intermediate_size' in",
    ),
    "no depth": (
        lambda at: edit(deepseek(at), num_hidden_layers=None),
        "expected the field 'num_hidden_layers' in",
    ),
    "no number": (lambda at: edit(deepseek(at), rms_norm_eps=[]), "expected a drafter that fits in"),
    "no frequency": (
        lambda at: edit(deepseek(at), rope_parameters={"rope_theta": "x"}),
        "expected a drafter that fits in",
    ),
    "other experts than those of Hy3": (
        lambda at: edit(angelspec(at), mlp_type="moe", qk_norm=True, route_norm=False),
        "like those of Hy3 in .*, got route_norm of false",
    ),
    "another width of the target": (
        lambda at: with_tensors(
            angelspec(at), lambda each, prefix: each.update({"hidden_proj.weight": torch.ones(1)})
        ),
        "unknown hidden_proj.weight",
    ),
    "another kind of speculator": (
        lambda at: edit(speculators(at), speculators_model_type="eagle3"),
        "speculators_model_type mtp in .*, got 'eagle3'",
    ),
    "no json": (lambda at: (deepseek(at) / "config.json").write_text("[1]"), "JSON object"),
    "broken": (lambda at: (deepseek(at) / "x.safetensors").write_text("{"), "readable weights"),
}


@pytest.mark.parametrize(("make", "message"), FAULTS.values(), ids=FAULTS)
def test_unusable_folders_are_refused_in_one_line(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(SecondGuessError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    unsupported = any(
        word in message for word in ("MLA", "linear attention", "gated", "gpt_oss", "Hy3", "speculators")
    )
    assert isinstance(caught.value, UnsupportedModelError) == unsupported


def test_the_seed_determines_a_new_module() -> None:
    one, same, other = (MtpHead.fresh(TARGET, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.eh_proj.weight, same.eh_proj.weight)
    assert not torch.equal(one.eh_proj.weight, other.eh_proj.weight)
    assert torch.equal(one.norm.weight, torch.ones(WIDTH))
