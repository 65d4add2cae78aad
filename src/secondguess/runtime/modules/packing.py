"""Linear layers of a Transformers module on the compiled kernels, with results that are equal up to rounding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cpu.library import units
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.cpu.weights import Arena
from secondguess.runtime.weight_format import BFLOAT16, WeightFormat

WRONG_ERROR = 0.95
"""Relative error from which the logits of a quantised module are wrong, as of one that does not call the layers.

Each layer is right by itself, but the rounding of 4 bits adds up: a random LFM2 had 0.16 in 8 bits. Wrong logits have
an error of 1 and more.
"""
PRODUCT_TOLERANCE = 0.005
"""Largest relative root-mean-square error of the outputs of a linear layer in bfloat16 that is attributed to rounding."""


def can_quantise(device: torch.device) -> bool:
    """Return whether the kernels can run the linear layers of a module with quantised weights."""
    return device.type == "cpu" and bool(units())


def pack_linears(model: Any) -> bool:
    """Replace a model's linear layers in bfloat16 by those of the kernels; return whether they were.

    A model that reads a layer's weight in its own code, or whose logits would change by more than rounding, is left unchanged.
    """
    if _reads_weights(model):
        return False
    products = _record_products(model)
    expected = _replace_linears(model, BFLOAT16, torch.bfloat16)
    try:
        same = _relative_error(model, expected) < WRONG_ERROR and _reproduces_products(model, products)
    except (RuntimeError, AttributeError):
        same = False
    if not same:
        for name, module in list(model.named_modules()):
            if isinstance(module, KernelLinear):
                model.set_submodule(name, _unpacked(module))
        model.tie_weights()
    return same


def _record_products(model: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the inputs and outputs of linear layers in the probe, by their names."""
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str, arguments: tuple[Any, ...], output: Tensor) -> None:
        found[name] = (arguments[0], output)

    with ExitStack() as hooks, torch.inference_mode():
        for name, part in model.named_modules():
            if _is_linear(part):
                hook = part.register_forward_hook(
                    lambda _, arguments, output, name=name: record(name, arguments, output)
                )
                hooks.callback(hook.remove)
        _probe(model)
    return found


def _reproduces_products(model: Any, products: Mapping[str, tuple[Tensor, Tensor]]) -> bool:
    """Return whether the kernels give the recorded outputs for the recorded inputs, but for rounding.

    Logits would not tell: a trained model may amplify rounding a hundredfold.
    """
    with torch.inference_mode():
        for name, (inputs, output) in products.items():
            layer = model.get_submodule(name)
            if isinstance(layer, KernelLinear):
                expected = output.float()
                if not (layer(inputs).float() - expected).norm() <= PRODUCT_TOLERANCE * expected.norm():
                    return False
    return True


def _replace_linears(model: Any, weight_format: WeightFormat, dtype: torch.dtype) -> Tensor:
    """Replace linear layers of a dtype by those of the kernels; return the logits before, for `_relative_error`.

    Layers are replaced one at a time, so that at most one weight is held twice.
    """
    arena, head = Arena(), model.get_output_embeddings()
    with torch.inference_mode():
        expected = _probe(model).float()
    wanted = [name for name, each in model.named_modules() if _is_linear(each) and each.weight.dtype == dtype]
    for name in wanted:
        linear = model.get_submodule(name)
        encoding = weight_format.head_format if linear is head else weight_format
        model.set_submodule(name, KernelLinear(linear, arena, encoding))
    return expected


def _relative_error(model: Any, expected: Tensor) -> float:
    """Return the relative error of a model's logits of the probe."""
    with torch.inference_mode():
        return float((_probe(model).float() - expected).norm() / expected.norm())


def _reads_weights(model: Any) -> bool:
    """Return whether a module reads the weight of a linear layer, instead of calling the layer."""
    try:
        with torch.inference_mode():
            _probe(_copy_with(model, {each: OpaqueLinear(each) for each in _linears(model)}))
    except WeightReadError:
        return True
    except Exception:  # of code that is not ours: the comparison of logits decides
        return False
    return False


class LinearCounts(NamedTuple):
    """Numbers of weights of a model.

    Args:
        in_layers: of linear layers, without the head.
        in_head: of the head, if that is a linear layer.
        others: neither of these nor of embeddings.
    """

    in_layers: int
    in_head: int
    others: int

    @property
    def is_majority(self) -> bool:
        """True if linear layers hold most weights, not counting embeddings and head."""
        return self.in_layers > self.others

    def copy_bytes(self, weight_format: WeightFormat) -> int:
        """Return the bytes of these layers' weights in another encoding."""
        in_head = self.in_head * weight_format.head_format.bytes_per_weight
        return int(self.in_layers * weight_format.bytes_per_weight + in_head)


def count_linears(model: Any) -> LinearCounts:
    """Return the numbers of weights of a model, which may be one without memory."""
    linears = [each for each in _linears(model) if each.weight.dtype == model.dtype]
    head = model.get_output_embeddings()
    in_layers = sum(each.weight.numel() for each in linears if each is not head)
    in_head = sum(each.weight.numel() for each in linears if each is head)
    parts = [each for each in model.modules() if isinstance(each, nn.Embedding) or each is head]
    counted = {id(each.weight) for each in (*parts, *linears)}
    return LinearCounts(
        in_layers, in_head, sum(each.numel() for each in model.parameters() if id(each) not in counted)
    )


def few_linears_error(name: str, counts: LinearCounts) -> UnsupportedModelError:
    """Return the error for a model most of whose weights cannot be quantised."""
    return UnsupportedModelError(
        f"expected a model most of whose weights are those of linear layers, got {name} with {counts.in_layers:,} of them, "
        f"and {counts.others:,} others; load it without quantize"
    )


