"""Tiny random models of every tested family, and their reference forward pass."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from checkpoints import read_module, write_tokenizer
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.core import Draft, Row
from secondguess.runtime.base import ForwardOutput, HiddenStates
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.cpu.library import units
from secondguess.runtime.cuda.runtime import to_graphs
from secondguess.runtime.decoder.families import undescribed_reason
from secondguess.runtime.decoder.fused import fuse_for_kernels
from secondguess.runtime.weight_format import INT4
from secondguess.sampling import SamplingParams

VOCAB_SIZE = 300
WINDOW = 8
LLAMA_LIKE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "router_jitter_noise": 0.0}
GEMMA = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**LLAMA_LIKE),
    "mistral": lambda: transformers.MistralConfig(**LLAMA_LIKE, sliding_window=WINDOW),
    "qwen2": lambda: transformers.Qwen2Config(**LLAMA_LIKE),
    "qwen2-windowed": lambda: transformers.Qwen2Config(
        **LLAMA_LIKE, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**LLAMA_LIKE, head_dim=16),
    "phi3": lambda: transformers.Phi3Config(**LLAMA_LIKE),
    "gemma": lambda: transformers.GemmaConfig(**LLAMA_LIKE, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **LLAMA_LIKE, **GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=8
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**LLAMA_LIKE, **GEMMA, query_pre_attn_scalar=8),
    "olmo2": lambda: transformers.Olmo2Config(**LLAMA_LIKE),
    "granite": lambda: transformers.GraniteConfig(
        **LLAMA_LIKE, embedding_multiplier=3.0, residual_multiplier=0.6, attention_multiplier=0.2, logits_scaling=3.0
    ),
    "smollm3": lambda: transformers.SmolLM3Config(**LLAMA_LIKE, no_rope_layers=[1, 0]),
    "glm": lambda: transformers.GlmConfig(**LLAMA_LIKE, head_dim=16),
    "phi": lambda: transformers.PhiConfig(**LLAMA_LIKE),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=96, initializer_range=0.15,
        bos_token_id=None, eos_token_id=0,
    ),
    "gpt-neox": lambda: transformers.GPTNeoXConfig(
        **{name: value for name, value in LLAMA_LIKE.items() if name != "num_key_value_heads"}
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=96, init_std=0.15, bos_token_id=None, eos_token_id=0,
        pad_token_id=1,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **LLAMA_LIKE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(
        **LLAMA_LIKE, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=WINDOW, swiglu_limit=0.5,
        layer_types=["sliding_attention", "full_attention"], rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    ),
    "deepseek-v3": lambda: transformers.DeepseekV3Config(
        **LLAMA_LIKE | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16, first_k_dense_replace=1,
    ),
    "doge": lambda: transformers.DogeConfig(**LLAMA_LIKE),
    "gemma4": lambda: transformers.Gemma4TextConfig(
        **LLAMA_LIKE | {"num_hidden_layers": 4}, head_dim=8, global_head_dim=16, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB_SIZE, hidden_size_per_layer_input=8,
    ),
    "llama4": lambda: transformers.Llama4TextConfig(
        **LLAMA_LIKE, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=WINDOW,
        layer_types=["chunked_attention", "full_attention"],
    ),
    # Modules that do not take our masks, which run row by row: chosen keys, ALiBi, local windows, rotary positions.
    "deepseek-v3.2": lambda: transformers.DeepseekV32Config(
        **LLAMA_LIKE | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8,
        qk_rope_head_dim=8, v_head_dim=4, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2,
        moe_intermediate_size=16, mlp_layer_types=["dense", "sparse"], head_dim=8, index_topk=16, index_n_heads=8,
        index_head_dim=16,
    ),
    "bloom": lambda: transformers.BloomConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.15, bos_token_id=None,
        eos_token_id=0, pad_token_id=0, max_position_embeddings=96,
    ),
    "gpt-neo": lambda: transformers.GPTNeoConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=96, window_size=WINDOW,
        attention_types=[[["global", "local"], 1]], initializer_range=0.15, bos_token_id=None, eos_token_id=0,
    ),
    "gptj": lambda: transformers.GPTJConfig(
        vocab_size=VOCAB_SIZE, n_embd=32, n_layer=2, n_head=4, n_positions=96, rotary_dim=4, initializer_range=0.15,
        bos_token_id=None, eos_token_id=0,
    ),
}  # fmt: skip
RECURRENT: dict[str, Callable[[], Any]] = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **LLAMA_LIKE | {"initializer_range": 0.1}, head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    ),
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, num_heads=8, head_dim=8, state_size=8, n_groups=2, num_hidden_layers=2,
        chunk_size=16, initializer_range=0.15, max_position_embeddings=96, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    ),
    "lfm2": lambda: transformers.Lfm2Config(
        **LLAMA_LIKE, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **{name: value for name, value in LLAMA_LIKE.items() if name != "num_hidden_layers"}, head_dim=8,
        layers_block_type=["linear_attention", "full_attention", "mlp"], ssm_state_size=8, mamba_num_heads=8,
        mamba_head_dim=8, n_groups=2, chunk_size=16, time_step_min=1e-9,
    ),
    "falcon-h1": lambda: transformers.FalconH1Config(
        **LLAMA_LIKE, mamba_d_ssm=64, mamba_n_heads=8, mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=16
    ),
}  # fmt: skip
"""Gated delta rule, Mamba-2 (alone, between and beside attention), short convolution."""
COPIED: dict[str, Callable[[], Any]] = {
    "qwen3.5": lambda: transformers.Qwen3_5TextConfig(
        **LLAMA_LIKE | {"initializer_range": 0.1}, head_dim=8, layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
    **{name: config for name, config in RECURRENT.items() if name != "qwen3-next"},
}  # fmt: skip
"""Recurrent families most of whose weights are those of linear layers, not of experts."""
FAMILIES |= {name: RECURRENT[name] for name in ("qwen3-next", "falcon-h1")}

SIMILAR: dict[str, Callable[[], Any]] = {
    "ministral": lambda: transformers.MinistralConfig(
        **LLAMA_LIKE, head_dim=8, sliding_window=WINDOW, layer_types=GEMMA["layer_types"]
    ),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **LLAMA_LIKE | {"num_attention_heads": 2}, original_max_position_embeddings=64,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75,
                         "short_factor": [1.0, 1.2, 1.3, 1.5, 2.0, 3.0], "long_factor": [9.0] * 6},
    ),
    "olmo3": lambda: transformers.Olmo3Config(**LLAMA_LIKE, sliding_window=WINDOW, layer_types=GEMMA["layer_types"]),
    "olmoe": lambda: transformers.OlmoeConfig(**LLAMA_LIKE, num_experts=4, num_experts_per_tok=2),
    "qwen3-moe-mixed": lambda: transformers.Qwen3MoeConfig(
        **LLAMA_LIKE, num_experts=40, num_experts_per_tok=3, moe_intermediate_size=24, head_dim=8, norm_topk_prob=True,
        mlp_only_layers=[0],
    ),
    "glm4": lambda: transformers.Glm4Config(**LLAMA_LIKE, head_dim=16),
    "stablelm": lambda: transformers.StableLmConfig(**LLAMA_LIKE, use_qkv_bias=True),
    "gpt-neox-sequential": lambda: transformers.GPTNeoXConfig(
        **{name: value for name, value in LLAMA_LIKE.items() if name != "num_key_value_heads"},
        use_parallel_residual=False,
    ),
}  # fmt: skip
"""Families that our own decoders run with the code of others above."""


COVERED = [name for name, config in FAMILIES.items() if not undescribed_reason(config())]
DENSE = [name for name in COVERED if not undescribed_reason(FAMILIES[name](), with_experts=False)]
HAS_KERNELS = bool(units())
KINDS = ["transformers", "fused", "graphs", *(["native"] if HAS_KERNELS else [])]
GRAPHS_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Device of the runtime with CUDA graphs, which runs without capturing on a CPU."""
CASES = [
    *((name, "transformers") for name in FAMILIES),
    *((name, kind) for kind in KINDS[1:] if kind != "graphs" for name in COVERED),
    *(pytest.param((name, "graphs"), marks=pytest.mark.gpu) for name in DENSE),
]
"""Every family by the module that Transformers has for it, and those that our own decoders cover."""

