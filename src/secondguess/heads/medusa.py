"""Medusa drafter heads (arXiv 2401.10774), which each predict one of the next tokens.

All of them read the target's last hidden state at the token before pending; drafter head k
predicts the token k + 1 positions after pending. Two formats are read: the original one
(`medusa_lm_head.pt`) and vLLM's, which is also the one written. Drafter heads trained here have no
output matrix: they share the target's, and each one is a `width x width` matrix per layer. vLLM
marks drafter heads that share one matrix with `original_lm_head` and expects that matrix in the
file: to serve them with vLLM, add the target's as `lm_head.weight`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.base import DraftVocabulary, Head, TargetModel
from secondguess.heads.files import config_errors, require_same, write_head
from secondguess.heads.formats import StoredHead, missing_lm_head
from secondguess.heads.learning import LAST_HIDDEN, CountedTokens, DepthLosses, Objective, TrainingBatch
from secondguess.names import check_range
from secondguess.runtime.base import EmbeddingAndHead


@dataclass(frozen=True)
class MedusaConfig:
    """Sizes and options of a set of Medusa drafter heads."""

    num_heads: int  # also the largest draft length
    num_layers: int  # residual layers per drafter head
    has_bias: bool = False  # of the residual layers
    num_outputs: int = 0  # output matrices: one per drafter head, one shared by all, or 0 for the target's

    def __post_init__(self) -> None:
        check_range("heads of a medusa drafter", self.num_heads, 1, MAX_DRAFT_LENGTH)
        check_range("layers of a medusa head", self.num_layers, 1, 16)
        if self.num_outputs not in (0, 1, self.num_heads):
            raise BadInputError(
                f"expected an output matrix per head, one for all or none, got {self.num_outputs} for {self.num_heads} heads"
            )


class ResidualBlock(nn.Module):
    """Drafter head without its output matrix: a stack of residual layers `x + silu(Wx)`."""

    def __init__(self, config: MedusaConfig, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(width, width, bias=config.has_bias) for _ in range(config.num_layers)
        )

    def forward(self, states: Tensor) -> Tensor:
        for layer in self.layers:
            states = states + functional.silu(layer(states))
        return states


class MedusaHead(Head):
    """Set of Medusa drafter heads for one target, whose LM head they use if they have no output matrix."""

    hidden_layers = (LAST_HIDDEN,)

    def __init__(
        self, config: MedusaConfig, target: TargetModel, vocabulary: DraftVocabulary | None = None
    ) -> None:
        super().__init__()
        self.config, self.target = config, target
        self.vocabulary = vocabulary or DraftVocabulary(target.vocab_size)
        self.blocks = nn.ModuleList(ResidualBlock(config, target.width) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(target.width, len(self.vocabulary), bias=False) for _ in range(config.num_outputs)
        )

    @classmethod
    def fresh(cls, target: TargetModel, seed: int = 0, *, num_heads: int = 4, num_layers: int = 1) -> Self:
        """Build untrained drafter heads that share the target's output matrix.

        Weights are near zero, so each drafter head starts close to the target's own next-token
        prediction. They are random because the layers of one drafter head, if all started at zero,
        would all learn the same weights.
        """
        head = cls(MedusaConfig(num_heads, num_layers), target)
        generator = torch.Generator().manual_seed(seed)
        for weight in head.parameters():
            nn.init.normal_(weight, std=1e-3, generator=generator)
        return head

    @classmethod
    def load(cls, folder: Path, target: TargetModel) -> Self:
        """Read drafter heads in the original format or in vLLM's."""
        stored = StoredHead(folder, "medusa")
        read = _read_original if stored.format.name == "original" else _read_vllm
        with config_errors(folder):
            config, vocabulary, tensors = read(stored, target)
            head = cls(config, target, vocabulary)
        stored.fill(head, tensors | vocabulary.state_dict(prefix="vocabulary."))
        return head

    def save(self, folder: Path, target: str = "") -> None:
        """Write the drafter heads in vLLM's format; see `Head.save`."""
        config = self.config
        fields = {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "base_model_name_or_path": target,
            "num_heads": config.num_heads,
            "num_hidden_layers": config.num_layers,
            "hidden_size": self.target.width,
            "vocab_size": self.target.vocab_size,
            "truncated_vocab_size": len(self.vocabulary),
            "medusa_fc_bias": config.has_bias,
            "original_lm_head": config.num_outputs < config.num_heads,
        }
        tensors = self.state_dict()
        if "vocabulary.token_ids" in tensors:
            tensors["token_map"] = tensors.pop("vocabulary.token_ids")
        write_head(folder, fields, tensors)

    def forward(self, states: Tensor, depth: int) -> Tensor:
        """Return the logits `[..., draft_vocab]` of drafter head `depth`, counted from that of the token after pending.

        `states` `[..., width]` are the target's last, normalised hidden states at the token before pending.
        """
        output = self.blocks[depth](states.to(self._dtype))
        return self.unembed(
            output, self.lm_heads[min(depth, len(self.lm_heads) - 1)] if self.lm_heads else None
        )

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Return the logits `[..., vocab]` of `forward` over the target's vocabulary, -inf for tokens outside."""
        return self.vocabulary.to_target(self(states, depth))

    def learn(
        self, training_batch: TrainingBatch, target: EmbeddingAndHead, objective: Objective
    ) -> DepthLosses:
        """Return the losses and acceptance rates, one per drafter head.

        Drafter head k predicts token i + 2 + k from the target's hidden state at token i. Its
        reference is the target's distribution from the hidden state at token i + 1 + k.
        """
        states = training_batch.hidden[LAST_HIDDEN]
        counted = CountedTokens(training_batch, target, self.vocabulary.select)
        losses, accepted = [], []
        for depth in range(min(self.config.num_heads, training_batch.num_depths)):
            loss, share = counted.loss_and_acceptance(
                depth + 2, states, partial(self, depth=depth), objective
            )
            losses.append(loss)
            accepted.append(share)
        return DepthLosses(losses, accepted)

    @property
    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


