"""Configurations of GGUF files of every architecture that the kernels read, with every scaling of RoPE."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from families import needs_kernels, row_of
from gguf_files import WIDTH, finish, write_model, writer_for
from secondguess.checkpoint.loader import load_model, module_of
from secondguess.checkpoint.plan import Checkpoint
from secondguess.core import Draft
from secondguess.errors import CheckpointError, UnsupportedModelError

SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "vocab_size": 300,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
WINDOW = 8
GEMMA = {"head_dim": 32, "sliding_window": WINDOW}
LINEAR = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4, "beta_fast": 20.0,
    "beta_slow": 2.0,
}  # fmt: skip
NUM_FACTORS = 24
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1 + index / 8 for index in range(NUM_FACTORS)],
    "long_factor": [2.0 + index for index in range(NUM_FACTORS)], "original_max_position_embeddings": 64,
    "rope_theta": 1e4, "partial_rotary_factor": 0.75, "attention_factor": 1.25,
}  # fmt: skip
YARN_FIELDS: dict[str, Any] = {
    "rope__freq_base": 1e4, "rope__scaling__type": "yarn", "rope__scaling__factor": 4.0,
    "rope__scaling__original_context_length": 32, "rope__scaling__yarn_beta_fast": 20.0,
    "rope__scaling__yarn_beta_slow": 2.0, "rope__scaling__yarn_attn_factor": 1.0,
    "rope__scaling__yarn_ext_factor": 1.0,
}  # fmt: skip
NEUTRAL_FIELDS: dict[str, Any] = {
    "rope__freq_base": 1e4, "rope__scaling__type": "linear", "rope__scaling__attn_factor": 1.0,
    "rope__scaling__yarn_attn_factor": 1.0, "rope__scaling__yarn_ext_factor": -1.0,
    "rope__scaling__yarn_beta_fast": 32.0, "rope__scaling__yarn_beta_slow": 1.0,
}  # fmt: skip
LONGROPE_FIELDS: dict[str, Any] = {
    "rope__freq_base": 1e4, "rope__scaling__original_context_length": 64, "rope__scaling__attn_factor": 1.25,
    "rope__dimension_count": 48, "attention__sliding_window": WINDOW,
}  # fmt: skip
LONGROPE_FACTORS = {
    f"rope_factors_{name}.weight": torch.tensor(LONGROPE[f"{name}_factor"]) for name in ("long", "short")
}
GEMMA_FIELDS: dict[str, Any] = {"attention__key_length": 32, "attention__sliding_window": WINDOW}
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "qwen2-yarn": ("qwen2", transformers.Qwen2Config(**SIZES, rope_parameters=YARN), YARN_FIELDS),
    "qwen3": (
        "qwen3",
        transformers.Qwen3Config(**SIZES, head_dim=32, rope_theta=1e6),
        {"rope__freq_base": 1e6, "attention__key_length": 32},
    ),
    "llama-linear": (
        "llama",
        transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
        {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0},
    ),
    "phi3": ("phi3", transformers.Phi3Config(**SIZES), {"attention__sliding_window": 0, "rope__dimension_count": 64}),
    "phi3-longrope": (
        "phi3",
        transformers.Phi3Config(
            **SIZES, rope_parameters=LONGROPE, sliding_window=WINDOW, original_max_position_embeddings=64
        ),
        LONGROPE_FIELDS,
    ),
    "gemma2": (
        "gemma2",
        transformers.Gemma2Config(
            **SIZES, **GEMMA, query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=3.0
        ),
        GEMMA_FIELDS | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3-linear": (
        "gemma3",
        transformers.Gemma3TextConfig(
            **SIZES | {"num_hidden_layers": 6},
            **GEMMA,
            query_pre_attn_scalar=32,
            rope_parameters={
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        ),
        GEMMA_FIELDS
        | {"rope__freq_base": 1e6, "rope__freq_base_swa": 500.0, "rope__scaling__type": "linear"}
        | {"rope__scaling__factor": 8.0},
    ),
    "llama-old-linear": (
        "llama",
        transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
        {"rope__freq_base": 1e6, "rope__scale_linear": 8.0},
    ),
    "llama-biases": (
        "llama",
        transformers.LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, rope_theta=1e4),
        NEUTRAL_FIELDS,
    ),
    "gemma3-without-windows": (
        "gemma3",
        transformers.Gemma3TextConfig(
            **SIZES, **GEMMA, query_pre_attn_scalar=32, layer_types=["full_attention"] * 2, rope_theta=1e4
        ),
        {"attention__key_length": 32},
    ),
    "gemma3-window-of-0": (
        "gemma3",
        transformers.Gemma3TextConfig(
            **SIZES, **GEMMA, query_pre_attn_scalar=32, layer_types=["full_attention"] * 2, rope_theta=1e4
        ),
        {"attention__key_length": 32, "attention__sliding_window": 0},
    ),
    "gemma3-pattern": (
        "gemma3",
        transformers.Gemma3TextConfig(
            **SIZES,
            **GEMMA,
            query_pre_attn_scalar=32,
            layer_types=["sliding_attention", "full_attention"],
            rope_theta=1e4,
        ),
        GEMMA_FIELDS | {"attention__sliding_window_pattern": 2},
    ),
    "gemma2-without-caps": (
        "gemma2",
        transformers.Gemma2Config(
            **SIZES, **GEMMA, query_pre_attn_scalar=32, attn_logit_softcapping=None, final_logit_softcapping=None,
            layer_types=["sliding_attention"] * 2,
        ),
        GEMMA_FIELDS
        | {"attn_logit_softcapping": 0.0, "final_logit_softcapping": 0.0, "attention__sliding_window_pattern": 0},
    ),
    "phi3-longrope-without-factor": (
        "phi3",
        transformers.Phi3Config(
            **SIZES, rope_parameters=LONGROPE | {"attention_factor": 1.0}, sliding_window=WINDOW,
            original_max_position_embeddings=64,
        ),
        {key: value for key, value in LONGROPE_FIELDS.items() if not key.endswith("attn_factor")},
    ),
    "stablelm": (
        "stablelm",
        transformers.StableLmConfig(**SIZES, use_qkv_bias=True, partial_rotary_factor=0.5, rope_theta=500.0),
        {"rope__dimension_count": 32, "rope__freq_base": 500.0},
    ),
}  # fmt: skip
TOKENS = torch.arange(3, 43)


def write_case(folder: Any, architecture: str, config: Any, fields: dict[str, Any]) -> Any:
    """Write a random model of a case; return it in float32."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with torch.no_grad():
            for value in model.parameters():
                if value.dim() == 1:  # norms and biases that matter
                    value.add_(0.3 * torch.randn_like(value))
            factors = LONGROPE_FACTORS if config.rope_parameters.get("rope_type") == "longrope" else {}
            write_model(writer_for(folder, architecture, config, **fields), model, "Q8_0", factors=factors)
    return model


