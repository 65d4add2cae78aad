"""A tiny Gemma 4 target, assistants as Transformers writes them, and the logits of its own code."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.gemma_assistant import GemmaAssistantDrafter
from secondguess.heads.base import TargetModel
from secondguess.heads.gemma_assistant import DEFAULT_ROPE, FULL, SLIDING, AssistantConfig, GemmaAssistant
from secondguess.runtime.base import Runtime
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

VOCAB_SIZE, WIDTH, WINDOW = 31, 32, 8
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4]


@cache
def gemma_target(vocab_size: int = VOCAB_SIZE, dtype: torch.dtype = torch.float64) -> Any:
    """Return a target with two layers that read the keys and values of the two before."""
    config = transformers.Gemma4TextConfig(
        **SIZES | {"vocab_size": vocab_size}, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=4,
        layer_types=[SLIDING, FULL] * 2, num_kv_shared_layers=2, vocab_size_per_layer_input=vocab_size,
        hidden_size_per_layer_input=8,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.Gemma4ForCausalLM(config).eval().to(dtype).requires_grad_(False)


def gemma_runtime(vocab_size: int = VOCAB_SIZE) -> TransformersRuntime:
    return TransformersRuntime(gemma_target(vocab_size))


def assistant_drafter(target: Runtime, shape: Any) -> GemmaAssistantDrafter:
    """Return a drafter for the tiny target with a random assistant, which reads the target's layers 0 and 1."""
    config = AssistantConfig(
        width=16, target_width=WIDTH, vocab_size=target.vocab_size, num_heads=4, mlp_size=24, kinds=(SLIDING, FULL),
        head_sizes=(8, 16), window=WINDOW, context_length=128,
        rope=DEFAULT_ROPE,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(6)
        head = GemmaAssistant(config, TargetModel.from_runtime(target))
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.5)
    return GemmaAssistantDrafter(head.to(torch.float64), target, "gemma4-assistant", shape)


@contextmanager
def assistants_can_be_built() -> Iterator[None]:
    """Give layers that all share keys the mode for it, which Transformers 5.23 refuses to find."""
    patch = pytest.MonkeyPatch()
    kinds = (transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig)
    for kind in (kind for kind in kinds if "kv_sharing_modes" in vars(kind)):
        original = kind.kv_sharing_modes.fget

        def modes(config: Any, original: Any = original) -> list[str | None]:
            is_assistant = config.num_kv_shared_layers == config.num_hidden_layers
            return ["reuse"] * config.num_hidden_layers if is_assistant else original(config)

        patch.setattr(kind, "kv_sharing_modes", property(modes))
    try:
        yield
    finally:
        patch.undo()


def write_assistant(
    folder: Path, kind: str = "gemma4", text: dict[str, Any] | None = None, **fields: Any
) -> Any:
    """Write a random assistant with Transformers and return its module; `text` and `fields` replace entries."""
    prefix = {"gemma4": "Gemma4", "unified": "Gemma4Unified"}[kind]
    without = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0} if kind == "gemma4" else {}
    described = {
        **SIZES, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_kv_shared_layers": 3,
        "layer_types": [SLIDING, SLIDING, FULL], **without, **(text or {}),
    }  # fmt: skip
    config = getattr(transformers, f"{prefix}AssistantConfig")(
        text_config=getattr(transformers, f"{prefix}TextConfig")(**described),
        **{"backbone_hidden_size": WIDTH} | fields,
    )
    with torch.random.fork_rng(), assistants_can_be_built():
        torch.manual_seed(1)
        model = getattr(transformers, f"{prefix}AssistantForCausalLM")(config).eval()
        with torch.no_grad():
            for name, weight in [*model.named_parameters(), *model.named_buffers()]:
                if weight.is_floating_point() and "inv_freq" not in name:
                    weight.normal_(float("norm" in name or "scalar" in name), 0.3)
            if fields.get("use_ordered_embeddings"):
                model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB_SIZE))
    model.save_pretrained(folder)
    return model.double()


def oracle_logits(assistant: Any, prompt: list[int], continuation: list[int]) -> Tensor:
    """Return the logits `[depth, vocab]` of Transformers' drafting loop, with the given continuation as the chain."""
    target, found = gemma_target(), []
    with torch.no_grad():
        read = target(
            torch.tensor([prompt[:-1]]),
            output_hidden_states=True,
            return_shared_kv_states=True,
            use_cache=False,
        )
        state = read.hidden_states[-1][:, -1:]
        for token in [prompt[-1], *continuation][: len(continuation)]:
            embedded = target.get_input_embeddings()(torch.tensor([[token]]))
            output = assistant(
                inputs_embeds=torch.cat((embedded, state), -1),
                position_ids=torch.tensor([[len(prompt) - 1]]),
                shared_kv_states=read.shared_kv_states,
            )
            found.append(output.logits[0, 0])
            state = output.last_hidden_state
    return torch.stack(found)


def assistant_logits(folder: Path, prompt: list[int], continuation: list[int]) -> Tensor:
    """Return the logits `[depth, vocab]` after a prompt, with the given continuation as the chain."""
    target = gemma_runtime()
    head = GemmaAssistant.load(folder, TargetModel.from_runtime(target)).double()
    drafter = GemmaAssistantDrafter(head, target, "assistant")
    row = Row(list(prompt), SamplingParams())
    target.request_hidden_states(drafter.hidden_layers)
    drafter.begin([row], target.begin([row]))
    drafter.start([row], len(continuation))
    drafter.chains = [[]]
    return chained(drafter, row, continuation)


def chained(drafter: GemmaAssistantDrafter, row: Row, continuation: list[int]) -> Tensor:
    drafter.start([row], len(continuation))
    drafter.chains, found = [[]], []
    with torch.inference_mode():
        for token in continuation:
            found.append(drafter.chain_logits([row], [0])[0])
            drafter.chains[0].append(token)
    return torch.stack(found).clone()


def assistant_drafts_as_published(folder: Path) -> bool:
    """Return whether the logits after rounds with accepted and rejected nodes are those of Transformers."""
    assistant = write_assistant(folder)
    target = gemma_runtime()
    head = GemmaAssistant.load(folder, TargetModel.from_runtime(target)).double()
    drafter = GemmaAssistantDrafter(head, target, "assistant")
    row = Row(TEXT[:5], SamplingParams(temperature=1.0, max_tokens=60), seed=3)
    rounds = decode(Components(target, drafter, make_verifier("auto"), make_controller("fixed:3")), [row])
    num_accepted = [next(rounds)[0].num_accepted for _ in range(8)]
    assert max(num_accepted) > 0 == min(num_accepted)
    found = chained(drafter, row, [7, 2, 20])
    expected = oracle_logits(assistant, list(row.tokens), [7, 2, 20])
    rounds.close()
    return torch.allclose(found, expected, atol=1e-5)
