"""`secondguess score`: perplexity of texts under a model, and how other weight formats change it."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Argument

from secondguess.cli import options
from secondguess.cli.option_groups import panel
from secondguess.cli.options import model_option
from secondguess.cli.output import print_json, print_note
from secondguess.cli.progress import load_with_progress, progress_bar
from secondguess.cli.prompts import error_source, read_input

text_option = panel("Texts")
DEFAULT_WINDOW = 2048
MANY_CHARACTERS = 5_000_000
"""Length of a text whose tokenization takes seconds."""


def score(
    files: Annotated[
        list[str],
        Argument(metavar="FILE|-", help="Texts in UTF-8; - reads standard input.", show_default=False),
    ],
    window: Annotated[
        int | None,
        text_option(
            "Tokens of a window. A longer text is cut into windows, each of which begins with the last token of the one "
            "before it.",
            show_default=f"{DEFAULT_WINDOW}, or the model's context if that is less",
        ),
    ] = None,
    draft_length: Annotated[
        int | None,
        text_option(
            "Score in passes of this many tokens and one, as drafts of this length are verified; 0 as in plain decoding.",
            show_default="as many as memory allows",
        ),
    ] = None,
    compare: Annotated[
        list[str] | None,
        model_option(
            "int8 or int4: score with the weights in 8 or 4 bits, too, and show what that changes; repeatable.",
            callback=options.check_quantization,
        ),
    ] = None,
    json: options.Json = False,
    *,
    loading: Annotated[
        options.Loading, options.LOADING.only("config", "model", "dtype", "device", "quantize", "runtime")
    ],
) -> int:
    """Show the perplexity of texts under a model.

    Perplexity and bits per byte are those of all tokens but the first of each text.
    With --compare, weights are scored in other formats, too; the change is the mean
    difference of a token's log-probability. --draft-length shows that verification
    computes the same as plain decoding.
    """
    texts = {name: read_input(name) for name in files}
    settings = loading.settings | {"drafter": "none"}
    for name in ("controller", "verifier", "drafter_quantize", "share_history"):
        settings.pop(name, None)
    formats = [settings.pop("quantize", None), *(compare or ())]
    found = [_score_weights({**settings, "quantize": name}, texts, window, draft_length) for name in formats]
    records = [
        own.compared_with(first) for scores in found for own, first in zip(scores, found[0], strict=True)
    ]
    if json:
        print_json(records)
    else:
        print(_table(records))
    return 0


@dataclass(frozen=True)
class WeightScore:
    """Log-probabilities of the tokens of a text, with weights in the format that `runtime` names."""

    text: str
    runtime: str
    num_bytes: int
    logprobs: list[float]
    seconds: float

    def compared_with(self, first: WeightScore) -> dict[str, Any]:
        """Return the figures of the table, with the change from the first format."""
        total, count = math.fsum(self.logprobs), len(self.logprobs)
        changes = [abs(own - other) for own, other in zip(self.logprobs, first.logprobs, strict=True)]
        return {
            "text": self.text,
            "runtime": self.runtime,
            "num_tokens": count,
            "logprob": total,
            "perplexity": math.exp(-total / count),
            "bits_per_byte": -total / math.log(2) / self.num_bytes,
            "mean_change": math.fsum(changes) / count,
            "tokens_per_second": count / self.seconds,
        }


def _score_weights(
    settings: dict[str, Any], texts: Mapping[str, str], window: int | None, draft_length: int | None
) -> list[WeightScore]:
    """Return the scores of each text."""
    llm = load_with_progress(settings)
    from secondguess.engine.text_scores import windows_of

    size = min(DEFAULT_WINDOW, llm.target.runtime.context_length) if window is None else window
    windows = {}
    for name, text in texts.items():
        if len(text) > MANY_CHARACTERS:
            print_note(f"tokenizing {name} ({len(text) / 1e6:.0f} million characters)")
        with error_source(name):
            windows[name] = windows_of(llm.target.encode(text), size)
    num_done, num_windows = 0, sum(map(len, windows.values()))
    scores = []
    with progress_bar("scoring") as show:
        for name, parts in windows.items():
            logprobs: list[float] = []
            start = time.perf_counter()
            for part in parts:
                show(num_done, num_windows, "scoring")
                logprobs += [token.logprob for token in llm.score(part, draft_length=draft_length).logprobs]
                num_done += 1
            size_of_text, seconds = len(texts[name].encode()), time.perf_counter() - start
            scores.append(WeightScore(name, llm.target.runtime_description, size_of_text, logprobs, seconds))
    return scores


def _table(records: Sequence[dict[str, Any]]) -> str:
    head = f"{'tokens':>9}{'perplexity':>12}{'bits/byte':>11}{'change':>9}{'tokens/s':>10}"
    lines = [f"{'text':<20} {'runtime':<28}{head}"]
    for record in records:
        figures = (
            f"{record['perplexity']:>12.4f}{record['bits_per_byte']:>11.4f}{record['mean_change']:>9.4f}"
        )
        counts = f"{record['num_tokens']:>9,}{figures}{record['tokens_per_second']:>10.0f}"
        lines.append(f"{record['text'][-20:]:<20} {record['runtime']:<28}{counts}")
    return "\n".join(lines)
