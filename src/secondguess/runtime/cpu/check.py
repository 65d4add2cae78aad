"""Check of a packed decoder against the module of Transformers, on ordinary text.

The module runs in float32 on the weights that the kernels hold, one layer at a time, so that one layer's weights are in
memory. Three copies of each text run together: one exactly; one from the exact inputs of each layer, with the inputs of
products rounded or quantised as the kernels do; and one rounded throughout. The kernels run each layer from its exact
inputs, and must give the output of the second copy but for a part of what rounding has changed; over all layers their
logits must be as near to the exact ones as those of the third copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.runtime.cpu.decoder import LayerBlocks
from secondguess.runtime.cpu.library import ENCODINGS, float32_buffer
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.cpu.weights import Blocks, interleaved, unpack_blocks
from secondguess.runtime.decoder.families import ACTIVATIONS, FAMILIES, Family, head_size_of
from secondguess.runtime.system.quiet import quiet
from secondguess.runtime.weight_format import BFLOAT16

LAYER_LIMIT, LOGIT_LIMIT = 1.0, 2.0
"""Largest errors, relative to those of rounding, of the output of a layer and of logits."""
TOKEN_LIMIT = 10.0
"""Largest error of a single token relative to the typical one; of correct layers it is up to 3.5, of logits up to 10."""
HEAD_OUTPUTS = 4096
"""Number of logits that are compared."""
GROUP = 32
LIMITS = (127, 126, 125, 124)
"""Largest magnitudes of quantised inputs that the kernels try."""

ATTENTION = "secondguess-check"
"""Name of our attention in Transformers' registry."""

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class CheckedPart:
    """Errors of a part of the decoder.

    Args:
        name: `layer N`, `head`, `rotary positions` or `logits`.
        error: typical error of the kernels relative to that of rounding.
        limit: largest error that passes.
    """

    name: str
    error: float
    limit: float

    @property
    def passes(self) -> bool:
        return self.error <= self.limit  # NaN does not


@dataclass
class _Recorded:
    """Values of the module at the exact copies of the texts.

    Args:
        parts: checked parts so far.
        experts: experts that tokens use, by layer.
    """

    parts: list[CheckedPart] = field(default_factory=list)
    experts: dict[int, Tensor] = field(default_factory=dict)


def check_decoder(
    runtime: NativeRuntime, module: Any, read: Callable[[str], Tensor], tokens: Tensor
) -> list[CheckedPart]:
    """Return the errors of all parts of a decoder for texts `[row, token]`.

    `module` is Transformers' without memory for its weights; `read` returns a weight that no product holds, such as that of
    a norm, by its name. Logits that are not numbers raise a `FloatingPointError`.
    """
    checker = _Checker(runtime, module, read, tokens)
    with torch.inference_mode():
        return checker.run()


