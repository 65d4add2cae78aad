"""Options shared by several commands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context

from secondguess.cli.option_groups import Group, is_given, option, panel
from secondguess.cli.output import print_note
from secondguess.errors import BadInputError
from secondguess.names import AUTO

if TYPE_CHECKING:
    from secondguess.configuration import Configuration, TuningRecord
    from secondguess.params import SamplingParams

DRAFTER_NAMES = (
    "none, model:PATH, ngram, suffix, grid, jacobi, self:int4, early-exit:K, early-exit[:PATH], layer-skip:PATH, "
    "medusa[:PATH], mtp[:PATH], eagle[:PATH], dspark[:PATH] or gemma4-assistant:PATH"
)
"""Drafter names for `--help`; a literal because importing the drafters would import torch."""


def validate_with(check_name: str) -> Callable[[Any], Any]:
    """Return an option callback that passes every value to `module:function`, which needs no slow import."""

    def callback(value: Any) -> Any:
        module, _, function = check_name.partition(":")
        check = getattr(import_module(module), function)
        for name in [value] if isinstance(value, str) else value or ():
            check(name)
        return value

    return callback


check_model = validate_with("secondguess.checkpoint.resolve:find_checkpoint")
check_drafter = validate_with("secondguess.drafters:parse_drafter_name")


def check_drafters(names: list[str] | None) -> list[str] | None:
    """Check the names of drafters, among which `auto` stands for the default one."""
    check_drafter([name for name in names or () if name != AUTO])
    return names


def download_all(context: Context, names: list[str] | None) -> list[str] | None:
    """Download repositories; called before the other options are checked."""
    if context.resilient_parsing:  # completion in a shell
        return names
    from secondguess.checkpoint.resolve import download

    for name in names or ():
        download(name)
    return names


def check_default_drafter(value: str | None) -> str | None:
    """Check the name of a drafter; `auto` is the same as none."""
    return None if value == AUTO else check_drafter(value)


check_verifier = validate_with("secondguess.verifiers:check_verifier_name")
check_controller = validate_with("secondguess.controllers:parse_controller_name")
check_dtype = validate_with("secondguess.checkpoint.resolve:check_dtype")
check_device = validate_with("secondguess.checkpoint.resolve:check_device")
check_quantization = validate_with("secondguess.checkpoint.resolve:check_quantization")
check_runtime = validate_with("secondguess.checkpoint.resolve:check_runtime")
check_engine = validate_with("secondguess.export:check_engine")


model_option, output_option = panel("Models and decoding"), panel("Input and output")

Config = Annotated[
    Path | None,
    model_option(
        "A secondguess.toml, as tune writes it; options given here take precedence.",
        metavar="FILE",
        show_default="none",
    ),
]
Download = Annotated[
    list[str] | None,
    model_option(
        "Repository of the Hugging Face Hub, or REPOSITORY/FILE.gguf, to download first; nothing else is. Repeatable.",
        metavar="REPOSITORY",
        callback=download_all,
        is_eager=True,
        show_default="none",
    ),
]
MODEL_NAMES = "Target model: a directory, a GGUF file, the name of a model in the Hugging Face cache, or builtin (a toy model)."
Model = Annotated[str, model_option(MODEL_NAMES, callback=check_model)]
DRAFTER_HELP = (
    f"Drafter, which proposes tokens: {DRAFTER_NAMES}; each with ,key=value options; several joined by + are combined "
    "(docs/drafters.md)."
)
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
template_option = output_option("Jinja file in place of the tokenizer's chat template.", show_default="none")
Json = Annotated[bool, output_option("Print JSON only.", "--json")]

DRAFTER_SPECIFIC_SETTINGS = ("controller", "drafter_quantize", "share_history")
"""Settings that are specific to a drafter and may be unsuitable or invalid for another."""
MEASUREMENTS = "measurements"


class Loading:
    """Options of a command for `load`, with the file of `--config`, which is read when they are asked for.

    Values given on the command line take precedence over keys of the file, and those over the options' defaults. Where
    the command lacks an option, the file's value is still used. The measurements of the file are left out for another
    drafter than the file's.
    """

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def settings(self) -> dict[str, Any]:
        """Keyword arguments for `load`; a file that is invalid, or of another model or other weights, is refused."""
        return self._settings_and_tuned[0]

    @property
    def tuned(self) -> TuningRecord:
        """Measurements stored in the file; empty without one."""
        return self._settings_and_tuned[1]

    @cached_property
    def _settings_and_tuned(self) -> tuple[dict[str, Any], TuningRecord]:
        from secondguess.configuration import LoadSettings, TuningRecord

        given = self._context.params
        settings = {name: given[name] for name in LoadSettings.model_fields if name in given}
        tuned, config = TuningRecord(), given["config"]
        if config is not None:
            explicit = {name: value for name, value in settings.items() if is_given(self._context, name)}
            configuration = _read_config(config, explicit.get("model"))
            left_out = _inapplicable_settings(explicit, configuration)
            if left_out:
                chosen_for = configuration.load.drafter or "the model's own drafter"
                print_note(
                    f"{config}: not using its {', '.join(left_out)}, chosen for {chosen_for}, with {explicit['drafter']}"
                )
            keys = {name: value for name, value in configuration.load.given().items() if name not in left_out}
            settings |= keys | explicit
            tuned = tuned if MEASUREMENTS in left_out else configuration.tuned
        return {name: value for name, value in settings.items() if value is not None}, tuned

    def require_use_of(self, requests: Iterable[SamplingParams]) -> None:
        """Refuse options of requests that take effect only together with another drafter or with `--share-history`.

        A prediction and a grammar are drafted from without a drafter.
        """
        from secondguess.drafters.spec import DrafterSpec

        given = self._context.params
        if is_given(self._context, "history") and not self.settings.get("share_history"):
            got = "--history" if given["history"] else "--no-history"
            raise BadInputError(f"expected --share-history together with {got}, got {got} alone")
        drafter = self.settings.get("drafter")
        never_drafts = drafter is not None and DrafterSpec.parse(drafter).never_drafts
        if never_drafts and not any(request.prediction or request.grammar for request in requests):
            for name in ("draft_length", "max_draft_length"):
                if given.get(name):
                    raise BadInputError(
                        f"expected a drafter that drafts together with --{name.replace('_', '-')} {given[name]}, "
                        f"got --drafter {drafter}; leave one of them out"
                    )


def model_argument(text: str) -> Any:
    """Return what typer knows about the argument MODEL."""
    return Argument(metavar="MODEL", help=text, callback=check_model, show_default=False)


def drafter_option(default: str) -> Parameter:
    """Return the option `--drafter`; the text describes its default."""
    info = model_option(DRAFTER_HELP, callback=check_default_drafter, show_default=default)
    return option("drafter", Annotated[str | None, info])


def controller_option(default: str) -> Parameter:
    """Return the option `--controller`; the text describes its default."""
    info = model_option(CONTROLLER_HELP, callback=check_controller, show_default=default)
    return option("controller", Annotated[str | None, info])


LOADING = Group(
    (
        option("config", Config),
        option("download", Download),
        option("model", Model, "builtin"),
        drafter_option(
            "suffix+model:builtin-draft for builtin; suffix and a trained drafter found for the model; "
            "suffix+self:int4 where kernels and memory allow; else suffix"
        ),
        option("verifier", Verifier, "auto"),
        controller_option("cost"),
        option("dtype", Dtype, "auto"),
        option("device", Device, "auto"),
        option("quantize", Quantize),
        option("drafter_quantize", DrafterQuantize),
        option("runtime", Runtime, "auto"),
        option("share_history", ShareHistory, False),
    ),
    Loading,
)


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
