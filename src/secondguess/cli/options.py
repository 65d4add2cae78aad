"""Options shared by several commands."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from typer import Context, Option

from secondguess.cli.output import print_note
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.configuration import Configuration, TuningRecord
    from secondguess.sampling import SamplingParams
    from secondguess.validation import Settings

SettingsT = TypeVar("SettingsT", bound="Settings")

MODEL_OPTIONS = "Models and decoding"
SAMPLING = "Sampling"
OUTPUT = "Input and output"

DRAFTER_NAMES = (
    "none, model:PATH, ngram, suffix, grid, jacobi, self:int4, early-exit:K, early-exit[:PATH], layer-skip:PATH, "
    "medusa[:PATH], mtp[:PATH], eagle[:PATH] or dspark[:PATH]"
)
"""Drafter names for `--help`; a literal because importing the drafters would import torch."""


def validate_with(check_name: str) -> Callable[[Any], Any]:
    """Return an option callback that passes every value to a check, `module:function`.

    The checks need neither torch nor Transformers, which take seconds to import, so a wrong name
    is refused immediately.
    """

    def callback(value: Any) -> Any:
        module, _, function = check_name.partition(":")
        check = getattr(import_module(module), function)
        for name in [value] if isinstance(value, str) else value or ():
            check(name)
        return value

    return callback


check_model = validate_with("secondguess.checkpoint.resolve:find_checkpoint")
check_drafter = validate_with("secondguess.drafters:parse_drafter_name")
check_verifier = validate_with("secondguess.verifiers:check_verifier_name")
check_controller = validate_with("secondguess.controllers:parse_controller_name")
check_dtype = validate_with("secondguess.checkpoint.resolve:check_dtype")
check_device = validate_with("secondguess.checkpoint.resolve:check_device")
check_quantization = validate_with("secondguess.checkpoint.resolve:check_quantization")
check_runtime = validate_with("secondguess.checkpoint.resolve:check_runtime")
check_engine = validate_with("secondguess.export:check_engine")


def panel(title: str) -> Callable[..., Any]:
    """Return a function like `typer.Option`, for one panel of `--help` and with the help text first."""

    def option(text: str, *names: str, **settings: Any) -> Any:
        return Option(*names, help=text, rich_help_panel=title, **settings)

    return option


model_option, sampling_option, output_option = panel(MODEL_OPTIONS), panel(SAMPLING), panel(OUTPUT)

Config = Annotated[
    Path | None,
    model_option(
        "A secondguess.toml, as tune writes it; options given here take precedence.",
        metavar="FILE",
        show_default="none",
    ),
]
MODEL_NAMES = "Target model: a directory, a GGUF file, the name of a model in the Hugging Face cache, or builtin (a toy model)."
Model = Annotated[str, model_option(MODEL_NAMES, callback=check_model)]
DRAFTER_HELP = (
    f"Drafter, which proposes tokens: {DRAFTER_NAMES}; each with ,key=value options; several joined by + are combined "
    "(docs/drafters.md)."
)
Drafter = Annotated[
    str | None,
    model_option(
        DRAFTER_HELP,
        callback=check_drafter,
        show_default="suffix+model:builtin-draft for builtin; suffix+self:int4 where kernels and memory allow; else suffix",
    ),
]
Verifier = Annotated[
    str,
    model_option(
        "Rule that accepts draft tokens: auto, greedy, rejection, block, traversal or coupled "
        "(docs/verifiers.md).",
        callback=check_verifier,
    ),
]
CONTROLLER_HELP = (
    "Choice of draft lengths: cost (by measured times), fixed:K (constant), confidence, entropy or learned, each with "
    ",key=value options (docs/controllers.md)."
)
Controller = Annotated[
    str | None, model_option(CONTROLLER_HELP, callback=check_controller, show_default="cost")
]
Dtype = Annotated[
    str, model_option("Compute dtype: auto, float64, float32, bfloat16 or float16.", callback=check_dtype)
]
Device = Annotated[str, model_option("Device: auto, cpu or cuda[:N].", callback=check_device)]
Quantize = Annotated[
    str | None,
    model_option("int8 or int4: store the target's weights in 8 or 4 bits.", callback=check_quantization),
]
DrafterQuantize = Annotated[
    str | None,
    model_option(
        "int8 or int4: store the draft model's weights in 8 or 4 bits.", callback=check_quantization
    ),
]
Runtime = Annotated[
    str,
    model_option(
        "Implementation of the target: native (CPU kernels), fused (torch), graphs (CUDA graphs), transformers (the "
        "unmodified module), or auto, the first that runs the model.",
        callback=check_runtime,
    ),
]
ShareHistory = Annotated[
    bool,
    model_option(
        "Let the drafter suffix draft from recent outputs of other prompts, too.", "--share-history"
    ),
]
Threads = Annotated[
    int | None,
    model_option("Number of CPU threads.", "--threads", show_default="PyTorch's default"),
]
ChatTemplate = Annotated[
    Path | None,
    output_option("Jinja file in place of the tokenizer's chat template.", show_default="none"),
]
Temperature = Annotated[float, sampling_option("0 is greedy, 1 the model's own distribution.")]
TopK = Annotated[int, sampling_option("Keep the K most probable tokens; 0 keeps all.")]
TopP = Annotated[
    float, sampling_option("Keep the most probable tokens, up to this total probability; 1 keeps all.")
]
MinP = Annotated[
    float,
    sampling_option("Keep tokens with at least this share of the top token's probability; 0 keeps all."),
]
RepetitionPenalty = Annotated[float, sampling_option("Above 1: avoid tokens of prompt and output.")]
Stop = Annotated[
    list[str] | None,
    sampling_option("End before this string, taken as it is (a line break in bash: $'\\n'); repeatable."),
]
RequestSeed = Annotated[
    int | None,
    sampling_option(
        "Reproducible text; with verifier auto or coupled the same with any drafter (docs/runtimes.md, Identical text).",
        show_default="fresh each time",
    ),
]
DraftLength = Annotated[
    int | None,
    sampling_option(
        "Draft this many tokens before each target pass, in place of the controller's choice; 0 is plain decoding.",
        show_default="the controller decides",
    ),
]
Json = Annotated[bool, output_option("Print JSON only.", "--json")]

DRAFTER_SPECIFIC_SETTINGS = ("controller", "drafter_quantize", "share_history")
"""Settings that are specific to a drafter and may be unsuitable or invalid for another."""
MEASUREMENTS = "measurements"


def load_settings_and_tuned(context: Context, config: Path | None) -> tuple[dict[str, Any], TuningRecord]:
    """Return keyword arguments for `load`, and the measurements stored in the file.

    Values given on the command line take precedence over keys of the file, and those over the
    options' defaults. The measurements are empty without a file and for another drafter than the
    file's.

    Args:
        context: Typer context of a command whose parameters are named like those of `load`. Where
            the command lacks a parameter, the file's value is still returned.
        config: the file of `--config`.

    Raises:
        BadInputError: the file is invalid, or belongs to another model or to other weights.
        CheckpointError: the file's model, whose weights are compared, is not found.
    """
    from secondguess.configuration import LoadSettings, TuningRecord

    names = [name for name in LoadSettings.model_fields if name in context.params]
    settings, tuned = {name: context.params[name] for name in names}, TuningRecord()
    if config is not None:
        given = {name: value for name, value in settings.items() if is_given(context, name)}
        configuration = _read_config(config, given.get("model"))
        left_out = _inapplicable_settings(given, configuration)
        if left_out:
            chosen_for = configuration.load.drafter or "the model's own drafter"
            print_note(
                f"{config}: not using its {', '.join(left_out)}, chosen for {chosen_for}, with {given['drafter']}"
            )
        keys = {name: value for name, value in configuration.load.given().items() if name not in left_out}
        settings |= keys | given
        tuned = tuned if MEASUREMENTS in left_out else configuration.tuned
    return {name: value for name, value in settings.items() if value is not None}, tuned


def refuse_unused(context: Context, settings: Mapping[str, Any], requests: Iterable[SamplingParams]) -> None:
    """Refuse given options that take effect only together with another one.

    Args:
        context: context of a command that generates.
        settings: keyword arguments for `load`.
        requests: settings of all requests. A prediction and a grammar are drafted from without a drafter.

    Raises:
        BadInputError: the message names both options.
    """
    from secondguess.drafters.spec import DrafterSpec

    if is_given(context, "history") and not settings.get("share_history"):
        got = "--history" if context.params["history"] else "--no-history"
        raise BadInputError(f"expected --share-history together with {got}, got {got} alone")
    never_drafts = "drafter" in settings and DrafterSpec.parse(settings["drafter"]).never_drafts
    if never_drafts and not any(each.prediction or each.grammar for each in requests):
        for name in ("draft_length", "max_draft_length"):
            if context.params.get(name):
                option = f"--{name.replace('_', '-')} {context.params[name]}"
                raise BadInputError(
                    f"expected a drafter that drafts together with {option}, got --drafter {settings['drafter']}; "
                    "leave one of them out"
                )


def settings_of(context: Context, kind: type[SettingsT], **more: object) -> SettingsT:
    """Return the settings that a command's parameters of the same names give, and `more`.

    Lists become tuples. A parameter that is None, or an empty list, leaves the default.
    """
    given = {name: context.params.get(name) for name in kind.model_fields} | more
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    try:
        return kind(**{name: value for name, value in (given | lists).items() if value not in (None, ())})
    except BadInputError as error:
        message = str(error)
        for parameter in context.command.params:  # some options are named otherwise than their setting
            message = re.sub(
                rf"\bexpected {parameter.name}(\.\d+)? to", f"expected {parameter.opts[0]} to", message
            )
        raise BadInputError(message) from None


def is_given(context: Context, name: str) -> bool:
    """Return whether an option was given explicitly, even with its default value."""
    source = context.get_parameter_source(name)
    return source is not None and not source.name.startswith("DEFAULT")


def _read_config(config: Path, model: str | None) -> Configuration:
    """Read the file of `--config`; its model must be `model`, unless that is None."""
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
