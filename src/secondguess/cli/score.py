"""`secondguess score`: perplexity of texts under a model, and how other weight formats change it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Argument, Context

from secondguess.cli import options
from secondguess.cli.options import model_option, panel
from secondguess.cli.output import print_json
from secondguess.cli.progress import load_with_progress, progress_bar
from secondguess.cli.prompts import read_input

text_option = panel("Texts")
DEFAULT_WINDOW = 2048


def score(
    context: Context,
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
    config: options.Config = None,
    model: options.Model = "builtin",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantize: options.Quantize = None,
    compare: Annotated[
        list[str] | None,
        model_option(
            "int8 or int4: score with the weights in 8 or 4 bits, too, and show what that changes; repeatable.",
            callback=options.check_quantization,
        ),
    ] = None,
    runtime: options.Runtime = "auto",
    json: options.Json = False,
) -> int:
    """Show the perplexity of texts under a model.

    Perplexity and bits per byte are those of all tokens but the first of each text.
    With --compare, weights are scored in other formats, too; the change is the mean
    difference of a token's log-probability. --draft-length shows that verification
    computes the same as plain decoding.
    """
    texts = [read_input(name) for name in files]
    settings = options.load_settings_and_tuned(context, config)[0] | {"drafter": "none"}
    for name in ("controller", "verifier", "drafter_quantize", "share_history"):
        settings.pop(name, None)
    formats = [settings.pop("quantize", None), *(compare or ())]
    found = [_score_weights({**settings, "quantize": each}, texts, window, draft_length) for each in formats]
    records = [result.compared_with(found[0]) for result in found]
    if json:
        print_json(records)
    else:
        print(_table(records))
    return 0


@dataclass(frozen=True)
class WeightScore:
    """Log-probabilities of texts with weights in one format.

    Args:
        runtime: name of the runtime, with the format of the weights.
        num_bytes: size of the texts.
        logprobs: per token.
        seconds: time taken.
    """

    runtime: str
    num_bytes: int
    logprobs: list[float]
    seconds: float

    def compared_with(self, first: WeightScore) -> dict[str, Any]:
        """Return the figures of the table, with the change from the first format."""
        total, count = math.fsum(self.logprobs), len(self.logprobs)
        changes = [abs(own - other) for own, other in zip(self.logprobs, first.logprobs, strict=True)]
        return {
            "runtime": self.runtime,
            "num_tokens": count,
            "logprob": total,
            "perplexity": math.exp(-total / count),
            "bits_per_byte": -total / math.log(2) / self.num_bytes,
            "mean_change": math.fsum(changes) / count,
            "tokens_per_second": count / self.seconds,
        }


def _score_weights(
    settings: dict[str, Any], texts: Sequence[str], window: int | None, draft_length: int | None
) -> WeightScore:
    llm = load_with_progress(settings)
    from secondguess.engine.text_scores import windows_of

    size = min(DEFAULT_WINDOW, llm.target.runtime.context_length) if window is None else window
    parts = [part for text in texts for part in windows_of(llm.target.encode(text), size)]
    logprobs: list[float] = []
    start = time.perf_counter()
    with progress_bar("scoring") as show:
        for index, part in enumerate(parts):
            show(index, len(parts), "scoring")
            logprobs += [token.logprob for token in llm.score(part, draft_length=draft_length).logprobs]
    num_bytes = sum(len(text.encode()) for text in texts)
    return WeightScore(llm.target.runtime_description, num_bytes, logprobs, time.perf_counter() - start)


def _table(records: Sequence[dict[str, Any]]) -> str:
    lines = [f"{'runtime':<28}{'tokens':>9}{'perplexity':>12}{'bits/byte':>11}{'change':>9}{'tokens/s':>10}"]
    lines += [
        f"{record['runtime']:<28}{record['num_tokens']:>9,}{record['perplexity']:>12.4f}{record['bits_per_byte']:>11.4f}"
        f"{record['mean_change']:>9.4f}{record['tokens_per_second']:>10.0f}"
        for record in records
    ]
    return "\n".join(lines)
