"""Engine-independent recommendations and the interface of export engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from secondguess.builtin import builtin_paths
from secondguess.checkpoint.resolve import is_gguf
from secondguess.configuration import LoadSettings, TuningRecord
from secondguess.controllers.fixed import FixedController, FixedOptions
from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.drafters.spec import DrafterSpec, PartSpec
from secondguess.errors import BadInputError
from secondguess.heads.files import CONFIG
from secondguess.names import parse_name
from secondguess.pairing import default_drafter, require_model_to_quantize, resolve_drafter

NOT_EXPORTED = ("verifier", "controller", "device", "runtime", "share_history")
"""Settings of `load` that each engine has in its own way, or not at all."""


@dataclass(frozen=True)
class Recommendation:
    """Target, drafter and draft length, independent of the engine.

    Args:
        model: directory or name of the target; never `builtin`, which other engines cannot
            resolve.
        drafter: the drafter; kind `none` for plain decoding. Of joined drafters the preferred part.
        others: the other parts of joined drafters, for engines without the preferred one.
        joined: name of joined drafters.
        draft_length: number of tokens drafted in every round; 0 with `none`.
        dtype: compute dtype; None for the engine's default.
        quantize, drafter_quantize: `int8`, `int4` or None.
        notes: remarks on the origin of the values and on settings that are left out.

    Raises:
        BadInputError: a draft length out of range, or a model name with unprintable characters.
    """

    model: str
    drafter: PartSpec
    draft_length: int
    others: tuple[PartSpec, ...] = ()
    joined: str = ""
    dtype: str | None = None
    quantize: str | None = None
    drafter_quantize: str | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        low = 0 if self.drafter.never_drafts else 1
        high = MAX_DRAFT_LENGTH if low else 0
        if not low <= self.draft_length <= high:
            raise BadInputError(
                f"expected a draft length from {low} to {high} for the drafter {self.drafter.name}, "
                f"got {self.draft_length}"
            )
        for name in (self.model, self.drafter.draft_model or ""):
            # Names are written into comments and command lines.
            if not name.isprintable():
                raise BadInputError(f"expected a model's name or path in printable characters, got {name!r}")


@dataclass(frozen=True)
class ExportResult:
    """Configuration of an engine and remarks on it.

    Args:
        text: command lines.
        notes: remarks for the reader, such as differences from secondguess, one sentence each.
    """

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DrafterExport:
    """Settings with which an engine drafts like one kind of drafter.

    Args:
        settings: value by the engine's name of the setting. A function is called with the
            recommendation; settings that are None then are left out.
        options: drafter options that the settings cover.
        notes: differences from secondguess.
        longest: returns how many tokens the drafter of a recommendation drafts at most; None if that is unknown.
    """

    settings: Mapping[str, object] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    longest: Callable[[Recommendation], int | None] = lambda recommendation: None

    def values(self, recommendation: Recommendation) -> dict[str, object]:
        """Return the settings for a recommendation."""
        values = {
            name: value(recommendation) if callable(value) else value for name, value in self.settings.items()
        }
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class ExportTarget:
    """Engine that recommendations can be exported to.

    Args:
        title: name of the engine in prose.
        drafters: exports by drafter kind; other kinds are rejected.
        write: writes the configuration from a recommendation and the settings of its drafter.
        dtypes: dtypes that the engine supports.
        notes: differences from secondguess that apply to every drafter.
        quantized: advice on quantised weights; empty if the configuration covers them.
        gguf: advice on GGUF files; empty if the engine needs nothing more for them.
        longest_draft: maximum draft length.
    """

    title: str
    drafters: Mapping[str, DrafterExport]
    write: Callable[[Recommendation, dict[str, object]], str]
    dtypes: tuple[str, ...]
    notes: tuple[str, ...]
    quantized: str = ""
    gguf: str = ""
    longest_draft: int = MAX_DRAFT_LENGTH

    def export(self, recommendation: Recommendation) -> ExportResult:
        """Return the configuration of this engine for a recommendation.

        Raises:
            BadInputError: the engine does not support the drafter, the draft length or the dtype.
        """
        parts = (recommendation.drafter, *recommendation.others)
        drafter = next((part for part in parts if part.kind in self.drafters), recommendation.drafter)
        recommendation = replace(recommendation, drafter=drafter)
        if drafter.kind not in self.drafters:
            raise BadInputError(
                f"expected a drafter that {self.title} has ({', '.join(self.drafters)}), got {drafter.name}; "
                "choose one of these with --drafter"
            )
        chosen, notes = self.drafters[drafter.kind], []
        longest = chosen.longest(recommendation)
        if longest is not None and recommendation.draft_length > longest:
            notes.append(f"draft length {longest}, because {drafter.name} drafts no more than that")
            recommendation = replace(recommendation, draft_length=longest)
        if recommendation.draft_length > self.longest_draft:
            raise BadInputError(
                f"expected a draft length of at most {self.longest_draft} for {self.title}, "
                f"got {recommendation.draft_length}; give --draft-length"
            )
        if recommendation.dtype is not None and recommendation.dtype not in self.dtypes:
            raise BadInputError(
                f"expected a dtype that {self.title} has ({', '.join(self.dtypes)}), got {recommendation.dtype}; "
                "choose one of these with --dtype"
            )
        text = self.write(recommendation, chosen.values(recommendation))
        if recommendation.joined:
            notes.append(
                f"no other engine combines drafters as {recommendation.joined} does: this is {drafter.name} alone"
            )
        notes += [
            f"{self.title} has nothing like {key}={value} of the drafter {drafter.kind}: left out"
            for key, value in drafter.name.options.items()
            if key not in chosen.options
        ]
        draft_format = None if drafter.draft_model is None else recommendation.drafter_quantize
        quantized = {"target": recommendation.quantize, "draft model": draft_format}
        notes += [
            f"{quantize} of the {whose} is left out: {self.quantized}"
            for whose, quantize in quantized.items()
            if quantize is not None and self.quantized
        ]
        if self.gguf and any(is_gguf(name) for name in (recommendation.model, drafter.draft_model or "")):
            notes.append(self.gguf)
        on_speculation = () if drafter.never_drafts else self.notes
        return ExportResult(text, (*recommendation.notes, *notes, *chosen.notes, *on_speculation))


def draft_length(recommendation: Recommendation) -> int:
    """Return the draft length."""
    return recommendation.draft_length


def draft_model(recommendation: Recommendation) -> str | None:
    """Return the folder of the draft model or trained head, if the name gives one."""
    return recommendation.drafter.draft_model or recommendation.drafter.trained


def head_folder(recommendation: Recommendation) -> str:
    """Return the folder of the trained head.

    Raises:
        BadInputError: the drafter's name gives none.
    """
    drafter = recommendation.drafter
    if drafter.trained is None:
        raise BadInputError(
            f"expected the folder of a trained drafter to export, as in {drafter.kind}:PATH, got {drafter.name}"
        )
    return drafter.trained


def of_head(read: Callable[[Path], int]) -> Callable[[Recommendation], int | None]:
    """Return a function to what `read` reads from the folder of the trained head; None where there is no such folder.

    Another machine may have it.
    """

    def read_folder(recommendation: Recommendation) -> int | None:
        folder = Path(head_folder(recommendation))
        return read(folder) if (folder / CONFIG).is_file() else None

    return read_folder


def option(name: str, default: float | None = None) -> Callable[[Recommendation], float | None]:
    """Return a function to the value of a drafter option, or to a default for drafters without it."""
    return lambda recommendation: recommendation.drafter.options.get(name, default)


def recommend(
    settings: LoadSettings, tuned: TuningRecord | None = None, draft_length: int | None = None
) -> Recommendation:
    """Make a recommendation from the arguments of `load`.

    Args:
        settings: arguments of `load`; names are validated as far as they are exported.
        tuned: measurements made with these settings.
        draft_length: constant draft length. If None: that of a controller `fixed:K`, else the best
            measured one, else the default of `fixed`.

    Raises:
        BadInputError: an unknown drafter, an invalid draft length, or an option without effect.
    """
    name = settings.drafter or default_drafter(settings.model)  # other engines have no copy of the target
    spec = resolve_drafter(name)
    require_model_to_quantize(settings.drafter_quantize, name, spec.draft_model is not None)
    length, notes = _draft_length(settings, tuned or TuningRecord(), draft_length, spec)
    notes += _unexported_settings_note(settings)
    joined = spec.name if len(spec.parts) > 1 else ""
    # Trained drafters are preferred: they can draft anywhere, look-ups only repeated text.
    drafter, *others = sorted(spec.parts, key=lambda part: not (part.draft_model or part.trained))
    if length == 0 and not drafter.never_drafts:
        notes.insert(0, f"a draft length of 0 is plain decoding: no {drafter.kind} drafter is asked for")
        (drafter,), others, joined = resolve_drafter("none").parts, [], ""
    if drafter.draft_model is not None:
        required = replace(drafter.required, draft_model=_resolve_builtin(drafter.draft_model))
        drafter = replace(drafter, required=required)
    return Recommendation(
        model=_resolve_builtin(settings.model),
        drafter=drafter,
        draft_length=length,
        others=tuple(others),
        joined=joined,
        dtype=None if settings.dtype == "auto" else settings.dtype,
        quantize=settings.quantize,
        drafter_quantize=settings.drafter_quantize if drafter.draft_model is not None else None,
        notes=tuple(notes),
    )


def _draft_length(
    settings: LoadSettings, tuned: TuningRecord, asked: int | None, drafter: DrafterSpec
) -> tuple[int, list[str]]:
    """Return the draft length, and notes on its origin."""
    if asked is not None:
        return asked, []
    if drafter.never_drafts:
        return 0, []
    controller = settings.controller or ""
    if controller.partition(":")[0] == "fixed":
        return FixedController.build(parse_name(controller, "controller", ["fixed"])).options.length, []
    if tuned.draft_length is not None:
        where = f" on {tuned.processor}" if tuned.processor else ""
        return tuned.draft_length, [
            f"draft length {tuned.draft_length} was the best constant one for secondguess{where}; "
            "other engines draft and verify at other costs, so try its neighbours"
        ]
    length = FixedOptions().length
    return length, [
        f"draft length {length} is a default, nothing was measured: `secondguess tune` measures, "
        "--draft-length sets it"
    ]


def _unexported_settings_note(settings: LoadSettings) -> list[str]:
    """Return a note on the given settings that cannot be exported, as a list of at most one."""
    values = {name: getattr(settings, name) for name in NOT_EXPORTED}
    asked = [
        f"{name} {value}"
        for name, value in values.items()
        if value not in (None, "auto", False) and not (name == "controller" and value.startswith("fixed"))
    ]
    return [f"left out, because each engine has its own: {', '.join(asked)}"] if asked else []


def _resolve_builtin(model: str) -> str:
    """Return the directory of a built-in model, or any other name unchanged.

    Other engines cannot resolve the names of built-in models.
    """
    target, drafter = ("builtin", "builtin-draft")
    if model in (target, drafter):
        return str(builtin_paths()[model == drafter])
    return model
