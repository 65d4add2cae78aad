"""Helpers of the tests of heads: a tiny target, a training batch, and folders in published formats."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.base import Drafter
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.drafters.spec import make_drafter
from secondguess.heads.base import TargetModel
from secondguess.heads.learning import Objective, TrainingBatch
from secondguess.runtime.base import Runtime
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

Fault = Callable[[dict[str, Any], dict[str, Tensor]], object]
VOCAB_SIZE, WIDTH = 31, 32
TEXT = [3, 5, 7, 5, 7, 5, 7, 5, 11, 2, 30, 8, 4]
TREE = ((8, -1), (4, -1), (9, 0), (8, 1), (2, 0), (11, 3))
"""Tokens and parents of some nodes after `TEXT`, level by level."""


def tiny_target() -> TransformersRuntime:
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TransformersRuntime(LlamaForCausalLM(config).float().eval().requires_grad_(False))


TARGET = tiny_target()
MODEL = TargetModel.from_runtime(TARGET)


class Named:
    """A target as `make_drafter` sees it."""

    def __init__(self, runtime: Runtime, path: str = "") -> None:
        self.runtime, self.name, self.path = runtime, "tiny", path


NAMED = Named(TARGET)


def load_draft_model(path: str) -> Runtime:
    raise AssertionError(path)


def named(name: str, target: Named = NAMED) -> SamplingDrafter:
    """The drafter of a name, for a target."""
    made = make_drafter(
        name,
        target_vocab_size=target.runtime.vocab_size,
        load_draft_model=load_draft_model,
        target=target,
    )
    assert isinstance(made, SamplingDrafter)
    return made


def head_of(drafter: SamplingDrafter) -> Any:
    """The head of a drafter."""
    return vars(drafter)["head"]


def edit(folder: Path, **changes: object) -> Path:
    """Other fields in config.json; None takes one out."""
    config = json.loads((folder / "config.json").read_text()) | changes
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Faults: each changes a config and tensors.


def without(name: str) -> Fault:
    return lambda config, tensors: tensors.pop(name)


def beside(name: str, *shape: int) -> Fault:
    return lambda config, tensors: tensors.update({name: torch.zeros(shape)})


def with_field(**fields: object) -> Fault:
    return lambda config, tensors: config.update(fields)


def without_field(name: str) -> Fault:
    return lambda config, tensors: config.pop(name)


def states_of(target: TransformersRuntime, texts: list[list[int]]) -> dict[int, Tensor]:
    """`[row, position, width]` of every layer, numbered from both ends, by the model itself."""
    with torch.no_grad():
        found = target.model(torch.tensor(texts), use_cache=False, output_hidden_states=True).hidden_states
    return dict(enumerate(found)) | {layer - len(found): states for layer, states in enumerate(found)}


def lesson_of(target: TransformersRuntime, texts: list[list[int]], num_prompt: int = 1) -> TrainingBatch:
    tokens = torch.tensor(texts)
    counts = torch.arange(tokens.shape[1]).expand_as(tokens) >= num_prompt
    return TrainingBatch(tokens, counts, states_of(target, texts))


def many_texts(num_rows: int = 8, length: int = 20) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return torch.randint(VOCAB_SIZE, (num_rows, length), generator=generator).tolist()


def cross_entropy(target_probs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and overlap per position."""
    losses = -(target_probs * draft_logits.log_softmax(-1).clamp_min(-1e4)).sum(-1)
    return losses, torch.minimum(target_probs, draft_logits.softmax(-1)).sum(-1).detach()


class Recorder:
    """An objective that keeps what it was shown: logits of the head, probabilities of the target."""

    def __init__(self) -> None:
        self.said: list[Tensor] = []
        self.meant: list[Tensor] = []

    def __call__(self, target_probs: Tensor, draft_logits: Tensor) -> tuple[Tensor, Tensor]:
        self.meant.append(target_probs.detach())
        self.said.append(draft_logits.detach())
        return cross_entropy(target_probs, draft_logits)


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def ready(drafter: Drafter, target: TransformersRuntime, text: list[int]) -> Row:
    """A row that the drafter may draft for."""
    row = Row(list(text), SamplingParams(max_tokens=40, temperature=1.0), seed=3)
    with torch.inference_mode():
        target.request_hidden_states(drafter.hidden_layers)
        drafter.begin([row], target.begin([row]))
        drafter.prepare([row], [0])
    return row


def draft_for(drafter: Drafter, row: Row, length: int) -> Draft:
    budgets = Budgets([length], lambda *told: [True], uses_probs=False)
    with torch.inference_mode():
        drafter.prepare([row], [0])
        return drafter.propose([row], budgets, KeyedNoise.from_rows([row]))


def drafted(drafter: Drafter, target: TransformersRuntime, length: int = 4) -> Draft:
    return draft_for(drafter, ready(drafter, target, TEXT), length)


def same_draft(one: Draft, other: Draft) -> bool:
    assert one.probs is not None
    assert other.probs is not None
    return torch.equal(one.tokens, other.tokens) and torch.allclose(one.probs, other.probs, atol=1e-6)


def falls(
    head: Any, target: TransformersRuntime, objective: Objective = cross_entropy
) -> tuple[float, float]:
    """The loss of a head before and after 30 steps, everything that it counts summed."""
    training_batch, embedding_and_head = lesson_of(target, many_texts()), target.embedding_and_head()
    optimiser = torch.optim.Adam(head.parameters(), lr=3e-3)
    losses = []
    for _ in range(31):
        marks = head.learn(training_batch, embedding_and_head, objective)
        loss = torch.stack(marks.losses).sum() + (0 if marks.extra is None else marks.extra)
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return losses[0], losses[-1]
