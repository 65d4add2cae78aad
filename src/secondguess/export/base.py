"""Engine-independent recommendations, and the tables that write them for an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from secondguess.builtin import builtin_paths
from secondguess.checkpoint.resolve import is_gguf
from secondguess.configuration import LoadSettings, TuningRecord
from secondguess.controllers.fixed import FixedController, FixedOptions
from secondguess.core import MAX_DRAFT_LENGTH
from secondguess.drafters.spec import DrafterSpec, PartSpec
from secondguess.errors import BadInputError
from secondguess.heads.eagle import holds_eagle3
from secondguess.heads.files import CONFIG
from secondguess.names import parse_name
from secondguess.pairing import default_drafter, require_model_to_quantize, resolve_drafter

NOT_EXPORTED = ("verifier", "controller", "device", "runtime", "share_history")
"""Settings of `load` that each engine has in its own way, or not at all."""


@dataclass(frozen=True)
class Recommendation:
    """Target, drafter and draft length, independent of the engine."""

    model: str  # directory or name, never `builtin`, which other engines cannot resolve
    drafter: PartSpec  # kind `none` for plain decoding; of joined drafters the preferred part
    draft_length: int  # tokens drafted in every round; 0 with `none`
    others: tuple[PartSpec, ...] = ()  # parts of joined drafters, for engines without the preferred one
    joined: str = ""  # name of joined drafters
    dtype: str | None = None  # for computing; None for the engine's default
    quantize: str | None = None  # int8, int4 or None
    drafter_quantize: str | None = None
    notes: tuple[str, ...] = ()  # on the origin of values and on settings that are left out

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
    """Command lines for an engine, and notes for the reader, such as differences from secondguess."""

    text: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class DrafterExport:
    """Settings with which an engine drafts like one kind of drafter.

    Args:
        template: names of the engine's settings, each followed by its value. A value may end with a field: one of
            `FIELDS`, or an option of the drafter. Settings whose field is None are left out.
        notes: differences from secondguess.
        longest: returns how many tokens the head in a folder drafts at most.
    """

    template: str = ""
    notes: tuple[str, ...] = ()
    longest: Callable[[Path], int] | None = None

    def settings(self, recommendation: Recommendation) -> dict[str, object]:
        """Return the values by name for a recommendation."""
        words = self.template.split()
        values = {
            name: _fill(value, recommendation) for name, value in zip(words[::2], words[1::2], strict=True)
        }
        return {name: value for name, value in values.items() if value is not None}


def _fill(value: str, recommendation: Recommendation) -> object:
    """Return a value of a template with its field replaced."""
    text, _, field = value.removesuffix("}").partition("{")
    if not field:
        return text
    read = FIELDS.get(field)
    found = recommendation.drafter.options.get(field) if read is None else read(recommendation)
    return f"{text}{found}" if text else found


def head_folder(recommendation: Recommendation) -> str:
    """Return the folder of the trained head; a name without one raises a BadInputError."""
    drafter = recommendation.drafter
    if drafter.trained is None:
        raise BadInputError(
            f"expected the folder of a trained drafter to export, as in {drafter.kind}:PATH, got {drafter.name}"
        )
    return drafter.trained


def _read_head(recommendation: Recommendation, read: Callable[[Path], int]) -> int | None:
    """Return what is read from the folder of the trained head; None where only another machine has the folder."""
    folder = Path(head_folder(recommendation))
    return read(folder) if (folder / CONFIG).is_file() else None


FIELDS: Mapping[str, Callable[[Recommendation], object]] = {
    "length": lambda recommendation: recommendation.draft_length,
    "length_and_pending": lambda recommendation: recommendation.draft_length + 1,
    "model": lambda recommendation: recommendation.drafter.draft_model or recommendation.drafter.trained,
    "head": head_folder,
    "version": lambda recommendation: "" if _read_head(recommendation, holds_eagle3) is False else "3",
}
"""Fields of templates. The version of EAGLE is the third if the folder is not here."""


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
        """Return the configuration of this engine; what it does not support raises a BadInputError."""
        parts = (recommendation.drafter, *recommendation.others)
        drafter = next((part for part in parts if part.kind in self.drafters), recommendation.drafter)
        if drafter.kind not in self.drafters:
            raise BadInputError(
                f"expected a drafter that {self.title} has ({', '.join(self.drafters)}), got {drafter.name}; "
                "choose one of these with --drafter"
            )
        recommendation, chosen = replace(recommendation, drafter=drafter), self.drafters[drafter.kind]
        recommendation, notes = _with_possible_length(recommendation, chosen)
        self._check(recommendation)
        text = self.write(recommendation, chosen.settings(recommendation))
        if recommendation.joined:
            notes.append(
                f"no other engine combines drafters as {recommendation.joined} does: this is {drafter.name} alone"
            )
        notes += [
            f"{self.title} has nothing like {key}={value} of the drafter {drafter.kind}: left out"
            for key, value in drafter.name.options.items()
            if f"{{{key}}}" not in chosen.template
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

    def _check(self, recommendation: Recommendation) -> None:
        """Refuse a draft length or a dtype that the engine does not support."""
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


def _with_possible_length(
    recommendation: Recommendation, chosen: DrafterExport
) -> tuple[Recommendation, list[str]]:
    """Return the recommendation with a draft length that its head can draft, and a note if that is another one."""
    longest = None if chosen.longest is None else _read_head(recommendation, chosen.longest)
    if longest is None or recommendation.draft_length <= longest:
        return recommendation, []
    note = f"draft length {longest}, because {recommendation.drafter.name} drafts no more than that"
    return replace(recommendation, draft_length=longest), [note]


def recommend(
    settings: LoadSettings, tuned: TuningRecord | None = None, draft_length: int | None = None
) -> Recommendation:
    """Make a recommendation from the arguments of `load`, and measurements made with them.

    Names are validated as far as they are exported. Without a draft length it is that of a controller `fixed:K`,
    else the best measured one, else the default of `fixed`.
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
    """Return the directory of a built-in model, whose name other engines cannot resolve, or any other name unchanged."""
    names = ("builtin", "builtin-draft")
    return str(builtin_paths()[names.index(model)]) if model in names else model
