"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Context, Option

from secondguess.cli.output import print_note

if TYPE_CHECKING:
    from secondguess.configuration import Configuration, TuningRecord

MODEL_OPTIONS = "Who takes part"
SAMPLING = "Sampling"
OUTPUT = "Input and output"

DRAFTER_NAMES = (
    "none, model:PATH, ngram, suffix, early-exit[:PATH], layer-skip:PATH, medusa[:PATH], mtp[:PATH], eagle[:PATH] or "
    "dspark[:PATH]"
)
"""Drafter names for `--help`; a literal because importing the drafters would import torch."""


def validate_with(place: str) -> Callable[[Any], Any]:
    """Return an option callback that passes every value to a check.

    The checks need neither torch nor Transformers, which take seconds to import, so a wrong name
    is refused immediately.

    Args:
        place: the check as `module:function`, imported on the first call.
    """

    def callback(value: Any) -> Any:
        module, _, function = place.partition(":")
        check = getattr(import_module(module), function)
        for name in [value] if isinstance(value, str) else value or ():
            check(name)
        return value

    return callback


check_model = validate_with("secondguess.runtime.resolve:find_checkpoint")
check_drafter = validate_with("secondguess.drafters:parse_drafter_name")
check_verifier = validate_with("secondguess.verifiers:check_verifier_name")
check_controller = validate_with("secondguess.controllers:parse_controller_name")
check_dtype = validate_with("secondguess.runtime.resolve:check_dtype")
check_device = validate_with("secondguess.runtime.resolve:check_device")
check_quantization = validate_with("secondguess.runtime.resolve:check_quantization_name")
check_runtime = validate_with("secondguess.runtime.resolve:check_runtime")
check_engine = validate_with("secondguess.export:check_engine")

Config = Annotated[
    Path | None,
    Option(
        metavar="FILE",
        help="A secondguess.toml, as tune writes it; options given here win over it.",
        show_default="none",
        rich_help_panel=MODEL_OPTIONS,
    ),
]
MODEL_NAMES = "Target: a directory, a cached model's name, or builtin."
Model = Annotated[str, Option(help=MODEL_NAMES, callback=check_model, rich_help_panel=MODEL_OPTIONS)]
Drafter = Annotated[
    str | None,
    Option(
        help=f"{DRAFTER_NAMES}; each with ,key=value options; several joined by + are combined.",
        callback=check_drafter,
        show_default="suffix+model:builtin-draft for builtin, else suffix",
        rich_help_panel=MODEL_OPTIONS,
    ),
]
Verifier = Annotated[
    str,
    Option(
        help="auto, greedy, rejection, block, recursive, traversal or coupled.",
        callback=check_verifier,
        rich_help_panel=MODEL_OPTIONS,
    ),
]
Controller = Annotated[
    str | None,
    Option(
        help="Choice of draft lengths: cost, fixed:K, confidence, entropy, learned, each with ,key=value options.",
        callback=check_controller,
        show_default="chosen by drafter",
        rich_help_panel=MODEL_OPTIONS,
    ),
]
Dtype = Annotated[
    str,
    Option(
        help="auto, float64, float32, bfloat16 or float16.",
        callback=check_dtype,
        rich_help_panel=MODEL_OPTIONS,
    ),
]
Device = Annotated[
    str, Option(help="auto, cpu or cuda[:N].", callback=check_device, rich_help_panel=MODEL_OPTIONS)
]
Quantize = Annotated[
    str | None,
    Option(
        help="int8: store the target's weights in 8 bits.",
        callback=check_quantization,
        rich_help_panel=MODEL_OPTIONS,
    ),
]
DrafterQuantize = Annotated[
    str | None,
    Option(
        help="int8: store the draft model's weights in 8 bits.",
        callback=check_quantization,
        rich_help_panel=MODEL_OPTIONS,
    ),
]
Runtime = Annotated[
    str,
    Option(
        help="Runtime of the target: auto, native, fused or transformers.",
        callback=check_runtime,
        rich_help_panel=MODEL_OPTIONS,
    ),
]

