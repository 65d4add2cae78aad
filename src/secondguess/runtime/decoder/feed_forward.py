"""Feed-forward part of a decoder layer: one network, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from secondguess.runtime.decoder.families import ACTIVATIONS, Family, GateClamp, MixtureOfExperts, mlp_linears
from secondguess.runtime.decoder.products import PackableLinear
from secondguess.runtime.decoder.stored import StoredModule


class FeedForward:
    """Two linear layers with an activation between them.

    Args:
        inner: the first one; with `is_gated`, the first half of its outputs gates the second one.
        output: the second one.
        activation: name of the activation.
        is_gated: whether there are gates.
        clamp: replaces the activation and the product with the gates; None for none.
    """

    def __init__(
        self,
        inner: PackableLinear,
        output: PackableLinear,
        activation: str,
        is_gated: bool = True,
        clamp: GateClamp | None = None,
    ) -> None:
        self.inner, self.output = inner, output
        self.activation, self.is_gated = activation, is_gated
        self.clamp = clamp

    @classmethod
    def joined(
        cls,
        inner: Sequence[Any],
        output: Any,
        activation: str,
        *,
        packed: bool,
        is_gated: bool = True,
        clamp: GateClamp | None = None,
    ) -> FeedForward:
        """Return the feed-forward part of a module's linear layers, the inner ones joined to one."""
        joined = PackableLinear.joined(inner, packed)
        return cls(joined, PackableLinear.joined([output], packed), activation, is_gated, clamp)

    def __call__(self, states: Tensor) -> Tensor:
        """Return the output for normalised states, `[..., width]`."""
        return self.output(self.activate(self.inner(states)))

    def activate(self, inner: Tensor) -> Tensor:
        """Return the inputs of the second linear layer for the outputs of the first one."""
        activate = ACTIVATIONS[self.activation]
        if not self.is_gated:
            return activate(inner)
        gate, up = inner.chunk(2, -1)
        return activate(gate) * up if self.clamp is None else self.clamp(gate, up)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token reads."""
        return self.inner.weight.numel() + self.output.weight.numel()


class Experts:
    """Mixture of experts: each token uses the few feed-forward networks to which the router gives most probability.

    Their outputs are weighted by these probabilities and added in the order of the experts.

    Args:
        router: linear layer that gives the experts' scores.
        experts: feed-forward networks.
        description, config: of the computation.
        packed: whether to pack the weights of the router.

    Attributes:
        forced_experts: `[token, k]`, experts that tokens use instead of those that they select, for a probe; else None.
        agreement: share of the experts forced on the last tokens that these would have selected.
    """

    forced_experts: Tensor | None = None
    agreement = 1.0

    def __init__(
        self,
        router: Any,
        experts: Sequence[FeedForward],
        description: MixtureOfExperts,
        config: Any,
        packed: bool,
    ) -> None:
        bias = getattr(router, "bias", None)
        self.router = PackableLinear(router.weight.detach(), None if bias is None else bias.detach(), packed)
        self.num_selected: int = config.num_experts_per_tok
        self.normalises_routing_weights = description.normalises_routing_weights(config)
        self.rounds_routing_weights = description.rounds_routing_weights
        self.experts = experts

    def select(self, probs: Tensor) -> Tensor:
        """Return the experts with most probability, `[token, k]`, of probabilities `[token, expert]`."""
        return probs.topk(self.num_selected).indices

    def __call__(self, states: Tensor) -> Tensor:
        """Return the output for normalised states, `[..., width]`."""
        token_states = states.flatten(0, -2)
        probs = self.router(token_states).softmax(-1, dtype=torch.float32)
        selected = self.select(probs)
        if self.forced_experts is not None:
            chosen, selected = selected, self.forced_experts
            self.agreement = float((chosen[:, :, None] == selected[:, None, :]).any(-1).float().mean())
        weights = probs.gather(-1, selected)
        if self.normalises_routing_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.rounds_routing_weights:
            weights = weights.to(states.dtype)
        return mix_experts(self.experts, token_states, selected, weights).view_as(states)

    @property
    def num_active_parameters(self) -> int:
        """Number of weights that one token reads."""
        return self.router.weight.numel() + self.num_selected * self.experts[0].num_active_parameters


def mix_experts(
    experts: Sequence[Callable[[Tensor], Tensor]],
    states: Tensor,
    selected: Tensor,
    weights: Tensor,
) -> Tensor:
    """Return the weighted sums of the outputs of each token's experts, `[token, width]`.

    `selected` and `weights` `[token, k]` are the experts of each token and their routing weights.
    """
    mixed = torch.zeros_like(states)
    for expert in sorted(set(selected.flatten().tolist())):
        tokens, ranks = torch.where(selected == expert)
        added = experts[expert](states[tokens]) * weights[tokens, ranks, None]
        mixed = mixed.index_add(0, tokens, added.to(mixed.dtype))
    return mixed


def make_feed_forward(
    layer: Any, index: int, family: Family, config: Any, packed: bool
) -> FeedForward | Experts:
    """Return the feed-forward part of a decoder layer, of a Transformers module or of a `StoredModel`."""
    activation = str(getattr(config, family.activation))
    mixture, clamp = family.experts, family.gate_clamp(config)
    if mixture is not None and family.has_experts(config)[index]:
        if isinstance(layer, StoredModule):
            router, linears = (
                layer.at(mixture.stored_router),
                _stored_experts(layer, mixture, config.num_experts),
            )
        else:
            router = getattr(layer.mlp, mixture.router)
            linears = _joined_experts(layer.mlp.experts, mixture.is_transposed)
        experts = [
            FeedForward.joined(inner, output, activation, packed=packed, clamp=clamp)
            for inner, output in linears
        ]
        return Experts(router, experts, mixture, config, packed)
    inner, output = mlp_linears(layer, family)
    return FeedForward.joined(inner, output, activation, packed=packed, is_gated=family.is_gated)


def _stored_experts(
    layer: StoredModule, mixture: MixtureOfExperts, count: int
) -> Iterator[tuple[list[Any], Any]]:
    """Yield the linear layers of each expert in a checkpoint: those of its gates and values, and its output."""
    for expert in range(count):
        gate, up, down = (layer.at(name.format(expert)) for name in mixture.names)
        yield [gate, up], down


def _joined_experts(experts: Any, is_transposed: bool) -> Iterator[tuple[list[Any], Any]]:
    """Yield the linear layers of each expert in a module of Transformers, which joins the weights of all."""
    if is_transposed:
        names = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")
        for inner, bias, output, output_bias in zip(
            *(getattr(experts, name).detach() for name in names), strict=True
        ):
            yield (
                [_linear(inner.T[part::2], bias[part::2]) for part in range(2)],
                _linear(output.T, output_bias),
            )
        return
    for inner, output in zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True):
        yield [_linear(inner)], _linear(output)


def _linear(weight: Tensor, bias: Tensor | None = None) -> Any:
    return SimpleNamespace(weight=weight, bias=bias)
