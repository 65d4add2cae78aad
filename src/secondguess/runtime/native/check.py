"""Check of a packed decoder against the module of Transformers, on ordinary text.

The module runs in float32 on the weights that the kernels hold, one layer at a time, so that one layer's weights are in
memory. Three copies of each text run together: one exactly; one from the exact inputs of each layer, rounded where a
module in bfloat16 rounds, with inputs quantised as the kernels do; and one rounded throughout. The second copy shows
how far rounding alone moves the output of a layer, the third how far it moves the logits. The errors of the kernels are
compared with these: relative to rounding, a correct layer has an error of about 1 on any model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from secondguess.runtime.families import ACTIVATIONS, FAMILIES, Family, head_size_of
from secondguess.runtime.native.decoder import LayerBlocks
from secondguess.runtime.native.library import ENCODINGS, float32_buffer
from secondguess.runtime.native.runtime import NativeRuntime
from secondguess.runtime.native.weights import Blocks, interleaved, unpack_blocks
from secondguess.runtime.weight_format import BFLOAT16

LAYER_LIMIT, LOGIT_LIMIT = 2.0, 3.0
"""Largest errors, relative to those of rounding, of the output of a layer and of logits."""
HEAD_OUTPUTS = 4096
"""Number of logits that are compared."""
GROUP = 32


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
    """Return the errors of all parts of a decoder.

    Args:
        runtime: runtime of the decoder.
        module: Transformers' module without memory for its weights.
        read: returns a weight that no product holds, such as that of a norm, by its name.
        tokens: texts `[row, token]`.

    Raises:
        FloatingPointError: the module gives logits that are not numbers.
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
            hooks.enter_context(_rounding(norm, rows, {}))
            hooks.enter_context(_rounding(head, rows, {head: _is_quantised(decoder.head)}))
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
            CheckedPart("head", _relative_error(found[..., :num_outputs], exact, local), LAYER_LIMIT)
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
        return CheckedPart("rotary positions", worst, 1.0)

    @contextmanager
    def _hooked(self, layer: Any, index: int) -> Iterator[None]:
        """Give a layer its weights while it runs, and check its output."""
        rounding, inputs = ExitStack(), list[Tensor]()

        def before(
            _: Any, arguments: tuple[Any, ...], options: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            self._fill(layer, index)
            rounding.enter_context(_rounding(layer, self.num_rows, self._quantised(layer, index)))
            states = arguments[0] if arguments else options["hidden_states"]
            inputs.append(_prepare(states, self.num_rows))
            tables = options.get("position_embeddings")
            if tables is not None and not self.family.rotates_in_float32:
                options = options | {
                    "position_embeddings": tuple(_rounded(table, self.num_rows) for table in tables)
                }
            return arguments, options

        def after(_: Any, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            rounding.close()
            states = output[0] if isinstance(output, tuple) else output
            states[self.num_rows :] = states[self.num_rows :].bfloat16().float()
            exact, local, _ = torch.split(states, self.num_rows)
            _, found = self.runtime.probe_layers(inputs.pop(), range(index, index + 1), self.recorded.experts)
            assert found is not None
            error = _relative_error(found.float(), exact, local)
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

    def _quantised(self, layer: Any, index: int) -> dict[Any, bool]:
        """Return whether the inputs of a layer's linear layers are quantised."""
        blocks, names, attention = (
            self.decoder.blocks[index],
            self.family.linears,
            getattr(layer, self.family.attention),
        )
        found = {getattr(attention, name): _is_quantised(blocks.qkv) for name in names.attention_inputs}
        found[getattr(attention, names.attention_output)] = _is_quantised(blocks.output)
        if blocks.inner is not None and blocks.down is not None:
            found |= {getattr(layer.mlp, name): _is_quantised(blocks.inner) for name in names.mlp_inputs}
            found[getattr(layer.mlp, names.mlp_output)] = _is_quantised(blocks.down)
        return found


class _UnpackedExperts(nn.Module):
    """Experts of a layer with the weights that the kernels hold, unpacked where a token uses them."""

    def __init__(self, checker: _Checker, index: int, blocks: LayerBlocks) -> None:
        super().__init__()
        self._index, self._blocks, self._shape = index, blocks, checker.tokens.shape
        self._recorded = [checker.recorded]  # in a list, as it is not a part of this module
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
            inputs = values.bfloat16().float()
            inputs = torch.where(
                is_rounded, quantised_inputs(inputs) if _is_quantised(blocks) else inputs, values
            )
            output = functional.linear(inputs, weight, bias)
            return torch.where(is_rounded, output.bfloat16().float(), output)

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


def _is_quantised(blocks: Blocks) -> bool:
    return ENCODINGS[blocks.weight.encoding] != BFLOAT16.name


def _set(module: Any, name: str, value: Tensor) -> None:
    """Replace a parameter of a module or of one of its parts."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    owner._parameters[leaf] = nn.Parameter(value, requires_grad=False)


def _prepare(states: Tensor, num_rows: int) -> Tensor:
    """Give the second copies the exact inputs, rounded, and round the third ones; return the exact inputs."""
    states[num_rows : 2 * num_rows] = states[:num_rows]
    states[num_rows:] = states[num_rows:].bfloat16().float()
    return states[:num_rows].clone()


def _rounded(values: Tensor, num_rows: int) -> Tensor:
    """Round all but the exact copies."""
    return torch.cat((values[:num_rows], values[num_rows:].bfloat16().float()))


def quantised_inputs(values: Tensor) -> Tensor:
    """Return inputs `[..., input]` with the numbers that the kernels quantise them to."""
    padded = functional.pad(values, (0, -values.shape[-1] % GROUP))
    groups = padded.view(*padded.shape[:-1], -1, GROUP)
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return ((groups / scale).round() * scale).flatten(-2)[..., : values.shape[-1]]


@contextmanager
def _rounding(module: Any, num_rows: int, quantised: Mapping[Any, bool]) -> Iterator[None]:
    """Round inputs and outputs of the linear layers, norms and activations in a module, but for the exact copies."""

    def before(part: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        values = _rounded(arguments[0], num_rows)
        if quantised[part]:
            values = torch.cat((values[:num_rows], quantised_inputs(values[num_rows:])))
        return (values, *arguments[1:])

    def after(_: Any, __: Any, output: Any) -> Any:
        is_batch = isinstance(output, Tensor) and output.is_floating_point() and len(output) == 3 * num_rows
        return _rounded(output, num_rows) if is_batch else output

    leaves = [part for part in module.modules() if not any(True for _ in part.children())]
    hooks = [part.register_forward_hook(after) for part in leaves]
    hooks += [part.register_forward_pre_hook(before) for part in leaves if part in quantised]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _relative_error(found: Tensor, exact: Tensor, rounded: Tensor) -> float:
    """Return the typical error of numbers `[row, token, channel]` relative to that of rounded ones.

    By channel the medians over tokens are compared: a few channels and tokens have activations that are hundreds of
    times larger than the others.
    """
    errors, noise = ((values - exact).abs().flatten(0, 1).median(0).values for values in (found, rounded))
    floor = noise.median() / 4 + torch.finfo(torch.float32).tiny
    return float((errors / noise.clamp_min(floor)).square().mean().sqrt())
