"""Interface of drafter heads: the target they belong to, their vocabulary, loading and saving."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from secondguess.errors import BadInputError
from secondguess.heads.learning import TrainableHead
from secondguess.runtime.base import EmbeddingAndHead, Runtime


@dataclass(frozen=True)
class TargetModel(EmbeddingAndHead):
    """Parts and sizes of the target that heads use; `vocab_size` is the width of its logits."""

    vocab_size: int
    num_layers: int
    device: torch.device

    @classmethod
    def from_runtime(cls, runtime: Runtime, shared: EmbeddingAndHead | None = None) -> Self:
        """Return the parts of a runtime's model; `shared` replaces its embeddings and LM head, as for training."""
        parts = vars(shared or runtime.embedding_and_head())
        return cls(
            **parts, vocab_size=runtime.vocab_size, num_layers=runtime.num_layers, device=runtime.device
        )


class DraftVocabulary(nn.Module):
    """Tokens that a head can draft: the target's vocabulary, or those of different ids `token_ids` `[draft_vocab]`."""

    token_ids: Tensor | None

    def __init__(self, vocab_size: int, token_ids: Tensor | None = None) -> None:
        super().__init__()
        if token_ids is not None:
            ids = set(token_ids.tolist())
            if not ids or len(ids) < len(token_ids) or min(ids) < 0 or max(ids) >= vocab_size:
                raise BadInputError(
                    f"expected a draft vocabulary of different tokens between 0 and {vocab_size - 1}, "
                    f"got {token_ids.tolist()[:8]}..."
                )
        self.vocab_size = vocab_size
        self.register_buffer("token_ids", None if token_ids is None else token_ids.long())

    @classmethod
    def most_frequent(cls, counts: Tensor, size: int) -> Self:
        """Return the vocabulary of the `size` most frequent tokens, by frequencies `[vocab]`, in ascending order of ids.

        Ties are broken in favour of smaller ids.
        """
        if not 1 <= size <= len(counts):
            raise BadInputError(f"expected a draft vocabulary of 1 to {len(counts)} tokens, got {size}")
        if size == len(counts):
            return cls(size)
        return cls(len(counts), counts.argsort(descending=True, stable=True)[:size].sort().values)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self.vocab_size if self.token_ids is None else len(self.token_ids)

    def to_target(self, logits: Tensor) -> Tensor:
        """Return logits `[..., vocab]` over the target's vocabulary; -inf for tokens outside."""
        if self.token_ids is None:
            return logits
        everywhere = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        everywhere[..., self.token_ids] = logits
        return everywhere

    def select(self, values: Tensor) -> Tensor:
        """Return the values `[..., draft_vocab]` of its tokens, out of `[..., vocab]`."""
        return values if self.token_ids is None else values[..., self.token_ids]


class LoadedHead(nn.Module, ABC):
    """Base class of drafter heads, which belong to one target and are loaded with it.

    Attributes:
        hidden_layers: target layers whose hidden states it reads.
    """

    target: TargetModel
    hidden_layers: tuple[int, ...]

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert or move the weights; buffers keep their dtype, which those of frequencies need to be exact."""
        kept = dict(self.named_buffers())
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in kept.items():
            owner, _, leaf = name.rpartition(".")
            module = self.get_submodule(owner)
            setattr(module, leaf, buffer.to(getattr(module, leaf).device))
        return self

    @classmethod
    @abstractmethod
    def load(cls, folder: Path, target: TargetModel) -> Self:
        """Read a head in any of its formats.

        Returns:
            The head on the CPU, in the default dtype of modules.

        Raises:
            CheckpointError: a field or tensor is missing, unknown or of another shape, or the head
                was trained for another target.
            UnsupportedModelError: an unsupported kind of head or layer.
        """


class Head(LoadedHead, TrainableHead):
    """Base class of drafter heads that are trained here."""

    vocabulary: DraftVocabulary

    def unembed(self, states: Tensor, lm_head: nn.Module | None) -> Tensor:
        """Return logits `[..., draft_vocab]` by an LM head of its own; None for the target's."""
        if lm_head is None:
            return self.target.unembed(states.to(self.target.dtype))
        logits: Tensor = lm_head(states)
        return logits

    @classmethod
    @abstractmethod
    def fresh(cls, target: TargetModel, seed: int = 0) -> Self:
        """Build an untrained head with weights that depend on the seed alone; subclasses accept further sizes."""
