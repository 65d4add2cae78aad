"""`secondguess inspect`: model info, matching drafters and memory, without loading weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context

from secondguess.cli import options
from secondguess.cli.option_groups import option, panel
from secondguess.cli.output import print_json
from secondguess.errors import BadInputError, CheckpointError, UnsupportedModelError

if TYPE_CHECKING:
    from secondguess.checkpoint.description import MemoryPlan, ModelDescription
    from secondguess.checkpoint.plan import Checkpoint
    from secondguess.configuration import TuningRecord
    from secondguess.drafters.spec import DrafterSpec
    from secondguess.heads.discovery import FoundDrafter
    from secondguess.pairing import Pair

MIB = 2**20
LABEL_WIDTH = 13
memory_option = panel("Memory")
RUNTIMES = {
    "native": "native (CPU kernels), if its logits match those of Transformers (checked at loading)",
    "fused": "fused (torch), if its logits match those of Transformers (checked at loading)",
    "graphs": "graphs (CUDA graphs), if its logits match those of Transformers (checked at loading)",
    "transformers": "transformers (the unmodified module)",
}
LOADING = options.LOADING.only(
    "config", "drafter", "dtype", "device", "quantize", "drafter_quantize"
).replace(
    option(
        "model",
        Annotated[str | None, options.model_argument(f"{options.MODEL_NAMES} --config names one, too.")],
    )
)


def inspect(
    context: Context,
    loading: Annotated[options.Loading, LOADING],
    rows: Annotated[int, memory_option("Number of sequences that decode together.")] = 1,
    num_tokens: Annotated[
        int | None,
        memory_option(
            "Tokens of each sequence, prompt and output together.",
            "--context",
            show_default="4096, or the model's context if that is less",
        ),
    ] = None,
    json: options.Json = False,
) -> int:
    """Describe a model and its drafter without loading their weights.

    Shows architecture, sizes, drafters, and whether weights and KV caches fit into
    memory. A model without support for speculative decoding, or a draft model whose
    tokenizer cannot be compared, is refused with the reason (exit code 2).
    """
    settings, tuned, config = loading.settings, loading.tuned, context.params["config"]
    if "model" not in settings:
        raise BadInputError(
            "Missing argument 'MODEL': expected a model to inspect, or a --config that names one"
        )

    from secondguess.api import check_verifier, choose_controller
    from secondguess.checkpoint.description import compatibility_notes, describe, plan_memory
    from secondguess.drafters.spec import DrafterSpec
    from secondguess.pairing import find_drafters, require_drafter_of_history, resolve_pair
    from secondguess.verifiers import make_verifier

    arguments = dict(settings)
    if arguments.pop("share_history", False) and "drafter" in arguments:
        require_drafter_of_history(DrafterSpec.parse(arguments["drafter"]))
    verifier, controller = make_verifier(arguments.pop("verifier", "auto")), arguments.pop("controller", None)
    pair = resolve_pair(**arguments)
    check_verifier(verifier, pair.drafter)
    choose_controller(controller, pair.drafter)
    target, draft_model, notes = describe(pair.target), None, []
    if pair.draft_model is not None:
        draft_model = describe(pair.draft_model)
        notes = compatibility_notes(target, draft_model, one_tokenizer=pair.vocabularies is None)
    plan = plan_memory(
        pair.target, pair.draft_model, rows=rows, context=num_tokens, head_bytes=pair.drafter.head_bytes
    )
    found = pair.found or find_drafters(pair.target)
    drafters = compatible_drafters(pair.target, found)
    if json:
        print_json(
            asdict(target)
            | {
                "supported": True,
                "drafters": drafters,
                "found": [asdict(drafter) | {"folder": str(drafter.folder)} for drafter in found],
                "drafter": {
                    "name": pair.drafter.name,
                    "model": None if draft_model is None else asdict(draft_model),
                    "vocabulary": _vocabulary_record(pair),
                    "remarks": notes,
                },
                "memory": plan.as_dict(),
                "configuration": None if config is None else {"load": settings, "tuned": tuned.given()},
            }
        )
        return 0
    lines = _model_lines(target, drafters) | _found_lines(found)
    verdict = "same tokenizer" if pair.vocabularies is None else str(pair.vocabularies)
    lines |= _drafter_lines(pair.drafter, target, draft_model, [verdict, *notes])
    lines |= _memory_lines(plan, settings)
    if config is not None:
        lines |= _configuration_lines(settings, tuned)
    for label, value in lines.items():
        print(f"{label:<{LABEL_WIDTH}}{value}")
    return 0


def compatible_drafters(target: Checkpoint, found: Sequence[FoundDrafter]) -> list[str]:
    """Return names for `--drafter` that the target does not exclude, the default first.

    `PATH` stands for a smaller model or for a trained drafter.
    """
    from secondguess.drafters import DRAFTERS, drafter_class
    from secondguess.heads.folders import find_own
    from secondguess.pairing import choose_default, default_drafter, resolve_drafter

    names = [default_drafter("builtin") if target.name == "builtin" else choose_default(target, found)]
    for kind in DRAFTERS:
        drafter = drafter_class(kind)
        forms = [kind] if drafter.deterministic else [f"{kind}:{drafter.argument}"]
        if find_own(kind, target.name, target.path) is not None:
            forms.insert(0, kind)
        for name in forms:
            try:
                resolve_drafter(name, target)
            except UnsupportedModelError:
                continue
            except (BadInputError, CheckpointError):
                pass  # there is no folder PATH
            names.append(name)
            break
    return list(dict.fromkeys(names))


def _model_lines(found: ModelDescription, drafters: list[str]) -> dict[str, str]:
    kinds = ", ".join(f"{count} x {kind.replace('_', ' ')}" for kind, count in found.attention.items())
    window = f" (window {found.sliding_window:,})" if found.sliding_window else ""
    free = "unknown" if found.available_bytes is None else _size(found.available_bytes)
    row = _context(found) if found.context_length else "4,096 tokens"
    return {
        "model": f"{found.name} ({found.architecture})",
        "size": f"{found.num_parameters:,} parameters, {found.num_layers} layers, hidden size {found.hidden_size}",
        "attention": f"{found.num_heads} heads, {found.num_kv_heads} key-value heads; {kinds}{window}",
        "vocabulary": f"{found.vocab_size:,}, of which the tokenizer knows {found.num_tokens:,}",
        "context": _context(found),
        "dtype": f"{found.dtype} on {found.device}",
        "runtime": RUNTIMES[found.runtime]
        + (f"; not native: {found.not_native}" if found.not_native else ""),
        "memory": f"{_size(found.weights_bytes)} of weights, {_size(found.cache_bytes)} of KV cache per sequence "
        f"({row}); {free} available",
        "speculation": "supported",
        "drafters": ", ".join(drafters)
        + " (PATH: of model, a smaller model, best with the same tokenizer; of others, a trained drafter)",
    }


def _found_lines(found: Sequence[FoundDrafter]) -> dict[str, str]:
    """Return the drafters that were found for the target, one in a line; none without a line."""
    texts = []
    for drafter in found:
        size = f", {_size(drafter.num_bytes)}" if drafter.num_bytes else ""
        verdict = f"does not fit: {drafter.obstacle}" if drafter.obstacle else "fits"
        named = "trained for this target, " if drafter.names_target else ""
        texts.append(f"{drafter.name}{size}: {named}{verdict}")
    return {"found": ("\n" + " " * LABEL_WIDTH).join(texts)} if texts else {}


def _drafter_lines(
    named: DrafterSpec, target: ModelDescription, drafter: ModelDescription | None, notes: list[str]
) -> dict[str, str]:
    if drafter is not None:
        share = drafter.num_parameters / target.num_parameters
        return {
            "drafter": f"{named.name} ({drafter.architecture}), {drafter.num_parameters:,} parameters "
            f"({share:.2g} of the target's), context {_context(drafter)}",
            "pair": "compatible: " + "; ".join(notes),
        }
    if named.needs_target:
        return {"drafter": f"{named.name}, which uses parts of the target and is checked when that is loaded"}
    return {"drafter": f"{named.name}, which needs no model and fits any target"}


def _vocabulary_record(pair: Pair) -> dict[str, object] | None:
    """Return the comparison of the tokenizers, ready for JSON; None without a draft model."""
    if pair.draft_model is None:
        return None
    return {"method": "same"} if pair.vocabularies is None else pair.vocabularies.as_dict()


def _memory_lines(plan: MemoryPlan, settings: dict[str, Any]) -> dict[str, str]:
    shares = [
        f"{part} {_size(need.weights)} of weights and {_size(need.cache)} of KV cache"
        for part, need in plan.needs.items()
    ]
    if plan.head_bytes:
        shares.append(f"the drafter's own weights {_size(plan.head_bytes)}")
    if plan.loading_bytes:
        shares.append(f"while loading {_size(plan.loading_bytes)} more")
    rows = f"{plan.rows:,} sequence{'s' if plan.rows > 1 else ''} of {plan.context:,} tokens"
    lines = {"memory for": f"{rows}: {', '.join(shares)}; {_size(plan.total_bytes)} in all: {_verdict(plan)}"}
    quantized = {"target": settings.get("quantize"), "drafter": settings.get("drafter_quantize")}
    obstacles = {"int8": [plan.int8_obstacle] if plan.int8_obstacle else []}
    for name, sizes in plan.quantised.items():
        savings = [
            f"{part} {_size(sizes[part])} of weights instead of {_size(need.weights)}"
            for part, need in plan.needs.items()
            if quantized[part] is None and sizes.get(part, need.weights) < need.weights
        ]
        if savings:
            lines[name] = "; ".join(savings + obstacles.get(name, []))
    return lines


def _verdict(plan: MemoryPlan) -> str:
    if plan.available_bytes is None or plan.missing_bytes is None:
        return "the available memory is unknown"
    if plan.missing_bytes == 0:
        return f"fits into the {_size(plan.available_bytes)} available"
    return (
        f"does not fit: {_size(plan.missing_bytes)} more than the {_size(plan.available_bytes)} available; "
        "use fewer --rows, a shorter --context, int8, int4, a smaller model, or a drafter without weights such as suffix"
    )


def _configuration_lines(settings: dict[str, Any], tuned: TuningRecord) -> dict[str, str]:
    chosen = [f"{name} {value}" for name, value in settings.items() if name != "model"]
    labels = {"cost_ratio": "draft step / target pass (c)"}
    measured = [
        f"{labels.get(name, name.replace('_', ' '))} {_format_value(value)}"
        for name, value in tuned.given().items()
    ]
    lines = {"configured": ", ".join(chosen), "tuned": ", ".join(measured)}
    return {label: text for label, text in lines.items() if text}


def _format_value(value: object) -> str:
    if isinstance(value, dict):
        return " ".join(f"{_format_value(ratio)}x (batch size {size})" for size, ratio in value.items())
    if isinstance(value, tuple):
        return " ".join(map(_format_value, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _context(found: ModelDescription) -> str:
    return f"{found.context_length:,} tokens" if found.context_length else "no limit named"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.1f} MiB" if num_bytes < 1024 * MIB else f"{num_bytes / MIB / 1024:,.1f} GiB"
