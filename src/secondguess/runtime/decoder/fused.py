"""Runtime over the fused decoder, if a probe finds that it reproduces the module's logits.

A family is covered if it is one of the `FAMILIES`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secondguess.runtime.base import EmbeddingAndHead, ForwardOutput
from secondguess.runtime.cached import KEY_MULTIPLE, CachedRuntime
from secondguess.runtime.decoder.families import FAMILIES, attention_linears, mlp_linears
from secondguess.runtime.decoder.feed_forward import Experts
from secondguess.runtime.decoder.forward import DecoderForward
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.modules.rounding import rounding_error
from secondguess.runtime.modules.support import context_length_of
from secondguess.runtime.step import ForwardStep
from secondguess.runtime.tree import ChainMasks

PROBE_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 0.03, torch.float16: 0.005}
"""Largest relative root-mean-square error of the logits attributed to rounding, by dtype.

The largest single error grows with the number of logits, and refused correct models. With 16 bits, some trained models
amplify rounding more than that, which is measured.
"""

ROUNDING_SHARE, MAX_TOLERANCE = 0.5, 0.25
"""Tolerance relative to the error of one more rounding of each product, and the largest such tolerance."""
MAX_PROBE_POSITION = 4096
"""Largest end position of the probe, which otherwise uses the last positions of the context."""
PROBE_WIDTH = 16
LEAST_AGREEMENT = 0.75
"""Least share of a mixture's experts that its tokens must select as in the module, in each layer. Rounding changes few."""

logger = logging.getLogger(__name__)


class CheckedDecoder(NamedTuple):
    """Fused decoder of a module, and logits to compare the kernels with.

    Args:
        decoder: the decoder, not packed.
        tokens: `[row, token]`, from the first position on.
        logits: `[row, token, vocab]`, those of the module.
        experts: `[row, token, k]` by layer, those that the module selects. Rounding makes some tokens select others.
        tolerance: largest relative error of logits that is attributed to rounding.
    """

    decoder: FusedDecoder
    tokens: Tensor
    logits: Tensor
    experts: Mapping[int, Tensor]
    tolerance: float


def fuse(model: Any, packed: bool) -> FusedDecoder | None:
    """Return the fused decoder of a described module, or None if it would not reproduce the module's logits.

    The module must not be used afterwards in either case. With `packed`, weights are packed (`products`).
    """
    if not _has_plain_weights(model):
        return None
    tokens, positions = _probe_tokens(model), _late_positions(model)
    with torch.inference_mode():
        expected, experts = _logits_and_experts(model, tokens, positions)
        tolerance = _tolerance(model, tokens, positions)
        decoder = _fused_decoder(model, packed)
        runtime, prefilled = FusedRuntime(decoder), tokens.shape[1] - 1
        with _forcing_experts(decoder, {layer: each[:, :prefilled] for layer, each in experts.items()}):
            before = _prefill(runtime, tokens, positions, prefilled)
            agrees = _agrees(decoder)
        with _forcing_experts(decoder, {layer: each[:, prefilled:] for layer, each in experts.items()}):
            found = torch.cat((before, _decode(runtime, tokens, positions)), 1)
    return decoder if agrees and probe_passes("fused", found, expected, tolerance) else None


def fuse_for_kernels(model: Any) -> CheckedDecoder | None:
    """Return the fused decoder of a module for `to_graphs`, or None if it would not reproduce the module's logits.

    It will not decode, so only a prefill is checked. The module must not be used afterwards.
    """
    if not _has_plain_weights(model):
        return None
    tokens, late = _probe_tokens(model), _late_positions(model)
    early = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[0], -1)
    twice, positions = tokens.repeat(2, 1), torch.cat((late, early))
    with torch.inference_mode():
        expected, experts = _logits_and_experts(model, twice, positions)
        tolerance = _tolerance(model, twice, positions)
        decoder = _fused_decoder(model, packed=False)
        with _forcing_experts(decoder, experts):
            found = _prefill(FusedRuntime(decoder), twice, positions, tokens.shape[1])
            agrees = _agrees(decoder)
    early_experts = {layer: each[len(tokens) :] for layer, each in experts.items()}
    checked = CheckedDecoder(decoder, tokens, expected[len(tokens) :], early_experts, tolerance)
    return checked if agrees and probe_passes("fused", found, expected, tolerance) else None


