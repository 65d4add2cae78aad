"""`secondguess inspect`: model info, matching drafters and memory, without loading weights."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context, Option

from secondguess.cli import options
from secondguess.cli.output import print_json
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.configuration import TuningRecord
    from secondguess.pairing import DrafterInfo
    from secondguess.runtime.describe import ModelDescription
    from secondguess.runtime.pair import MemoryPlan

MIB = 2**20
MEMORY = "How much at once"
RUNTIMES = {
    "native": "native, if its logits match the module's (checked at loading)",
    "fused": "fused, if its logits match the module's (checked at loading)",
    "transformers": "the Transformers module",
}


def inspect(
    context: Context,
    model: Annotated[
        str | None,
        Argument(
            metavar="MODEL",
            help="A directory, a cached model's name, or builtin; --config names one, too.",
            callback=options.check_model,
            show_default=False,
        ),
    ] = None,
    config: options.Config = None,
    drafter: options.Drafter = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantize: options.Quantize = None,
    drafter_quantize: options.DrafterQuantize = None,
    rows: Annotated[
        int | None,
        Option(help="Prompts that decode together.", show_default="1", rich_help_panel=MEMORY),
    ] = None,
    num_tokens: Annotated[
        int | None,
        Option(
            "--context",
            help="Tokens of each, prompt and output together.",
            show_default="4096, or the model's context if that is less",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    json: options.Json = False,
) -> int:
    """Describe a model and its drafter without loading their weights.

    Shows architecture, sizes, drafters, and whether weights and KV caches fit into
    memory. A model without support for speculative decoding, or a drafter with
    another tokenizer, is refused with the reason (exit code 2).
    """
    settings, tuned = options.load_settings_and_tuned(context, config)
    if "model" not in settings:
        raise BadInputError(
            "Missing argument 'MODEL': expected a model to inspect, or a --config that names one"
        )

    from secondguess.controllers import make_controller
    from secondguess.runtime.describe import describe_model
    from secondguess.runtime.pair import compatibility_notes, plan_demand, plan_memory
    from secondguess.verifiers import make_verifier

    place = {name: settings[name] for name in ("dtype", "device") if name in settings}
    make_verifier(settings.get("verifier", "auto"))
    if "controller" in settings:
        make_controller(settings["controller"])
    target = describe_model(
        settings["model"],
        **place,
        quantize=settings.get("quantize"),
        runtime=settings.get("runtime", "auto"),
    )
    named = _drafter_of(settings, target)
    demand = plan_demand(target, rows=rows, context=num_tokens)
    guessing, remarks = None, []
    if named.draft_model is not None:
        eight_bits = settings.get("drafter_quantize")
        guessing = describe_model(named.draft_model, **place, quantize=eight_bits, drafts=True)
        remarks = compatibility_notes(target, guessing)
    plan = plan_memory(
        demand,
        target,
        guessing,
        quantize=settings.get("quantize"),
        drafter_quantize=settings.get("drafter_quantize"),
        head_bytes=named.head_bytes,
    )
    drafters = compatible_drafters(settings["model"])
    if json:
        record = asdict(target) | {"supported": True, "drafters": drafters}
        record["drafter"] = {
            "name": named.name,
            "model": None if guessing is None else asdict(guessing),
            "remarks": remarks,
        }
        record["memory"] = plan.as_dict()
        record["configuration"] = None if config is None else {"load": settings, "tuned": tuned.given()}
        print_json(record)
        return 0
    lines = _model_lines(target, drafters)
    lines += _pair_lines(named, target, guessing, remarks)
    lines += _memory_lines(plan, settings)
    if config is not None:
        lines += _configuration_lines(settings, tuned)
    for label, value in lines:
        print(f"{label:<13}{value}")
    return 0


def compatible_drafters(model: str) -> list[str]:
    """Return names for `--drafter`, the default first.

    `PATH` stands for a model with the same tokenizer or for a trained drafter.
    """
    from secondguess.api import default_drafter
    from secondguess.builtin import head_path
    from secondguess.drafters import DRAFTERS, drafter_class

    def name(kind: str) -> str:
        has_builtin_head = model == "builtin" and head_path(kind) is not None
        return (
            kind
            if has_builtin_head or getattr(drafter_class(kind), "deterministic", False)
            else f"{kind}:PATH"
        )

    return list(dict.fromkeys([default_drafter(model), *map(name, DRAFTERS)]))


def _drafter_of(settings: dict[str, Any], target: ModelDescription) -> DrafterInfo:
    """Return the drafter that `load` would use, without loading it.

    Names, options and paths that `load` would refuse are refused here, too.
    """
    from secondguess.api import default_drafter
    from secondguess.pairing import UnloadedTarget, require_model_to_quantize, resolve_drafter

    unloaded = UnloadedTarget(
        target.name, target.path, target.num_layers, supports_partial_forward=target.runtime != "transformers"
    )
    named = resolve_drafter(settings.get("drafter", default_drafter(settings["model"])), unloaded)
    require_model_to_quantize(settings.get("drafter_quantize"), named.name, named.draft_model is not None)
    return named


def _model_lines(found: ModelDescription, drafters: list[str]) -> list[tuple[str, str]]:
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


def _pair_lines(
    named: DrafterInfo, target: ModelDescription, drafter: ModelDescription | None, remarks: list[str]
) -> list[tuple[str, str]]:
    if drafter is None:
        if named.needs_target:
            return [
                ("drafter", f"{named.name}, which borrows from the target and is checked when that is loaded")
            ]
        return [("drafter", f"{named.name}, which needs no model and fits any target")]
    share = drafter.num_parameters / target.num_parameters
    context = f"{drafter.context_length:,} tokens" if drafter.context_length else "no limit named"
    return [
        (
            "drafter",
            f"{named.name} ({drafter.architecture}), {drafter.num_parameters:,} parameters "
            f"({share:.2g} of the target's), context {context}",
        ),
        ("pair", "; ".join(["fits: one tokenizer", *remarks])),
    ]


def _memory_lines(plan: MemoryPlan, settings: dict[str, Any]) -> list[tuple[str, str]]:
    parts = [("target", plan.target, settings.get("quantize"))]
    if plan.drafter is not None:
        parts.append(("drafter", plan.drafter, settings.get("drafter_quantize")))
    shares = ", ".join(
        f"{who} {_size(need.weights)} of weights and {_size(need.cache)} of cache" for who, need, _ in parts
    )
    if plan.head_bytes:
        shares += f", what was trained for it {_size(plan.head_bytes)} of weights"
    rows = f"{plan.demand.rows:,} row{'s' if plan.demand.rows > 1 else ''} of {plan.demand.context:,} tokens"
    lines = [("for", f"{rows}: {shares}; {_size(plan.total_bytes)} in all: {_verdict(plan)}")]
    savings = [
        f"{who} {_size(plan.int8[who])} of weights instead of {_size(need.weights)}"
        for who, need, quantize in parts
        if quantize is None and plan.int8[who] < need.weights
    ]
    if savings and plan.int8_obstacle:
        savings.append(plan.int8_obstacle)
    return [*lines, ("int8", "; ".join(savings))] if savings else lines


def _verdict(plan: MemoryPlan) -> str:
    if plan.available_bytes is None or plan.missing_bytes is None:
        return "the available memory is unknown"
    if plan.missing_bytes == 0:
        return f"fits into the {_size(plan.available_bytes)} available"
    return (
        f"does not fit: {_size(plan.missing_bytes)} more than the {_size(plan.available_bytes)} available; "
        "take fewer rows, a shorter context, int8 or a smaller model"
    )


def _configuration_lines(settings: dict[str, Any], tuned: TuningRecord) -> list[tuple[str, str]]:
    chosen = [f"{name} {value}" for name, value in settings.items() if name != "model"]
    measured = [f"{name} {_format_value(value)}" for name, value in tuned.given().items()]
    lines = [("configured", ", ".join(chosen)), ("tuned", ", ".join(measured))]
    return [(label, value) for label, value in lines if value]


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{size}:{_format_value(each)}" for size, each in value.items())
    if isinstance(value, tuple):
        return " ".join(map(_format_value, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _attention(found: ModelDescription) -> str:
    kinds = ", ".join(f"{count} x {kind.replace('_', ' ')}" for kind, count in found.attention.items())
    window = f" (window {found.sliding_window:,})" if found.sliding_window else ""
    return f"{found.num_heads} heads, {found.num_kv_heads} for keys and values; {kinds}{window}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes < 1024 * MIB else f"{num_bytes / MIB / 1024:,.1f} GiB"