@needs_kernels
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_model_that_was_written(case, tmp_path):
    architecture, config, fields = CASES[case]
    model = write_case(tmp_path, architecture, config, fields)
    file = tmp_path / "model.gguf"
    with torch.inference_mode():
        expected = model(input_ids=TOKENS[None]).logits[0]
    exact = Checkpoint.resolve(file, dtype="float32", device="cpu", runtime="transformers")
    with torch.inference_mode():
        found = module_of(exact)(input_ids=TOKENS[None]).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    loaded = load_model(Checkpoint.resolve(file, device="cpu"))
    assert loaded.runtime_description == "native, weights in 8 bits"
    row = row_of(TOKENS.tolist())
    loaded.runtime.begin([row])
    found = loaded.runtime.score([row], Draft.empty(1)).logits[0, 0]
    assert (found - expected[-1]).norm() < 0.08 * expected[-1].norm()  # rounding of activations


@pytest.mark.parametrize(("architecture", "num_layers"), [("gemma2", 46), ("gemma3", 62)])
def test_the_largest_gemmas_scale_queries_by_the_width_per_head(architecture, num_layers, tmp_path):
    """They are known by their number of layers; the file has no field for it."""
    for layers, scalar in ((num_layers, WIDTH // 4), (num_layers - 1, GEMMA["head_dim"])):
        config = transformers.Gemma2Config(**SIZES | {"num_hidden_layers": layers}, **GEMMA)
        finish(writer_for(tmp_path, architecture, config, **GEMMA_FIELDS))
        found = Checkpoint.resolve(tmp_path / "model.gguf", device="cpu").config
        assert found.query_pre_attn_scalar == scalar


def test_weights_that_the_class_does_not_have_are_refused(tmp_path):
    """Transformers leaves them out."""
    architecture, config, fields = CASES["qwen3"]
    for runtime in ("auto", "transformers"):
        folder = tmp_path / runtime
        folder.mkdir()
        writer = writer_for(folder, architecture, config, **fields)
        writer.add_tensor("blk.1.attn_sinks.weight", torch.ones(4).numpy())
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            write_model(writer, model, "Q8_0")
        with pytest.raises(CheckpointError, match=r"weights of a qwen3, got blk\.1\.attn_sinks\.weight"):
            load_model(Checkpoint.resolve(folder / "model.gguf", device="cpu", runtime=runtime))


def test_the_sizes_of_experts_are_read_for_other_architectures(tmp_path):
    config = transformers.Qwen2MoeConfig(**SIZES)
    fields = {"expert_feed_forward_length": 64, "expert_shared_feed_forward_length": 96}
    finish(writer_for(tmp_path, "qwen2moe", config, expert_count=4, expert_used_count=2, **fields))
    found = Checkpoint.resolve(tmp_path / "model.gguf", device="cpu").config
    assert (found.moe_intermediate_size, found.shared_expert_intermediate_size) == (64, 96)


def test_fields_of_other_architectures_are_read_or_refused(tmp_path):
    config = transformers.Starcoder2Config(**SIZES)
    config.layer_norm_eps = config.norm_epsilon
    for number, (fields, refused) in enumerate((
        ({"rope__freq_base": 1e6}, None),
        ({"attention__sliding_window": 8}, "architecture starcoder2 with attention.sliding_window"),
        ({"rope__scale_linear": 8.0}, "architecture starcoder2 with a scaling of RoPE"),
        ({"rope__scaling__factor": 8.0}, "architecture starcoder2 with a scaling of RoPE"),
    )):  # fmt: skip
        folder = tmp_path / str(number)
        folder.mkdir()
        finish(writer_for(folder, "starcoder2", config, **fields))
        if refused is None:
            found = Checkpoint.resolve(folder / "model.gguf", device="cpu").config
            assert found.rope_parameters["rope_theta"] == 1e6
        else:
            with pytest.raises(CheckpointError, match=refused):
                Checkpoint.resolve(folder / "model.gguf", device="cpu")


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"rope__scaling__type": "none", "rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor"),
        ({"rope__scaling__type": "ntk"}, "rope.scaling.type ntk"),
        ({"rope__dimension_count": 32}, "RoPE on 32 of 64 numbers"),
        ({"rope__scaling__type": "linear", "rope__scaling__alpha": 2.0}, "rope.scaling.alpha of a scaling of type linear"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_log_multiplier": 0.1}, "rope.scaling.yarn_log_multiplier"),
    ],
)  # fmt: skip
def test_unknown_rotary_positions_are_refused(fields, found, tmp_path):
    config = transformers.Qwen2Config(**SIZES)
    write_case(tmp_path, "qwen2", config, fields)
    with pytest.raises(
        CheckpointError, match=f"rotary positions are known, got {found}.*safetensors checkpoint"
    ):
        Checkpoint.resolve(tmp_path / "model.gguf", device="cpu")


