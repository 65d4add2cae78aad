"""Output formats: coloured text, or one JSON object per line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console

if TYPE_CHECKING:
    from secondguess.api import LLM, Output
    from secondguess.cli.prompts import Request
    from secondguess.core import FinishReason, TokenLogprob
    from secondguess.sampling.text import Piece

PROMPT_STYLE, DRAFTED_STYLE, TARGET_STYLE, NOTE_STYLE = "dim", "green", "bright_blue", "dim"

# Control characters in model output are escaped, so that they cannot affect the terminal.
_CONTROL_ESCAPES = {
    code: repr(chr(code))[1:-1] for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"
}

FINISH_PREFIXES: dict[FinishReason | None, str] = {
    None: "interrupted: ",
    "context": "context full: ",
    "grammar": "grammar left no token: ",
}
"""Prefix of the closing line, by finish reason."""

Pieces: TypeAlias = "Sequence[tuple[int, Piece]]"


class JsonWriter:
    """Writer of one JSON object per sample, each on its own line.

    Batches come in order, with one index per sample: a request with several samples has several indices.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._requests: list[Request] = []

    def begin(self, requests: Sequence[Request]) -> None:
        """Start a batch."""
        self._requests = list(requests)

    def show(self, pieces: Pieces) -> None:
        """Show new text as pairs of (index in the batch, piece)."""

    def end(self, outputs: Sequence[Output]) -> None:
        """Finish a batch that is complete or was interrupted."""
        for request, output in zip(self._requests, outputs, strict=True):
            print_json(describe_output(self._llm, output) | dict(request.metadata))


class TerminalWriter:
    """Writer of prompt and text, and of one line of statistics per sample to standard error.

    On a terminal, each token is coloured by origin (drafter or target). The first text of a batch
    is streamed; the others are buffered and shown when the batch ends.
    """

    def __init__(self, llm: LLM) -> None:
        self._console = Console(highlight=False)
        # Rich can be configured to ignore a terminal, which still interprets control characters.
        self._for_terminal = self._console.is_terminal or sys.stdout.isatty()
        self._coloured = self._console.is_terminal and not self._console.no_color
        self._any_shown = False
        self._prompts: list[str] = []
        self._buffered: list[list[Piece]] = []
        print_note(describe_components(llm))
        if self._coloured:
            self._console.print(
                f"[{DRAFTED_STYLE}]drafted and accepted[/]  [{TARGET_STYLE}]sampled from the target[/]\n"
            )

    def begin(self, requests: Sequence[Request]) -> None:
        self._prompts = [request.shown for request in requests]
        self._buffered = [[] for _ in requests]
        self._write_prompt(self._prompts[0])

    def show(self, pieces: Pieces) -> None:
        for index, piece in pieces:
            if index == 0:
                self._write_piece(piece)
            else:
                self._buffered[index].append(piece)

    def end(self, outputs: Sequence[Output]) -> None:
        several = any(output.index > 0 for output in outputs)
        for index, output in enumerate(outputs):
            if index > 0:
                self._write_prompt(self._prompts[index])
            for piece in self._buffered[index]:
                self._write_piece(piece)
            sample = f"sample {output.index + 1}: " if several else ""
            ending = FINISH_PREFIXES.get(output.finish_reason, "")
            self._write("\n", NOTE_STYLE)
            print_note(f"\n{sample}{ending}{output.stats}")

    def _write_prompt(self, prompt: str) -> None:
        if self._any_shown:
            self._write("\n", NOTE_STYLE)
        self._any_shown = True
        self._write(prompt, PROMPT_STYLE)

    def _write_piece(self, piece: Piece) -> None:
        for text, drafted in piece.segments:
            self._write(text, DRAFTED_STYLE if drafted else TARGET_STYLE)

    def _write(self, text: str, style: str) -> None:
        shown = text.translate(_CONTROL_ESCAPES) if self._for_terminal else text
        if self._coloured:
            self._console.out(shown, style=style, end="")
        else:
            sys.stdout.write(shown)
        sys.stdout.flush()


Writer: TypeAlias = JsonWriter | TerminalWriter


def print_note(line: str) -> None:
    """Print one dim line of secondary information to standard error."""
    Console(stderr=True, highlight=False).print(line, style=NOTE_STYLE, markup=False, soft_wrap=True)


def print_json(value: object) -> None:
    """Print a value as one line of JSON, with null for NaN and infinities."""
    print(json.dumps(_finite(value), allow_nan=False), flush=True)


def describe_components(llm: LLM) -> str:
    """Return target, dtype, device, runtime, drafter, verifier and controller in one line."""
    target = llm.target
    return (
        f"{target.name} ({target.dtype} on {target.device}, runtime {target.runtime_description}), "
        f"drafter {llm.drafter.name}, verifier {llm.verifier.name}, controller {llm.controller.name}"
    )


def describe_output(llm: LLM, output: Output) -> dict[str, object]:
    """Return the JSON record of one sample for `--json`."""
    record: dict[str, object] = {
        "text": output.text,
        "index": output.index,
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
    for name in ("logprobs", "prompt_logprobs"):
        if logprobs := getattr(output, name):
            record[name] = [_describe_logprob(token) for token in logprobs]
    return record


def _describe_logprob(logprob: TokenLogprob) -> dict[str, object]:
    alternatives = [
        {"token": token, "text": logprob.alternative_texts[token], "logprob": value}
        for token, value in logprob.alternatives.items()
    ]
    return {
        "token": logprob.token,
        "text": logprob.text,
        "logprob": logprob.logprob,
        "alternatives": alternatives,
    }


def _finite(value: object) -> object:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