def count_heads(folder: Path) -> int:
    """Return the number of drafter heads in a folder."""
    stored = StoredHead(folder, "medusa")
    with config_errors(folder):
        if stored.format.name == "original":
            return _num_original(stored, stored.read_tensors())
        return stored.number("num_heads")


def _num_original(stored: StoredHead, names: Iterable[str]) -> int:
    """Return the number of heads in the original format, the larger one of those of the file and its configuration."""
    found = (re.match(r"(?:medusa_head\.)?(\d+)\.", name) for name in names)
    return max([stored.number("num_heads"), *(int(number[1]) + 1 for number in found if number)])


def _read_original(
    stored: StoredHead, target: TargetModel
) -> tuple[MedusaConfig, DraftVocabulary, dict[str, Tensor]]:
    """Return the configuration, the vocabulary and the tensors of heads in the original format.

    Published files have more heads than their configuration says. Those of version 2 have no output matrices: they use
    the target's.
    """
    num_layers, tensors = stored.number("num_layers"), stored.read_tensors()
    num_heads = _num_original(stored, tensors)
    renamed = {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name.removeprefix("medusa_head."))
        renamed[re.sub(rf"^(\d+)\.{num_layers}\.weight$", r"lm_heads.\1.weight", name)] = tensor
    if "lm_heads.0.weight" in renamed:
        require_same("vocabulary", len(renamed["lm_heads.0.weight"]), target.vocab_size, stored.folder)
    num_outputs = num_heads if any(name.startswith("lm_heads.") for name in renamed) else 0
    config = MedusaConfig(num_heads, num_layers, has_bias=True, num_outputs=num_outputs)
    return config, DraftVocabulary(target.vocab_size), renamed


def _read_vllm(
    stored: StoredHead, target: TargetModel
) -> tuple[MedusaConfig, DraftVocabulary, dict[str, Tensor]]:
    """Return the configuration, the vocabulary and the tensors of heads in vLLM's format."""
    folder, tensors = stored.folder, stored.read_tensors()
    require_same("width", stored.number("hidden_size"), target.width, folder)
    require_same("vocabulary", stored.number("vocab_size"), target.vocab_size, folder)
    num_heads = num_outputs = stored.number("num_heads")
    if stored.flag("shares_output"):
        # vLLM accepts the shared matrix under either name and ignores further copies of it.
        shared = tensors.get("lm_head.weight", tensors.get("lm_heads.0.weight"))
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("lm_head")}
        num_outputs = 0 if shared is None else 1
        if shared is not None:
            tensors["lm_heads.0.weight"] = shared
    config = MedusaConfig(num_heads, stored.number("num_layers"), stored.flag("has_bias"), num_outputs)
    token_ids = tensors.pop("token_map", None)
    size = stored.number("draft_vocab_size", target.vocab_size)
    if size >= target.vocab_size:
        return config, DraftVocabulary(target.vocab_size), tensors
    if not num_outputs:
        raise missing_lm_head(folder)
    if token_ids is None or len(token_ids) != size:
        found = "no token_map" if token_ids is None else f"one of {len(token_ids)}"
        raise CheckpointError(f"expected a token_map of {size} tokens in {folder}, got {found}")
    vocabulary = DraftVocabulary(target.vocab_size, token_ids)
    for name, tensor in tensors.items():
        if name.startswith("lm_heads.") and len(tensor) > size:
            # Some files contain the output matrices for the whole vocabulary.
            tensors[name] = tensor[token_ids]
    return config, vocabulary, tensors