def test_an_architecture_that_transformers_does_not_read_is_refused(tmp_path):
    finish(writer_for(tmp_path, "granite", transformers.GraniteConfig(**SIZES)))
    with pytest.raises(UnsupportedModelError, match=r"got granite in .*; use the safetensors checkpoint"):
        Checkpoint.resolve(tmp_path / "model.gguf")


def test_ends_of_turns_are_end_tokens(tmp_path):
    """The fields have numbers; other ends are known by name, as in llama.cpp."""
    config = transformers.LlamaConfig(**SIZES)
    writer = writer_for(tmp_path, "llama", config, rope__freq_base=1e4)
    writer.add_eot_token_id(4)
    writer.add_eom_token_id(9)
    tokens = list(writer.kv_data[0]["tokenizer.ggml.tokens"].value)
    tokens[7], tokens[8] = "<|im_end|>", "<end_of_turn>"
    writer.kv_data[0]["tokenizer.ggml.tokens"].value = tokens
    finish(writer)
    assert Checkpoint.resolve(tmp_path / "model.gguf", device="cpu").config.eos_token_id == [0, 4, 7, 8, 9]


def test_a_pattern_of_windows_may_name_each_layer(tmp_path):
    config = transformers.Gemma3TextConfig(**SIZES | {"num_hidden_layers": 3}, **GEMMA)
    for pattern in ([False, True, False, True], [False, True]):
        writer = writer_for(tmp_path, "gemma3", config, **GEMMA_FIELDS)
        writer.add_array("gemma3.attention.sliding_window_pattern", pattern)
        finish(writer)
        if len(pattern) < 3:
            with pytest.raises(UnsupportedModelError, match="of 3 layers, got one of 2"):
                Checkpoint.resolve(tmp_path / "model.gguf", device="cpu")
        else:
            found = Checkpoint.resolve(tmp_path / "model.gguf", device="cpu").config
            assert found.layer_types == ["full_attention", "sliding_attention", "full_attention"]


def test_the_end_of_sequence_is_kept_in_addition_to_ends_of_turns(tmp_path):
    writer = writer_for(tmp_path, "llama", transformers.LlamaConfig(**SIZES), rope__freq_base=1e4)
    writer.add_eos_token_id(5)
    writer.add_eot_token_id(4)
    finish(writer)
    found = Checkpoint.resolve(tmp_path / "model.gguf", device="cpu").config.eos_token_id
    assert found == [0, 4, 5], "0 is an end by its name"
