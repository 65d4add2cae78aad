"""A target with a chain of MTP modules, and the logits of Transformers' own chain."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, modeling_layers

from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.mtp_chain import MtpChainDrafter
from secondguess.heads.base import TargetModel
from secondguess.heads.mtp_chain import MtpChain
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier
from unrolled_cases import TEXT

HAS_ORACLE = "MtpModel" in vars(modeling_layers)
"""True if this release of Transformers runs MTP modules."""
NUM_LAYERS, NUM_MODULES, VOCAB_SIZE = 2, 3, 31


@cache
def target() -> Any:
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=12, q_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        first_k_dense_replace=1, max_position_embeddings=128, num_mtp_layers=NUM_MODULES, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config._experts_implementation = "eager"  # for experts in float64
        return DeepseekV3ForCausalLM(config).eval().double().requires_grad_(False)


@cache
def oracle() -> Any:
    """The modules of the target as Transformers builds them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = modeling_layers.MtpModel(target(), NUM_MODULES).eval().double().requires_grad_(False)
        for weight in [*model.layers.parameters(), *model.layers.buffers()]:
            torch.nn.init.normal_(weight, std=0.3)
    return model


def write_chain(folder: Path) -> Path:
    """Write the target's checkpoint with the modules in it, as DeepSeek's is published."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in oracle().layers.state_dict().items():
        index, _, rest = name.partition(".")
        rest = rest.removeprefix("mtp_block.").replace("post_norm.", "shared_head.norm.")
        start = f"model.layers.{NUM_LAYERS + int(index)}."
        if rest.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(tensor):
                for part, half in zip(("gate", "up"), matrix.chunk(2), strict=True):
                    tensors[f"{start}mlp.experts.{expert}.{part}_proj.weight"] = half.contiguous()
        elif rest.endswith("experts.down_proj"):
            for expert, matrix in enumerate(tensor):
                tensors[f"{start}mlp.experts.{expert}.down_proj.weight"] = matrix.contiguous()
        else:
            tensors[start + rest] = tensor
    save_file(tensors, folder / "model.safetensors")
    target().config.save_pretrained(folder)
    return folder


def expected_logits(text: list[int], continuation: list[int]) -> Tensor:
    """Return the logits `[depth, vocab]` of Transformers' chain after a text and the given continuation."""
    tokens = torch.tensor([text + continuation])
    with torch.no_grad():
        states = target().model(tokens[:, : len(text)]).last_hidden_state[:, :-1]
        found = []
        for depth in range(len(continuation)):
            read = tokens[:, 1 + depth : len(text) + depth]
            positions = torch.arange(read.shape[1])[None] + 1 + depth
            states = oracle().forward_layer(depth, states, positions, None, input_ids=read)
            found.append(target().lm_head(states)[0, -1])
    return torch.stack(found)


def make_drafter(folder: Path) -> tuple[MtpChainDrafter, TransformersRuntime]:
    runtime = TransformersRuntime(target())
    head = MtpChain.load(folder, TargetModel.from_runtime(runtime)).double()
    return MtpChainDrafter(head, runtime, "mtp"), runtime


def drafted(drafter: MtpChainDrafter, row: Row, continuation: list[int]) -> Tensor:
    drafter.chains, found = [[]], []
    with torch.inference_mode():
        drafter.prepare([row], [0])
        for token in continuation:
            found.append(drafter.chain_logits([row], [0])[0])
            drafter.chains[0].append(token)
    return torch.stack(found).clone()


def chain_drafts_as_published(folder: Path) -> bool:
    """Return whether the logits after rounds with accepted and rejected nodes are those of Transformers."""
    drafter, runtime = make_drafter(write_chain(folder))
    row = Row(TEXT[:5], SamplingParams(temperature=1.0, max_tokens=60), seed=3)
    rounds = decode(Components(runtime, drafter, make_verifier("auto"), make_controller("fixed:2")), [row])
    num_accepted = [next(rounds)[0].num_accepted for _ in range(8)]
    assert max(num_accepted) > 0 == min(num_accepted)
    found = drafted(drafter, row, [7, 2, 20])
    rounds.close()
    return torch.allclose(found, expected_logits(list(row.tokens), [7, 2, 20]), atol=1e-5)