needs_kernels = pytest.mark.skipif(
    not HAS_KERNELS, reason="no kernels for this processor, or no compiler built them"
)


def write_checkpoint(config: Any, directory: Path, seed: int = 0) -> Path:
    """Random weights of a configuration, with a tokenizer, as `save_pretrained` leaves them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):  # zero at the start, which would hide that they are ignored
                torch.nn.init.normal_(parameter)
    model.save_pretrained(directory)
    write_tokenizer(directory, VOCAB_SIZE)
    return directory


def plain_model(directory: Path) -> Any:
    """The same checkpoint under Transformers' own eager attention: shares no code with our runtime."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def write_varied(name: str, directory: Path) -> Path:
    """A checkpoint of a family whose norms are not ones and whose biases are not zero, which would hide their use."""
    path = write_checkpoint((FAMILIES | SIMILAR)[name](), directory)
    model = plain_model(path)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if name.endswith(("bias", "sinks")):
                parameter.normal_(std=0.2)
    model.save_pretrained(path)
    return path


def plain_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """`[position, vocab]` of one uncached causal forward."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0]


class Uncached:
    """A native runtime called like a module: each text in one forward pass.

    The kernels' logits of a token do not depend on how it was cached, to the last bit.
    """

    def __init__(self, directory: Path) -> None:
        layers = range(json.loads((directory / "config.json").read_text())["num_hidden_layers"] + 1)
        self._runtime = runtime_of(directory, "native")
        self._runtime.request_hidden_states(layers)

    def __call__(self, tokens: Tensor, **_: object) -> Any:
        found = self._runtime.probe(tokens)
        return SimpleNamespace(logits=found.logits, hidden_states=[*found.hidden.values()])


def oracle_of(directory: Path, kind: str) -> Any:
    """Return the reference of a runtime: the module in float32, or for the kernels their own uncached forward pass."""
    return Uncached(directory) if kind == "native" else plain_model(directory)


def runtime_of(
    directory: Path, runtime: str = "auto", dtype: str | None = None, **options: Any
) -> CachedRuntime:
    if runtime == "graphs":
        return graphs_of(directory, getattr(torch, dtype or "float32"))
    dtype = dtype or ("bfloat16" if runtime == "native" else "float32")
    return load_model(
        Checkpoint.resolve(directory, dtype=dtype, device="cpu", runtime=runtime, **options)
    ).runtime


def graphs_of(directory: Path, dtype: torch.dtype = torch.float32) -> CachedRuntime:
    """The runtime with CUDA graphs; its inputs and outputs are on the host."""
    checked = fuse_for_kernels(read_module(str(directory), dtype).to(GRAPHS_DEVICE).eval())
    assert checked is not None
    runtime = to_graphs(checked)
    assert runtime is not None
    score, prefill = runtime.score, runtime.prefill

    def score_on_host(rows: Sequence[Row], draft: Draft) -> ForwardOutput:
        moved = Draft(*(each.to(GRAPHS_DEVICE) for each in (draft.tokens, draft.parents, draft.lengths)))
        found = score(rows, moved)
        return ForwardOutput(found.logits.cpu(), {layer: each.cpu() for layer, each in found.hidden.items()})

    def prefill_on_host(*arguments: Any, **options: Any) -> list[HiddenStates]:
        return [
            {layer: each.cpu() for layer, each in found.items()} for found in prefill(*arguments, **options)
        ]

    runtime.score, runtime.prefill = score_on_host, prefill_on_host  # type: ignore[method-assign]
    return runtime


def row_of(tokens: Sequence[int]) -> Row:
    return Row(list(tokens), SamplingParams(max_tokens=64))


def random_tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB_SIZE, (count,), generator=generator).tolist()


def trees(*rows: tuple[Sequence[int], Sequence[int]]) -> Draft:
    """A draft from (tokens, parents) per row, padded."""
    width = max(len(tokens) for tokens, _ in rows)
    return Draft(
        torch.tensor([[*tokens, *([0] * (width - len(tokens)))] for tokens, _ in rows]).reshape(
            len(rows), width
        ),
        torch.tensor([[*parents, *([-1] * (width - len(tokens)))] for tokens, parents in rows]).reshape(
            len(rows), width
        ),
        torch.tensor([len(tokens) for tokens, _ in rows]),
    )


def logits_after_a_move(target: CachedRuntime, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits of a copy's last draft step, after another row was released before it, and those without a release."""
    copy = target.quantised_copy(INT4)
    other, row = row_of(tokens[:5]), row_of(tokens[:9])
    target.begin([other, row])
    chain = Draft.chains([tokens[9:12]])
    expected = copy.draft_logits([row], chain, 0)[:, -1:]
    copy.draft_logits([row], Draft.chains([tokens[9:11]]), 0)
    target.release(other)
    return copy.draft_logits([row], chain, 3), expected


def root_path(parents: Sequence[int], node: int) -> list[int]:
    """Node indices from the root down to `node`."""
    return [*([] if parents[node] < 0 else root_path(parents, parents[node])), node]


def assert_near(got: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