def quantise_linears(model: Any, weight_format: WeightFormat) -> None:
    """Replace a model's linear layers by quantised ones, which the kernels run; that of the head is in its `head_format`.

    Models that have too few weights in linear layers, or do not run with others, are refused.
    """
    counts = count_linears(model)
    if not counts.is_majority:
        raise few_linears_error(type(model).__name__, counts)
    if _reads_weights(model):
        raise _unquantised_error(model, "which computes with their weights in its own code")
    expected = _replace_linears(model, weight_format, model.dtype)
    try:
        error = _relative_error(model, expected)
    except (RuntimeError, AttributeError) as caught:
        raise _unquantised_error(model, f"which does not run with others ({caught})") from caught
    if not error < WRONG_ERROR:
        raise UnsupportedModelError(
            f"expected logits with a relative error below {WRONG_ERROR} in {weight_format.bits} bits, got {error:.3g} with "
            f"{type(model).__name__}; load it without quantize"
        )


def _unquantised_error(model: Any, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"expected a model whose linear layers can be quantised, got {type(model).__name__}, {reason}; load it "
        "without quantize"
    )


class WeightReadError(RuntimeError):
    """A module computes with the weight of a linear layer in its own code."""


class UnreadableWeight(Tensor):
    """Tensor without memory, of which only properties can be read.

    torch computes with a plain tensor on the meta device and one on a CPU in some operations, whose result has any values.
    """

    READABLE: ClassVar[frozenset[str]] = frozenset({"__get__", "dim", "size", "numel", "is_floating_point"})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in cls.READABLE:
            raise WeightReadError(f"the weight of a linear layer is read by {func.__name__}")
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class OpaqueLinear(nn.Module):
    """Linear layer whose weight cannot be read, like that of a quantised layer, and that counts its calls."""

    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.weight = torch.empty_like(linear.weight, device="meta").as_subclass(UnreadableWeight)
        self.bias = linear.bias
        self.num_calls = 0
        self._functions = [linear.forward]  # in a list, as the layer is not a part of this one

    def forward(self, values: Tensor) -> Tensor:
        self.num_calls += 1
        product: Tensor = self._functions[0](values)
        return product


_copies: WeakKeyDictionary[Any, WeakValueDictionary[WeightFormat, Any]] = WeakKeyDictionary()
"""Quantised copies in use, by model."""


def why_not_copied(model: Any) -> str:
    """Return why `copy_quantised` cannot copy a model, as the end of a sentence; empty if it can."""
    if _copies.get(model):
        return ""
    linears = _linears(model)
    plain = [each for each in linears if not isinstance(each, KernelLinear)]
    if not can_quantise(model.device) or any(each.weight.device.type != "cpu" for each in plain):
        return "whose weights are not all on a CPU for which there are kernels"
    if any(each.weight_format.is_quantised for each in linears if isinstance(each, KernelLinear)):
        return "with quantised weights"
    if not (counts := count_linears(model)).is_majority:
        return f"with {counts.in_layers:,} weights in linear layers and {counts.others:,} others"
    try:
        opaque = {each: OpaqueLinear(each) for each in linears}
        with torch.inference_mode():
            expected, found = _probe(model), _probe(_copy_with(model, opaque))
    except Exception as error:  # of code that is not ours, so of any kind
        first_line = f"{type(error).__name__}: {error}".splitlines()[0]
        return f"which does not run with other linear layers ({first_line})"
    if not any(each.num_calls for each in opaque.values()) or not torch.equal(found, expected):
        return "which runs its own layers when it is copied"
    return ""


def forget_copies(model: Any) -> None:
    """Drop the copies of a model, after a change of its weights."""
    _copies.pop(model, None)


def copy_quantised(model: Any, weight_format: WeightFormat) -> Any:
    """Return a copy of a model with quantised linear layers, which shares all other weights.

    A copy that is in use is returned again, with the weights that the model had when it was made.
    """
    copies = _copies.setdefault(model, WeakValueDictionary())
    copy = copies.get(weight_format)
    if copy is None:
        arena, head = Arena(), model.get_output_embeddings()
        quantised = {}
        for linear in _linears(model):
            encoding = weight_format.head_format if linear is head else weight_format
            quantised[linear] = (
                linear.requantised(arena, encoding)
                if isinstance(linear, KernelLinear)
                else KernelLinear(linear, arena, encoding)
            )
        copy = copies[weight_format] = _copy_with(model, quantised)
    return copy


def _linears(model: Any) -> list[Any]:
    return [each for each in model.modules() if type(each) is KernelLinear or _is_linear(each)]


def _is_linear(module: nn.Module) -> bool:
    """Return whether a module is a linear layer, and no subclass of one or of its weight, which may compute otherwise."""
    return type(module) in (nn.Linear, Conv1D) and type(module.weight.data) is Tensor


def _copy_with(model: Any, replacements: Mapping[Any, nn.Module]) -> Any:
    """Return a copy of a model with other modules in place of some, and with the same weights elsewhere."""
    copies = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return deepcopy(model, copies | {id(each): other for each, other in replacements.items()})


def _unpacked(packed: KernelLinear) -> nn.Linear | Conv1D:
    num_outputs, num_inputs = packed.weight.shape
    weight, linear = packed.plain_weight(), nn.Linear(num_inputs, num_outputs, bias=False, device="meta")
    if packed.is_transposed:
        with torch.device("meta"):
            weight, linear = weight.T, Conv1D(num_outputs, num_inputs)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    linear.bias = packed.bias
    return linear


def _probe(model: Any) -> Tensor:
    """Return the logits of a few tokens in two rows, computed without a cache."""
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = torch.arange(6).remainder(vocab_size).reshape(2, 3)
    logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    return logits