def _logits_and_experts(model: Any, tokens: Tensor, positions: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
    """Return a module's logits `[row, token, vocab]`, and by layer the experts `[row, token, k]` that tokens select.

    NaN among the logits raises a `FloatingPointError`.
    """
    if getattr(model.config, "attn_logit_softcapping", None) is not None:
        model.set_attn_implementation("eager")  # sdpa ignores soft caps in older releases of Transformers
    found: dict[int, Tensor] = {}

    def record(layer: int, arguments: tuple[Any, ...]) -> None:
        _, selected, *_ = arguments
        found[layer] = selected.view(*tokens.shape, -1)

    has_experts = FAMILIES[model.config.model_type].has_experts(model.config)
    hooks = [
        model.base_model.layers[layer].mlp.experts.register_forward_pre_hook(
            lambda _, arguments, layer=layer: record(layer, arguments)
        )
        for layer, is_mixture in enumerate(has_experts)
        if is_mixture
    ]
    try:
        logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if bool(logits.isnan().any()):
        raise FloatingPointError("NaN among the logits of a module")
    return logits, found


@contextmanager
def _forcing_experts(decoder: FusedDecoder, experts: Mapping[int, Tensor]) -> Iterator[None]:
    """Force the experts that tokens use, `[row, token, k]` by layer."""
    mixtures = _mixtures(decoder)
    for index, mixture in mixtures.items():
        mixture.forced_experts = experts[index].flatten(0, 1)
    try:
        yield
    finally:
        for mixture in mixtures.values():
            mixture.forced_experts = None


def _mixtures(decoder: FusedDecoder) -> dict[int, Experts]:
    parts = {index: layer.feed_forward for index, layer in enumerate(decoder.layers)}
    return {index: part for index, part in parts.items() if isinstance(part, Experts)}


def _agrees(decoder: FusedDecoder) -> bool:
    """Return whether tokens would have selected the experts that were forced; log if they would not."""
    least = min((mixture.agreement for mixture in _mixtures(decoder).values()), default=1.0)
    if least < LEAST_AGREEMENT:
        logger.warning(
            "the fused runtime is not used: expected tokens to select at least %.0f %% of the model's experts in each layer, "
            "got %.0f %%; another runtime computes the model, which may be slower or take more memory",
            100 * LEAST_AGREEMENT,
            100 * least,
        )
    return least >= LEAST_AGREEMENT


def _probe_tokens(model: Any) -> Tensor:
    """Return the tokens `[2, width]` of the probes of a model."""
    width = min(PROBE_WIDTH, _probe_limit(model))
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(2 * width, device=model.device)
    return tokens.remainder(vocab_size).reshape(2, width)


def _probe_limit(model: Any) -> int:
    return min(context_length_of(model.config) or MAX_PROBE_POSITION, MAX_PROBE_POSITION)


def _late_positions(model: Any) -> Tensor:
    """Return positions `[2, width]` at which scaled rotary embeddings differ from plain ones."""
    limit = _probe_limit(model)
    return torch.arange(limit - min(PROBE_WIDTH, limit), limit, device=model.device).expand(2, -1)


def _has_plain_weights(model: Any) -> bool:
    """Return False for adapters and the like, which compute something else from the same weights."""
    return all(map(_is_plain, _weighted_modules(model)))


def _fused_decoder(model: Any, packed: bool) -> FusedDecoder:
    limit = _probe_limit(model)
    decoder = FusedDecoder(model, packed)
    for rotary in decoder.rotaries.values():
        rotary.table(limit)
    return decoder


def _tolerance(model: Any, tokens: Tensor, positions: Tensor) -> float:
    """Return the largest relative error of a module's logits that is attributed to rounding.

    Mixtures of experts are not measured: rounding has their tokens select other experts, which a comparison forces.
    """
    dtype: torch.dtype = model.dtype
    if dtype.itemsize > 2 or any(FAMILIES[model.config.model_type].has_experts(model.config)):
        return PROBE_TOLERANCE[dtype]

    def run() -> Tensor:
        logits: Tensor = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        return logits

    linears = [part for part in model.modules() if isinstance(part, nn.Linear | Conv1D)]
    measured = ROUNDING_SHARE * rounding_error(linears, run)
    return max(PROBE_TOLERANCE[dtype], measured) if measured < MAX_TOLERANCE else PROBE_TOLERANCE[dtype]


def _prefill(runtime: FusedRuntime, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
    """Return logits `[row, query, vocab]` of the first `width` tokens."""
    rows, before = tokens.shape[0], positions[:, :width]
    runtime.cache.place([0] * rows, width, list(range(rows)), width)
    step = ForwardStep(None, before, width, key_positions=before)
    return runtime.run(tokens[:, :width], step, width, with_hidden=False).logits


def _decode(runtime: FusedRuntime, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return logits `[row, 1, vocab]` of the last token after a prefill of the others."""
    rows, width = tokens.shape[0], tokens.shape[1] - 1
    runtime.cache.place([width] * rows, 1, list(range(rows)), KEY_MULTIPLE)
    keys = positions[:, :1] + torch.arange(KEY_MULTIPLE)
    mask = ChainMasks(positions.device).mask(width, 1, KEY_MULTIPLE)
    step = ForwardStep(mask, positions[:, -1:], KEY_MULTIPLE, key_positions=keys)
    return runtime.run(tokens[:, -1:], step, 1, with_hidden=False).logits


def _is_plain(module: Any) -> bool:
    """Return whether a module computes what its weights say."""
    kind = type(module)
    return kind is nn.Linear or kind.__module__.startswith("transformers.models.")


def _weighted_modules(model: Any) -> Iterator[Any]:
    """Yield every module whose weights become part of a `PackableLinear`."""
    family = FAMILIES[model.config.model_type]
    for layer, has_experts in zip(model.base_model.layers, family.has_experts(model.config), strict=True):
        inputs, output = attention_linears(layer, family)
        yield from (*inputs, output)
        if family.experts is not None and has_experts:
            yield from (getattr(layer.mlp, family.experts.router), layer.mlp.experts)
        else:
            inputs, output = mlp_linears(layer, family)
            yield from (*inputs, output)
    yield model.get_output_embeddings()


def probe_passes(runtime: str, found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether logits have at most this relative root-mean-square error; log one that has more."""
    differences = (found.float() - expected.float()).norm(dim=-1)
    size = expected.float().norm(dim=-1).square().mean().sqrt()
    error = differences.square().mean().sqrt()
    passes = bool(error <= tolerance * size)
    if not passes:
        logger.warning(
            "the %s runtime is not used: expected the model's logits with a relative error of at most %.3g, got %.3g; "
            "another runtime computes the model, which may be slower or take more memory",
            runtime,
            tolerance,
            error / size,
        )
    return passes


class FusedRuntime(CachedRuntime):
    """Runtime over a fused decoder.

    Args:
        decoder: from `fuse`.
    """

    kind = "fused"
    supports_partial_forward = True
    forward: DecoderForward

    def __init__(self, decoder: FusedDecoder) -> None:
        super().__init__(**decoder.sizes())
        self.decoder = decoder
        self.forward = self.layered = DecoderForward(decoder, self.cache)

    def embedding_and_head(self) -> EmbeddingAndHead:
        return self.decoder.embedding_and_head()

    def skip_layers(self, skipped: Sequence[int]) -> FusedRuntime:
        return FusedRuntime(self.decoder.without(skipped))

    def run(self, tokens: Tensor, step: ForwardStep, num_logits: int, with_hidden: bool) -> ForwardOutput:
        return self.forward.run(tokens, step, num_logits, self.hidden_layers if with_hidden else ())
