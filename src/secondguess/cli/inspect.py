"""`secondguess inspect`: what a model is, what it would take, and whether it can be decoded speculatively."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from secondguess.cli import options
from secondguess.cli.output import print_json

if TYPE_CHECKING:
    from secondguess.runtime.describe import ModelDescription

MIB = 2**20
RUNTIMES = {
    "native": "native, if it says what the module says (probed at loading)",
    "fused": "fused, if it says what the module says (probed at loading)",
    "transformers": "the Transformers module",
}


def inspect(
    model: Annotated[
        str,
        Argument(metavar="MODEL", help="A directory, a cached model's name, or builtin.", show_default=False),
    ],
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    json: options.Json = False,
) -> int:
    """Describe a model without loading its weights.

    Architecture, sizes, memory, and the drafters that fit. A model that cannot be
    decoded speculatively is refused with the reason (exit code 2).
    """
    from secondguess.runtime.describe import describe_model

    found = describe_model(model, dtype=dtype, device=device)
    drafters = fitting_drafters(model)
    if json:
        print_json(asdict(found) | {"supported": True, "drafters": drafters})
    else:
        for label, value in _lines(found, drafters):
            print(f"{label:<13}{value}")
    return 0


def fitting_drafters(model: str) -> list[str]:
    """Names for `--drafter`, the default one first; `model:PATH` stands for any model with the same tokenizer."""
    from secondguess.api import default_drafter
    from secondguess.drafters import DRAFTERS

    names = ["model:PATH" if kind == "model" else kind for kind in DRAFTERS]
    return list(dict.fromkeys([default_drafter(model), *names]))


def _lines(found: ModelDescription, drafters: list[str]) -> list[tuple[str, str]]:
    context = f"{found.context_length:,} tokens" if found.context_length else "no limit named"
    free = "unknown" if found.available_bytes is None else _size(found.available_bytes)
    return [
        ("model", f"{found.name} ({found.architecture})"),
        (
            "size",
            f"{found.num_parameters:,} parameters, {found.num_layers} layers of width {found.hidden_size}",
        ),
        ("attention", _attention(found)),
        ("vocabulary", f"{found.vocab_size:,}, of which the tokenizer knows {found.num_tokens:,}"),
        ("context", context),
        ("picked", f"{found.dtype} on {found.device}"),
        (
            "runtime",
            RUNTIMES[found.runtime] + (f"; not native: {found.not_native}" if found.not_native else ""),
        ),
        (
            "memory",
            f"{_size(found.weights_bytes)} of weights, {_size(found.cache_bytes)} of cache per row "
            f"({context if found.context_length else '4,096 tokens'}); {free} available",
        ),
        ("speculation", "supported"),
        ("drafters", ", ".join(drafters) + " (PATH: a model with the same tokenizer)"),
    ]


def _attention(found: ModelDescription) -> str:
    kinds = ", ".join(f"{count} x {kind.replace('_', ' ')}" for kind, count in found.attention.items())
    window = f" (window {found.sliding_window:,})" if found.sliding_window else ""
    return f"{found.num_heads} heads, {found.num_kv_heads} for keys and values; {kinds}{window}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes < 1024 * MIB else f"{num_bytes / MIB / 1024:,.1f} GiB"
