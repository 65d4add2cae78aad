"""Mixture of experts in the decoder layer of a drafter head, as in DeepSeek-V3, GLM-4.5 and Qwen3-Next.

DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and GLM score experts by sigmoids and select with a
correction of the load, first some groups of experts, then experts among these. Qwen3 scores by softmax.
Weight names are those of the published checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.errors import BadInputError
from secondguess.heads.parts import Mlp
from secondguess.runtime.feed_forward import mix_experts


@dataclass(frozen=True)
class ExpertsConfig:
    """Sizes and options of a mixture of experts.

    Args:
        num_experts, num_selected: number of experts, and of those that each token selects.
        mlp_size: intermediate size of an expert.
        shared_size: intermediate size of the expert that every token uses; 0 for none.
        has_sigmoid_scores: whether scores are sigmoids; otherwise they are softmax probabilities, and
            the shared expert has a gate.
        num_groups, num_selected_groups: number of groups of experts, and of those selected first.
        normalises: whether the weights of the selected experts are normalised.
        scale: factor of their weights.

    Raises:
        BadInputError: a size below 1, more selected than there are, or groups of unequal sizes.
    """

    num_experts: int
    num_selected: int
    mlp_size: int
    shared_size: int
    has_sigmoid_scores: bool
    num_groups: int = 1
    num_selected_groups: int = 1
    normalises: bool = True
    scale: float = 1.0

    def __post_init__(self) -> None:
        if min(self.num_selected, self.mlp_size, self.num_selected_groups) < 1 or self.shared_size < 0:
            raise BadInputError(
                f"expected sizes and numbers of experts of at least 1, got {self.num_selected} selected from "
                f"{self.num_selected_groups} groups, of size {self.mlp_size}, shared {self.shared_size}"
            )
        if self.num_groups < self.num_selected_groups or self.num_experts % self.num_groups:
            raise BadInputError(
                f"expected experts in groups of one size, got {self.num_experts} experts in {self.num_groups} groups, "
                f"of which {self.num_selected_groups} are selected"
            )
        if self.num_selected > self.num_selected_groups * self.num_experts // self.num_groups:
            raise BadInputError(
                f"expected at most as many selected experts as there are, got {self.num_selected} of {self.num_experts}"
            )

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ExpertsConfig:
        """Build the options from the configuration of a model."""
        size = config["moe_intermediate_size"]
        if "n_routed_experts" in config:
            return cls(
                num_experts=config["n_routed_experts"],
                num_selected=config["num_experts_per_tok"],
                mlp_size=size,
                shared_size=size * (config.get("n_shared_experts") or 0),
                has_sigmoid_scores=True,
                num_groups=config.get("n_group") or 1,
                num_selected_groups=config.get("topk_group") or 1,
                normalises=config.get("norm_topk_prob", True),
                scale=config.get("routed_scaling_factor", 1.0),
            )
        return cls(
            num_experts=config["num_experts"],
            num_selected=config["num_experts_per_tok"],
            mlp_size=size,
            shared_size=config.get("shared_expert_intermediate_size") or 0,
            has_sigmoid_scores=False,
            normalises=config.get("norm_topk_prob", True),
        )

    def to_config(self) -> dict[str, Any]:
        """Return the equivalent fields of a configuration."""
        fields = {
            "num_experts_per_tok": self.num_selected,
            "moe_intermediate_size": self.mlp_size,
            "norm_topk_prob": self.normalises,
        }
        if self.has_sigmoid_scores:
            return fields | {
                "n_routed_experts": self.num_experts,
                "n_shared_experts": self.shared_size // self.mlp_size,
                "n_group": self.num_groups,
                "topk_group": self.num_selected_groups,
                "routed_scaling_factor": self.scale,
            }
        return fields | {
            "num_experts": self.num_experts,
            "shared_expert_intermediate_size": self.shared_size,
        }


class Router(nn.Module):
    """Selection of experts."""

    def __init__(self, config: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, width))
        if config.has_sigmoid_scores:
            self.e_score_correction_bias = nn.Parameter(torch.zeros(config.num_experts))

    def _apply(self, function: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert or move the weights; the correction stays in float32, where its differences are small."""
        kept = self.e_score_correction_bias.detach() if self.config.has_sigmoid_scores else None
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        if kept is not None:
            self.e_score_correction_bias.data = kept.to(self.weight.device)
        return self

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts that `[token, width]` states select and their weights, `[token, selected]` each."""
        config, logits = self.config, functional.linear(states.float(), self.weight.float())
        if config.has_sigmoid_scores:
            scores = logits.sigmoid()
            selected = self._best(scores + self.e_score_correction_bias)
        else:
            scores = logits.softmax(-1)
            selected = scores.topk(config.num_selected).indices
        weights = scores.gather(-1, selected)
        if config.normalises:
            weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
        return selected, (weights * config.scale).to(states.dtype)

    def _best(self, scores: Tensor) -> Tensor:
        """Return the experts with the highest scores in the groups with the highest sums of two."""
        config = self.config
        groups = scores.view(len(scores), config.num_groups, -1)
        group_scores = groups.topk(min(2, groups.shape[-1])).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(-1, group_scores.topk(config.num_selected_groups).indices, value=True)
        masked = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
        return masked.topk(config.num_selected).indices


class Experts(nn.Module):
    """Mixture of experts with one expert that every token uses."""

    def __init__(self, config: ExpertsConfig, width: int) -> None:
        super().__init__()
        self.gate = Router(config, width)
        self.experts = nn.ModuleList(Mlp(width, config.mlp_size) for _ in range(config.num_experts))
        if config.shared_size and config.has_sigmoid_scores:
            self.shared_experts = Mlp(width, config.shared_size)
        elif config.shared_size:
            self.shared_expert = Mlp(width, config.shared_size)
            self.shared_expert_gate = nn.Linear(width, 1, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        tokens = states.flatten(0, -2)
        selected, weights = self.gate(tokens)
        return mix_experts([*self.experts], tokens, selected, weights, self._shared(tokens)).view_as(states)

    def _shared(self, tokens: Tensor) -> Tensor:
        if not self.gate.config.shared_size:
            return torch.zeros_like(tokens)
        if self.gate.config.has_sigmoid_scores:
            shared: Tensor = self.shared_experts(tokens)
            return shared
        gated: Tensor = self.shared_expert_gate(tokens).sigmoid() * self.shared_expert(tokens)
        return gated


def separate_experts(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return tensors with one matrix per expert, where a checkpoint has those of all experts in one.

    Args:
        tensors: by name; `gate_up_proj` is `[expert, 2 size, width]`, `down_proj` `[expert, width, size]`.
        prefix: of the experts' names, such as `layer.mlp.experts.`.
    """
    found = dict(tensors)
    if (joined := found.pop(f"{prefix}gate_up_proj", None)) is not None:
        for expert, (gate, up) in enumerate(each.chunk(2) for each in joined):
            found[f"{prefix}{expert}.gate_proj.weight"] = gate
            found[f"{prefix}{expert}.up_proj.weight"] = up
    if (joined := found.pop(f"{prefix}down_proj", None)) is not None:
        found |= {f"{prefix}{expert}.down_proj.weight": each for expert, each in enumerate(joined)}
    return found