MaxTokens = Annotated[int, Option(help="Maximum number of tokens to generate.", rich_help_panel=SAMPLING)]
MinTokens = Annotated[int, Option(help="Minimum number of tokens to generate.", rich_help_panel=SAMPLING)]
Temperature = Annotated[
    float, Option(help="0 is greedy, 1 the model's own distribution.", rich_help_panel=SAMPLING)
]
TopK = Annotated[int, Option(help="Keep the K most probable tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float, Option(help="Keep the smallest set with this mass; 1 keeps all.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float, Option(help="Keep tokens with this share of the top one's probability.", rich_help_panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float, Option(help="Above 1: avoid tokens of prompt and output.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, Option(help="Subtracted once per occurrence in the output.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float, Option(help="Subtracted from tokens that occur in the output.", rich_help_panel=SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    Option(
        metavar="TOKEN=VALUE",
        help="Add to a token id's logit; -inf bans it; repeatable.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None, Option(help="End before this string; repeatable.", rich_help_panel=SAMPLING)
]
StopTokenId = Annotated[
    list[int] | None, Option(help="End at this token id; repeatable.", rich_help_panel=SAMPLING)
]
NumSamples = Annotated[
    int,
    Option(
        "--n", help="Samples per prompt; more than 1 needs a temperature above 0.", rich_help_panel=SAMPLING
    ),
]
Seed = Annotated[
    int | None,
    Option(
        help="Reproducible text; with verifier auto or coupled the same with any drafter (see the README on precision).",
        show_default="fresh each time",
        rich_help_panel=SAMPLING,
    ),
]
DraftLength = Annotated[
    int | None,
    Option(
        help="Draft this many tokens per round, overriding the controller; 0 is plain decoding.",
        show_default="the controller decides",
        rich_help_panel=SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    Option(
        help="With --json: each token's log-probability and this many alternatives.", rich_help_panel=SAMPLING
    ),
]

Json = Annotated[bool, Option("--json", help="Print JSON only.", rich_help_panel=OUTPUT)]

DRAFTER_SPECIFIC_SETTINGS = ("controller", "drafter_quantize")
"""Settings that are specific to a drafter and may be unsuitable or invalid for another."""
MEASUREMENTS = "measurements"


def load_settings(context: Context, config: Path | None) -> dict[str, Any]:
    """Return keyword arguments for `load`.

    Values given on the command line take precedence over keys of the file, and those over the
    options' defaults.

    Args:
        context: Typer context of a command whose parameters are named like those of `load`. Where
            the command lacks a parameter, the file's value is still returned.
        config: the file of `--config`.

    Raises:
        BadInputError: the file is invalid, or belongs to another model or to other weights.
    """
    return load_settings_and_tuned(context, config)[0]


def load_settings_and_tuned(context: Context, config: Path | None) -> tuple[dict[str, Any], TuningRecord]:
    """Return `load_settings` and the measurements stored in the file.

    The measurements are empty without a file and for another drafter than the file's.
    """
    from secondguess.configuration import LoadSettings, TuningRecord

    names = [name for name in LoadSettings.model_fields if name in context.params]
    settings, tuned = {name: context.params[name] for name in names}, TuningRecord()
    if config is not None:
        given = {name: value for name, value in settings.items() if is_given(context, name)}
        configuration = read_config(config, given.get("model"))
        left_out = _inapplicable_settings(given, configuration)
        if left_out:
            chosen_for = configuration.load.drafter or "the model's own drafter"
            print_note(
                f"{config}: not using its {', '.join(left_out)}: of {chosen_for}, not of {given['drafter']}"
            )
        keys = {name: value for name, value in configuration.load.given().items() if name not in left_out}
        settings |= keys | given
        tuned = tuned if MEASUREMENTS in left_out else configuration.tuned
    return {name: value for name, value in settings.items() if value is not None}, tuned


def is_given(context: Context, name: str) -> bool:
    """Return whether an option was given explicitly, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def read_config(config: Path, model: str | None = None) -> Configuration:
    """Read the file of `--config`.

    Args:
        config: the file.
        model: name of the requested model, which must match the file's; None accepts any.

    Raises:
        BadInputError: the file is invalid, or belongs to another model or to other weights.
        CheckpointError: the file's model, whose weights are compared, is not found.
    """
    from secondguess.configuration import read_configuration, require_same_model, require_same_weights

    configuration = read_configuration(config)
    if model is not None:
        require_same_model(configuration, model, config)
    require_same_weights(configuration, config)
    return configuration


def _inapplicable_settings(given: dict[str, Any], configuration: Configuration) -> list[str]:
    """Return names of file entries that do not apply because another drafter was requested."""
    if given.get("drafter", configuration.load.drafter) == configuration.load.drafter:
        return []
    names = [
        name for name in configuration.load.given() if name in DRAFTER_SPECIFIC_SETTINGS and name not in given
    ]
    return [*names, MEASUREMENTS] if configuration.tuned.given() else names
