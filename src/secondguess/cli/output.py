"""How results look: coloured text for people, one JSON object per line for machines."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rich.console import Console

if TYPE_CHECKING:
    from secondguess.api import LLM, Output
    from secondguess.core import TokenLogprob
    from secondguess.text import Piece

PROMPT_STYLE, DRAFTED_STYLE, TARGET_STYLE, ASIDE_STYLE = "dim", "green", "bright_blue", "dim"

# What a model writes must not steer the terminal: control characters are shown, not obeyed.
_SHOWN = {code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}

Pieces: TypeAlias = "Sequence[tuple[int, Piece]]"


class Writer(Protocol):
    """Shows batches of prompts, one after the other."""

    def begin(self, prompts: Sequence[str]) -> None:
        """A batch starts."""

    def show(self, pieces: Pieces) -> None:
        """Prompts gained text, each named by its place in the batch."""

    def end(self, outputs: Sequence[Output]) -> None:
        """The batch is over, or was interrupted."""


class JsonWriter:
    """One object per prompt and line, nothing else."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def begin(self, prompts: Sequence[str]) -> None:
        pass

    def show(self, pieces: Pieces) -> None:
        pass

    def end(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            print_json(describe_output(self._llm, output))


class TerminalWriter:
    """Prompt and text, each token coloured by who wrote it (on a terminal), then one line of figures.

    The first prompt of a batch streams; the text of the others is held until its turn.
    """

    def __init__(self, llm: LLM) -> None:
        self._console = Console(highlight=False)
        # Rich may be told that a terminal is none; it would still obey what is written to it.
        self._for_terminal = self._console.is_terminal or sys.stdout.isatty()
        self._coloured = self._console.is_terminal and not self._console.no_color
        self._any_shown = False
        self._prompts: list[str] = []
        self._held: list[list[Piece]] = []
        aside(describe_team(llm))
        if self._coloured:
            self._console.print(
                f"[{DRAFTED_STYLE}]guessed by the drafter and accepted[/]  "
                f"[{TARGET_STYLE}]written by the target[/]\n"
            )

    def begin(self, prompts: Sequence[str]) -> None:
        self._prompts = list(prompts)
        self._held = [[] for _ in prompts]
        self._write_prompt(prompts[0])

    def show(self, pieces: Pieces) -> None:
        for place, piece in pieces:
            if place == 0:
                self._write_piece(piece)
            else:
                self._held[place].append(piece)

    def end(self, outputs: Sequence[Output]) -> None:
        for place, output in enumerate(outputs):
            if place > 0:
                self._write_prompt(self._prompts[place])
            for piece in self._held[place]:
                self._write_piece(piece)
            interrupted = "interrupted: " if output.finish_reason is None else ""
            self._write(f"\n\n{interrupted}{output.stats}\n", ASIDE_STYLE)

    def _write_prompt(self, prompt: str) -> None:
        if self._any_shown:
            self._write("\n", ASIDE_STYLE)
        self._any_shown = True
        self._write(prompt, PROMPT_STYLE)

    def _write_piece(self, piece: Piece) -> None:
        for text, drafted in piece.segments:
            self._write(text, DRAFTED_STYLE if drafted else TARGET_STYLE)

    def _write(self, text: str, style: str) -> None:
        shown = text.translate(_SHOWN) if self._for_terminal else text
        if self._coloured:
            self._console.out(shown, style=style, end="")
        else:
            sys.stdout.write(shown)
        sys.stdout.flush()


def aside(line: str) -> None:
    """One dim line on standard error: of interest, but not the result."""
    Console(stderr=True, highlight=False).print(line, style=ASIDE_STYLE, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    """One line of JSON; a number that JSON cannot write becomes null."""
    print(json.dumps(_finite(value), allow_nan=False), flush=True)


def describe_team(llm: LLM) -> str:
    """Who takes part and what was picked for them, in one line."""
    target = llm.target
    return (
        f"{target.name} ({target.dtype} on {target.runtime.device}), drafter {llm.drafter.name}, "
        f"verifier {llm.verifier.name}, controller {llm.controller.name}"
    )


def describe_output(llm: LLM, output: Output) -> dict[str, object]:
    """What `--json` prints for one prompt."""
    record: dict[str, object] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "exactness": str(output.exactness),
        "model": llm.target.name,
        "drafter": llm.drafter.name,
        "verifier": llm.verifier.name,
        "controller": llm.controller.name,
        "dtype": llm.target.dtype,
        "stats": output.stats.as_dict(),
    }
    if output.logprobs:
        record["logprobs"] = [_describe_logprob(each) for each in output.logprobs]
    return record


def _describe_logprob(each: TokenLogprob) -> dict[str, object]:
    alternatives = [{"token": token, "logprob": value} for token, value in each.alternatives.items()]
    return {"token": each.token, "logprob": each.logprob, "alternatives": alternatives}


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