class _Checker:
    def __init__(
        self, runtime: NativeRuntime, module: Any, read: Callable[[str], Tensor], tokens: Tensor
    ) -> None:
        self.runtime, self.decoder, self.module, self.read = runtime, runtime.decoder, module, read
        decoder = runtime.decoder
        module.config._attn_implementation = _register_attention()
        self.tokens, self.num_rows = tokens, len(tokens)
        self.family: Family = FAMILIES[self.decoder.config.model_type]
        self.recorded = _Recorded()
        sizes = [part.weight.num_outputs * part.weight.num_inputs for part in self._dense(decoder.blocks[0])]
        self._memory, self._num_used = float32_buffer(sum(sizes)), 0

    @staticmethod
    def _dense(blocks: LayerBlocks) -> list[Blocks]:
        return [part for part in (blocks.qkv, blocks.output, blocks.inner, blocks.down) if part is not None]

    def run(self) -> list[CheckedPart]:
        decoder, module, rows = self.decoder, self.module, self.num_rows
        body, positions = module.base_model, torch.arange(self.tokens.shape[1])[None]
        parts = self.recorded.parts
        parts.append(self._check_rotaries(body))
        used, places = torch.unique(self.tokens, return_inverse=True)
        embedding = module.get_input_embeddings()
        embedding.padding_idx = None
        _set(embedding, "weight", decoder.embedding[used].float())
        norm = getattr(body, self.family.final_norm)
        for name, _ in list(norm.named_parameters()):
            _set(norm, name, self.read(f"{self.family.body}.{self.family.final_norm}.{name}").float())
        head = module.get_output_embeddings()
        num_outputs = min(HEAD_OUTPUTS, decoder.head.weight.num_outputs)
        _set(head, "weight", _first_outputs(decoder.head, num_outputs)[:, : decoder.embedding.shape[1]])
        if head.bias is not None:
            _set(head, "bias", self.read(f"{self.family.head}.bias")[:num_outputs].float())
        with ExitStack() as hooks:
            for index, layer in enumerate(body.layers):
                hooks.enter_context(self._hooked(layer, index))
            hooks.enter_context(_rounding(rows, {head: self._rounding_of(decoder.head)}))
            last: list[Tensor] = []
            hook = norm.register_forward_pre_hook(
                lambda _, arguments: last.append(_prepare(arguments[0], rows))
            )
            hooks.callback(hook.remove)
            logits: Tensor = module(
                input_ids=places.repeat(3, 1), position_ids=positions.expand(3 * rows, -1), use_cache=False
            ).logits
        if bool(logits.isnan().any()):
            raise FloatingPointError("NaN among the logits of a module")
        exact, local, whole = torch.split(logits, rows)
        found, _ = self.runtime.probe_layers(
            last[0], range(decoder.num_layers, decoder.num_layers), {}, logits.shape[1]
        )
        parts.append(
            CheckedPart("head", _relative_error(found[..., :num_outputs], local, exact), LAYER_LIMIT)
        )
        found = self.runtime.probe_with_experts(self.tokens, self.recorded.experts)
        parts.append(
            CheckedPart("logits", _relative_error(found[..., :num_outputs], exact, whole), LOGIT_LIMIT)
        )
        return parts

    def _check_rotaries(self, body: Any) -> CheckedPart:
        """Compare tables of cosines and sines with the module's, at the first and the last positions."""
        kinds = list(dict.fromkeys(self.family.rotaries(self.decoder.config)))
        limit = min(self.runtime.context_length, 8192)
        positions = torch.tensor(
            sorted({*range(min(8, limit)), *range(limit // 2, limit, max(1, limit // 16)), limit - 1})
        )
        worst = 0.0
        for kind, rotary in zip(kinds, self.decoder.rotaries, strict=True):
            arguments = (
                {"layer_type": kind} if kind in getattr(self.decoder.config, "layer_types", ()) else {}
            )
            if kind is None or arguments:
                expected = body.rotary_emb(torch.zeros(1, 1, 1), positions[None], **arguments)
            else:  # layers without rotary positions
                size = 2 * len(rotary.frequencies)
                expected = torch.ones(1, len(positions), size), torch.zeros(1, len(positions), size)
            cos, sin = rotary.table(limit)[positions].float().chunk(2, -1)
            half = cos.shape[-1] // 2
            if rotary.is_interleaved:
                cos, sin = cos[:, ::2], sin[:, 1::2]
            else:
                cos, sin = cos[:, :half], sin[:, half:]
            for own, other in zip((cos, sin), expected, strict=True):
                difference = (own - other[0, :, :half].float()).abs().max() / other.abs().max().clamp_min(1)
                worst = max(worst, float(difference) / 2**-8)
        return CheckedPart("rotary positions", worst, 0.1)

    @contextmanager
    def _hooked(self, layer: Any, index: int) -> Iterator[None]:
        """Give a layer its weights while it runs, and check its output."""
        rounding, inputs = ExitStack(), list[Tensor]()

        def before(
            _: Any, arguments: tuple[Any, ...], options: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            self._fill(layer, index)
            rounding.enter_context(_rounding(self.num_rows, self._roundings(layer, index)))
            states = arguments[0] if arguments else options["hidden_states"]
            inputs.append(_prepare(states, self.num_rows))
            return arguments, options

        def after(_: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            rounding.close()
            states = output[0] if isinstance(output, tuple) else output
            exact, local, _ = torch.split(states, self.num_rows)
            _, found = self.runtime.probe_layers(inputs.pop(), range(index, index + 1), self.recorded.experts)
            assert found is not None
            error = _relative_error(found, local, exact)
            self.recorded.parts.append(CheckedPart(f"layer {index}", error, LAYER_LIMIT))
            for name, parameter in list(layer.named_parameters()):
                _set(layer, name, parameter.to("meta"))

        hooks = [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.register_forward_hook(after, with_kwargs=True),
        ]
        try:
            yield
        finally:
            rounding.close()
            for hook in hooks:
                hook.remove()

    def _fill(self, layer: Any, index: int) -> None:
        """Set the weights of a layer to those that the kernels hold, in float32."""
        blocks, prefix = self.decoder.blocks[index], f"{self.family.body}.layers.{index}"
        self._num_used = 0
        known = dict(self._linears(blocks))
        if blocks.router is not None:
            layer.mlp.experts = _UnpackedExperts(self, index, blocks)
        for name, _ in list(layer.named_parameters()):
            _set(layer, name, known[name] if name in known else self.read(f"{prefix}.{name}").float())

    def _linears(self, blocks: LayerBlocks) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of a layer's products by their names in it."""
        config, family = self.decoder.config, self.family
        width, size, num_queries = config.hidden_size, head_size_of(config), config.num_attention_heads
        num_keys = self.decoder.num_key_heads
        names, attention = family.linears, family.attention
        order = None
        if family.has_interleaved_heads:  # query, key and value of each head in turn
            order = torch.arange(3 * num_queries * size).view(-1, 3, size).transpose(0, 1).flatten()
        joined = self._unpacked(blocks.qkv, (num_queries + 2 * num_keys) * size, width, order)
        sizes = [heads * size for heads in (num_queries, num_keys, num_keys)]
        parts = torch.split(joined, sizes) if len(names.attention_inputs) == 3 else (joined,)
        for name, part in zip(names.attention_inputs, parts, strict=True):
            yield f"{attention}.{name}.weight", part
        yield (
            f"{attention}.{names.attention_output}.weight",
            self._unpacked(blocks.output, width, num_queries * size),
        )
        if blocks.router is not None and family.experts is not None:
            yield (
                f"mlp.{family.experts.router}.weight",
                self._unpacked(blocks.router, len(blocks.experts), width),
            )
        elif blocks.inner is not None and blocks.down is not None:
            inner_width = config.intermediate_size
            num_inner = (2 if family.is_gated else 1) * inner_width
            inner = self._unpacked(
                blocks.inner, num_inner, width, _gated_order(inner_width) if family.is_gated else None
            )
            for name, part in zip(names.mlp_inputs, inner.chunk(len(names.mlp_inputs)), strict=True):
                yield f"mlp.{name}.weight", part
            yield f"mlp.{names.mlp_output}.weight", self._unpacked(blocks.down, width, inner_width)

    def _unpacked(
        self, blocks: Blocks, num_outputs: int, num_inputs: int, order: Tensor | None = None
    ) -> Tensor:
        """Return a weight in plain layout, in memory that is used again for the next layer."""
        size = num_outputs * num_inputs
        if len(self._memory) - self._num_used < size:
            return unpack_blocks(blocks, float32_buffer(num_outputs, num_inputs), _padded(order, blocks))
        found = self._memory[self._num_used : self._num_used + size].view(num_outputs, num_inputs)
        self._num_used += size
        return unpack_blocks(blocks, found, _padded(order, blocks))

    def _rounding_of(self, blocks: Blocks) -> Rounding:
        """Return how the kernels round the inputs of a product."""
        if ENCODINGS[blocks.weight.encoding] != BFLOAT16.name:
            return quantised_inputs
        return _in_bfloat16 if self.decoder.unit.rounds_inputs else _exact

    def _roundings(self, layer: Any, index: int) -> dict[Any, Rounding]:
        """Return how the inputs of a layer's linear layers are rounded."""
        blocks, names = self.decoder.blocks[index], self.family.linears
        attention = getattr(layer, self.family.attention)
        found = {getattr(attention, name): self._rounding_of(blocks.qkv) for name in names.attention_inputs}
        found[getattr(attention, names.attention_output)] = self._rounding_of(blocks.output)
        if blocks.inner is not None and blocks.down is not None:
            found |= {getattr(layer.mlp, name): self._rounding_of(blocks.inner) for name in names.mlp_inputs}
            found[getattr(layer.mlp, names.mlp_output)] = self._rounding_of(blocks.down)
        return found


class _UnpackedExperts(nn.Module):
    """Experts of a layer with the weights that the kernels hold, unpacked where a token uses them."""

    def __init__(self, checker: _Checker, index: int, blocks: LayerBlocks) -> None:
        super().__init__()
        self._index, self._blocks, self._shape = index, blocks, checker.tokens.shape
        self._recorded = [checker.recorded]  # in a list, as it is not a part of this module
        self._rounding_of = checker._rounding_of
        config, family = checker.decoder.config, checker.family
        self._width: int = checker.decoder.described.expert_width
        self._clamp = family.gate_clamp(config)
        self._activation = ACTIVATIONS[getattr(config, family.activation)]

    def forward(self, states: Tensor, selected: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted outputs of each token's experts, as `feed_forward.mix_experts`."""
        num_exact = self._shape.numel()
        self._recorded[0].experts[self._index] = selected[:num_exact].view(*self._shape, -1)
        mixed = torch.zeros_like(states)
        for expert in torch.unique(selected).tolist():
            tokens, ranks = torch.where(selected == expert)
            output = self._run(states[tokens], (tokens >= num_exact)[:, None], *self._blocks.experts[expert])
            mixed.index_add_(0, tokens, output * weights[tokens, ranks, None])
        return mixed

    def _run(self, states: Tensor, is_rounded: Tensor, inner: Blocks, down: Blocks) -> Tensor:
        """Return the outputs of an expert for some tokens, rounded for some of them."""

        def product(values: Tensor, weight: Tensor, blocks: Blocks, bias: Tensor | None) -> Tensor:
            inputs = torch.where(is_rounded, self._rounding_of(blocks)(values), values)
            return functional.linear(inputs, weight, bias)

        width, inner_width = states.shape[-1], self._width
        order = _padded(_gated_order(inner_width), inner)
        rows = unpack_blocks(inner, float32_buffer(2 * inner_width, width), order)
        bias = None if not inner.weight.bias else _plain_bias(inner.tensors[0], inner_width)
        gate, value = product(states, rows, inner, bias).chunk(2, -1)
        joined = self._activation(gate) * value if self._clamp is None else self._clamp(gate, value)
        bias = None if not down.weight.bias else down.tensors[0][:width]
        return product(joined, unpack_blocks(down, float32_buffer(width, inner_width)), down, bias)


def _gated_order(width: int) -> Tensor:
    """Return the row of each output of gated blocks, with the gates before the values that they multiply; -1 for padding."""
    return interleaved(torch.arange(1, 2 * width + 1, dtype=torch.float64)).long() - 1


def _padded(order: Tensor | None, blocks: Blocks) -> Tensor | None:
    return None if order is None else functional.pad(order, (0, blocks.num_lines - len(order)), value=-1)


def _plain_bias(bias: Tensor, width: int) -> Tensor:
    """Return an interleaved bias with the gates before the values that they multiply."""
    order = _gated_order(width)
    return bias[: len(order)][order.argsort()[int((order < 0).sum()) :]]


def _first_outputs(blocks: Blocks, count: int) -> Tensor:
    """Return the first rows of a weight, without unpacking the others."""
    fewer = Blocks(type(blocks.weight).from_buffer_copy(blocks.weight), blocks.tensors)
    fewer.weight.num_outputs = count
    return unpack_blocks(fewer, float32_buffer(count, blocks.weight.num_inputs))


def _set(module: Any, name: str, value: Tensor) -> None:
    """Replace a parameter of a module or of one of its parts."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _prepare(states: Tensor, num_rows: int) -> Tensor:
    """Give the second copies the exact inputs, and return them."""
    states[num_rows : 2 * num_rows] = states[:num_rows]
    return states[:num_rows].clone()


def _exact(values: Tensor) -> Tensor:
    return values


def _in_bfloat16(values: Tensor) -> Tensor:
    return values.bfloat16().float()


def quantised_inputs(values: Tensor) -> Tensor:
    """Return inputs `[..., input]` with the numbers that the kernels quantise them to.

    Of the scales of a group that put the largest magnitude at one of `LIMITS`, the one of the least squared error.
    """
    padded = functional.pad(values, (0, -values.shape[-1] % GROUP))
    groups = padded.view(*padded.shape[:-1], -1, GROUP)
    magnitude = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    found = torch.stack([(groups * (limit / magnitude)).round() * (magnitude / limit) for limit in LIMITS])
    best = (found - groups).square().sum(-1, keepdim=True).argmin(0, keepdim=True)
    return found.take_along_dim(best, 0)[0].flatten(-2)[..., : values.shape[-1]]


@contextmanager
def _rounding(num_rows: int, roundings: Mapping[Any, Rounding]) -> Iterator[None]:
    """Round the inputs of linear layers, but for the exact copies."""

    def before(part: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        exact, others = arguments[0][:num_rows], arguments[0][num_rows:]
        return (torch.cat((exact, roundings[part](others))), *arguments[1:])

    hooks = [part.register_forward_pre_hook(before) for part in roundings]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _attend(
    part: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **settings: Any
) -> tuple[Tensor, Tensor | None]:
    """Attend as the module does, with keys and values rounded as in the cache of the kernels, but for the exact copies.

    Heads are `[copy and row, head, token, size]`; a third of the rows are exact copies.
    """
    num_rows = len(key) // 3
    limit = torch.finfo(torch.float16).max
    keys = torch.cat((key[:num_rows], key[num_rows:].clamp(-limit, limit).half().float()))
    values = torch.cat((value[:num_rows], _in_bfloat16(value[num_rows:])))
    attend = sys.modules[type(part).__module__].eager_attention_forward
    found: tuple[Tensor, Tensor | None] = attend(part, query, keys, values, mask, **settings)
    return found


@cache
def _register_attention() -> str:
    """Register our attention in Transformers, whose modules are imported here, and return its name."""
    with quiet():
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask
    AttentionInterface.register(ATTENTION, _attend)
    AttentionMaskInterface.register(ATTENTION, eager_mask)
    return ATTENTION


def _relative_error(found: Tensor, expected: Tensor, other: Tensor) -> float:
    """Return the typical error of numbers `[row, token, channel]` relative to the distance of others from the expected.

    By channel the medians over tokens are compared: a few channels and tokens have activations that are hundreds of
    times larger than the others. By token it is the medians over channels, of which the largest may be `TOKEN_LIMIT`
    times as large. The distance is at least the rounding of the expected numbers to bfloat16.
    """
    by_channel = _ratios(found, expected, other, 0).square().mean().sqrt()
    by_token = _ratios(found, expected, other, 1).max() / TOKEN_LIMIT
    return float(torch.maximum(by_channel, by_token))  # NaN if one of them is


def _ratios(found: Tensor, expected: Tensor, other: Tensor, dim: int) -> Tensor:
    """Return the ratios of median errors, over tokens (dimension 0) or channels (1)."""
    errors, noise, sizes = (
        values.abs().flatten(0, 1).median(dim).values
        for values in (found - expected, other - expected, expected)
    )
    floor = torch.maximum(noise.median() / 4, sizes * 2**-10) + torch.finfo(torch.float32).tiny
    return errors / torch.maximum(noise, floor)
