"""Medusa drafter heads (arXiv 2401.10774), which each predict one of the next tokens.

All of them read the target's last hidden state at the token before pending; drafter head k
predicts the token k + 1 positions after pending. Two formats are read: the original one
(`medusa_lm_head.pt`) and vLLM's, which is also the one written. Drafter heads trained here have no
output matrix: they share the target's, and each one is a `width x width` matrix per layer. vLLM
marks drafter heads that share one matrix with `original_lm_head` and expects that matrix in the
file: to serve them with vLLM, add the target's as `lm_head.weight`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.fields import config_errors, get_bool, require_same, whole_number
from secondguess.heads.files import load_into, read_config, read_tensors
from secondguess.heads.learning import (
    DepthLosses,
    Objective,
    TrainableHead,
    TrainingBatch,
    masked_loss_and_acceptance,
)
from secondguess.names import check_range
from secondguess.runtime.base import EmbeddingAndHead

LAST_HIDDEN = -1
"""Target layer that the drafter heads read: the last, normalised one, the LM head's input."""


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes and options of a set of Medusa drafter heads.

    Args:
        width: hidden size of the target.
        num_heads: number of drafter heads, which is the maximum draft length.
        num_layers: number of residual layers per drafter head.
        has_bias: whether the residual layers have biases.
        num_outputs: number of output matrices: one per drafter head, one shared by all, or 0 to
            use the target's.
        num_words: draft vocabulary size of the output matrices.
        has_vocab_map: whether the draft vocabulary is a proper subset of the target's, listed in
            `token_map`.

    Raises:
        BadInputError: a number out of range.
    """

    width: int
    num_heads: int
    num_layers: int
    has_bias: bool = False
    num_outputs: int = 0
    num_words: int = 0
    has_vocab_map: bool = False

    def __post_init__(self) -> None:
        check_range("heads of a medusa drafter", self.num_heads, 1, MAX_DRAFT_LENGTH)
        check_range("layers of a medusa head", self.num_layers, 1, 16)
        if self.num_outputs not in (0, 1, self.num_heads):
            raise BadInputError(
                f"expected an output matrix per head, one for all or none, got {self.num_outputs} for {self.num_heads} heads"
            )


class ResidualBlock(nn.Module):
    """Drafter head without its output matrix: a stack of residual layers `x + silu(Wx)`."""

    def __init__(self, shape: MedusaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(shape.width, shape.width, bias=shape.has_bias) for _ in range(shape.num_layers)
        )

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = states + functional.silu(layer(states))
        return states


class MedusaHead(TrainableHead):
    """Set of Medusa drafter heads for one target.

    Args:
        shape: sizes and options.
        embedding_and_head: LM head of the target, used if there is no output matrix of its own.
    """

    def __init__(self, shape: MedusaConfig, embedding_and_head: EmbeddingAndHead) -> None:
        super().__init__()
        self.hidden_layers = (LAST_HIDDEN,)
        self.shape = shape
        self.blocks = nn.ModuleList(ResidualBlock(shape) for _ in range(shape.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(shape.width, shape.num_words, bias=False) for _ in range(shape.num_outputs)
        )
        if shape.has_vocab_map:
            self.register_buffer("token_map", torch.arange(shape.num_words))
        self._embedding_and_head = embedding_and_head

    @classmethod
    def fresh(
        cls, embedding_and_head: EmbeddingAndHead, num_heads: int = 4, num_layers: int = 1, seed: int = 0
    ) -> Self:
        """Build untrained drafter heads that share the target's output matrix.

        Weights are near zero, so each drafter head starts close to the target's own next-token
        prediction. They are random because the layers of one drafter head, if all started at zero,
        would all learn the same weights.

        Args:
            embedding_and_head: LM head of the target.
            num_heads: number of drafter heads.
            num_layers: number of residual layers per drafter head.
            seed: seed of the weights.

        Raises:
            BadInputError: a number out of range.
        """
        head = cls(MedusaConfig(embedding_and_head.width, num_heads, num_layers), embedding_and_head)
        generator = torch.Generator().manual_seed(seed)
        for weight in head.parameters():
            nn.init.normal_(weight, std=1e-3, generator=generator)
        return head

    @classmethod
    def load(cls, folder: Path, embedding_and_head: EmbeddingAndHead, vocab_size: int) -> Self:
        """Read drafter heads in the original format or in vLLM's.

        Args:
            folder: folder with `config.json` and weights.
            embedding_and_head: LM head, width and dtype of the target.
            vocab_size: vocabulary size of the target.

        Raises:
            CheckpointError: a field or tensor is missing, unknown or of another shape, or the
                drafter heads were trained for another target.
        """
        config, tensors = read_config(folder), read_tensors(folder)
        if "medusa_num_heads" in config:
            shape, tensors = _read_original(config, tensors, folder, embedding_and_head.width, vocab_size)
        elif config.get("model_type") == "medusa":
            shape, tensors = _read_vllm(config, tensors, folder, vocab_size)
        else:
            raise CheckpointError(
                f"expected the config.json of a medusa drafter in {folder} (medusa_num_heads, or the model_type medusa), "
                f"got the model_type {config.get('model_type')!r}"
            )
        require_same("width", shape.width, embedding_and_head.width, folder)
        if shape.num_outputs and not shape.has_vocab_map:
            require_same("vocabulary", shape.num_words, vocab_size, folder)
        head = cls(shape, embedding_and_head)
        load_into(head, tensors, folder)
        if shape.has_vocab_map:
            _check_map(head.get_buffer("token_map"), vocab_size, folder)
        return head.to(embedding_and_head.dtype)

    def save(self, folder: Path, target: str = "") -> None:
        """Write the drafter heads in vLLM's format.

        Args:
            folder: output folder; created if missing.
            target: name of the target model.
        """
        shape, vocab_size = self.shape, self._vocab_size
        config = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": target,
            "num_heads": shape.num_heads,
            "num_hidden_layers": shape.num_layers,
            "hidden_size": shape.width,
            "vocab_size": vocab_size,
            "truncated_vocab_size": shape.num_words if shape.has_vocab_map else vocab_size,
            "medusa_fc_bias": shape.has_bias,
            "original_lm_head": shape.num_outputs < shape.num_heads,
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {name: tensor.contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def forward(self, states: Tensor, depth: int) -> Tensor:
        """Return the logits of drafter head `depth` over its draft vocabulary.

        Args:
            states: `[..., width]`, the target's last, normalised hidden states at the token before
                pending.
            depth: index of the drafter head; 0 predicts the token after pending.

        Returns:
            Logits `[..., draft_vocab]`.
        """
        output = self.blocks[depth](states.to(self._dtype))
        if not self.lm_heads:
            return self._embedding_and_head.unembed(output.to(self._embedding_and_head.dtype))
        logits: Tensor = self.lm_heads[min(depth, len(self.lm_heads) - 1)](output)
        return logits

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Return the logits `[..., vocab]` over the target's vocabulary.

        Arguments are those of `forward`. Tokens outside the draft vocabulary get -inf.
        """
        known: Tensor = self(states, depth)
        if not self.shape.has_vocab_map:
            return known
        everything = known.new_full((*known.shape[:-1], self._vocab_size), -torch.inf)
        everything[..., self.get_buffer("token_map")] = known
        return everything

    def learn(
        self, training_batch: TrainingBatch, embedding_and_head: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the losses and acceptance rates, one per drafter head.

        Drafter head k predicts token i + 2 + k from the target's hidden state at token i. Its
        reference is the target's distribution from the hidden state at token i + 1 + k.
        """
        states = training_batch.hidden[LAST_HIDDEN]
        words = self.get_buffer("token_map") if self.shape.has_vocab_map else None
        losses, accepted = [], []
        for depth in range(self.shape.num_heads):
            counts = training_batch.counts[:, depth + 2 :]
            meant, behind = states[:, depth + 1 : -1], states[:, : counts.shape[1]]
            loss, share = masked_loss_and_acceptance(
                meant, embedding_and_head, behind, partial(self, depth=depth), counts, objective, words
            )
            losses.append(loss)
            accepted.append(share)
        return DepthLosses(losses, accepted)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @cached_property
    def _vocab_size(self) -> int:
        """Vocabulary size of the target."""
        device = next(self.parameters()).device
        nothing = torch.zeros(self.shape.width, dtype=self._embedding_and_head.dtype, device=device)
        return self._embedding_and_head.unembed(nothing).shape[-1]


def _read_original(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path, width: int, vocab_size: int
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """Return the shape and the renamed tensors of drafter heads in the original format.

    Args:
        config, tensors, folder: contents and path of the folder.
        width, vocab_size: sizes of the target, which this format's configuration does not contain.
    """
    tensors = {name.removeprefix("medusa_head."): tensor for name, tensor in tensors.items()}
    with config_errors(folder):
        num_heads, num_layers = (
            whole_number(config, "medusa_num_heads"),
            whole_number(config, "medusa_num_layers"),
        )
        first = tensors.get(f"0.{num_layers}.weight")
        num_words = vocab_size if first is None else len(first)
        shape = MedusaConfig(width, num_heads, num_layers, True, num_heads, num_words)
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        renamed[re.sub(rf"^(\d+)\.{num_layers}\.weight$", r"lm_heads.\1.weight", name)] = tensor
    return shape, renamed


def _read_vllm(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], folder: Path, vocab_size: int
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    tensors = {name.removeprefix("medusa_heads."): tensor for name, tensor in tensors.items()}
    with config_errors(folder):
        width = whole_number(config, "hidden_size")
        require_same("vocabulary", whole_number(config, "vocab_size"), vocab_size, folder)
        num_heads = whole_number(config, "num_heads")
        num_words = whole_number({"truncated_vocab_size": vocab_size, **config}, "truncated_vocab_size")
        num_outputs = num_heads
        if get_bool(config, "original_lm_head", False):
            # vLLM accepts the shared matrix under either name and ignores further copies of it.
            shared = tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight"))
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
            num_outputs = 0 if shared is None else 1
            if shared is not None:
                tensors["lm_heads.0.weight"] = shared
        has_vocab_map = num_words < vocab_size
        if not has_vocab_map:
            tensors.pop("token_map", None)
        elif not num_outputs:
            raise ValueError("a truncated vocabulary without an lm_head.weight")
        shape = MedusaConfig(
            width,
            num_heads,
            whole_number(config, "num_hidden_layers"),
            get_bool(config, "medusa_fc_bias", False),
            num_outputs,
            num_words,
            has_vocab_map,
        )
    return shape, _truncated(tensors, shape)


def _truncated(tensors: dict[str, Tensor], shape: MedusaConfig) -> dict[str, Tensor]:
    """Select the rows listed in `token_map` from output matrices that are stored in full."""
    words = tensors.get("token_map")
    if words is None:
        return tensors
    return {
        name: tensor[words] if name.startswith("lm_heads.") and len(tensor) > shape.num_words else tensor
        for name, tensor in tensors.items()
    }


def _check_map(words: Tensor, vocab_size: int, folder: Path) -> None:
    found = set(words.tolist())
    if len(found) < len(words) or not found <= set(range(vocab_size)):
        raise CheckpointError(
            f"expected a token_map of different tokens below {vocab_size} in {folder}, got others; it is for another target"
        )
