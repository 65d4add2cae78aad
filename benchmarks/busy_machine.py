"""Measure a forward pass next to busy processes of equal priority, relative to a quiet machine.

    python benchmarks/busy_machine.py --model pairs/88m/target --competitors 2
    python benchmarks/busy_machine.py --model pairs/88m/target --competitors 1 --pause 9

The kernels' threads wait for each other several times a layer, so a competitor that takes a core
from one of them delays all. Quiet and busy periods alternate. With as many competitors as cores a
fair share of the machine gives 2 times the quiet time. Exits with code 1 if the median
or the mean is beyond `--limit`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from common import make_parser, store

from secondguess.checkpoint.loader import load_model

PROMPT = [5, 6, 7, 8] * 16
BUSY_LOOP = """
import time
while True:
    end = time.perf_counter() + 0.001
    while time.perf_counter() < end:
        pass
    if {pause}:
        time.sleep({pause})
"""


def time_forwards(runtime: Any, row: Any, draft: Any, seconds: float) -> list[float]:
    """Return the milliseconds of each forward pass over a draft during some seconds."""
    found, end = [], time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        runtime.score([row], draft)
        found.append((time.perf_counter() - start) * 1e3)
        runtime.rewind([row], [len(PROMPT) - 1])
    return found


def measure(model: str, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return quiet and busy times of a forward pass, and their ratios, by number of tokens."""
    import torch

    from secondguess.checkpoint.plan import Checkpoint
    from secondguess.core import Draft, Row
    from secondguess.sampling import SamplingParams

    torch.set_num_threads(options.threads)
    competitor = [sys.executable, "-S", "-c", BUSY_LOOP.format(pause=options.pause / 1e3)]
    runtime = load_model(Checkpoint.resolve(model, device="cpu")).runtime
    row = Row(list(PROMPT), SamplingParams())
    runtime.begin([row])
    results: dict[str, dict[str, Any]] = {}
    for width in options.widths:
        draft = Draft.chains([PROMPT[: width - 1]])
        time_forwards(runtime, row, draft, 0.2)
        quiet: list[list[float]] = []
        busy: list[list[float]] = []
        for _ in range(options.repeats):
            quiet.append(time_forwards(runtime, row, draft, options.seconds))
            others = [subprocess.Popen(competitor) for _ in range(options.competitors)]
            try:
                time.sleep(0.5)
                busy.append(time_forwards(runtime, row, draft, options.seconds))
            finally:
                for other in others:
                    other.kill()
                    other.wait()
        alone, busy_times = ([each for period in periods for each in period] for periods in (quiet, busy))
        results[f"{width} tokens"] = {
            "quiet_ms": round(median(alone), 2),
            "busy_ms": round(median(busy_times), 2),
            "busy_p90_ms": round(quantiles(busy_times, n=10)[-1], 2),
            "ratio": round(median(busy_times) / median(alone), 2),
            "ratio_of_p90": round(quantiles(busy_times, n=10)[-1] / quantiles(alone, n=10)[-1], 2),
            "ratio_of_means": round(fmean(busy_times) / fmean(alone), 2),
            "ratio_by_turn": [round(fmean(b) / fmean(q), 2) for q, b in zip(quiet, busy, strict=True)],
        }
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", help="builtin (default) or a directory; repeatable")
    parser.add_argument("--competitors", type=int, default=2)
    parser.add_argument(
        "--pause", type=float, default=0.0, help="milliseconds that a competitor sleeps after each of work"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 5], help="tokens of a forward pass")
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of a period")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--limit", type=float, default=3.0, help="largest ratio of the medians and of the means"
    )
    parser.add_argument("--note", default="", help="text for the output file")
    options = parser.parse_args()
    results = {name_of(model): measure(model, options) for model in options.model or ["builtin"]}
    print(json.dumps(results, indent=1))
    store(options, {"results": results, "note": options.note}, num_threads=options.threads)
    ratios = [
        result[name]
        for by_width in results.values()
        for result in by_width.values()
        for name in ("ratio", "ratio_of_means")
    ]
    sys.exit(max(ratios) > options.limit)


def name_of(model: str) -> str:
    """Return the name of the pair that a model is of."""
    return Path(model).parent.name if "/" in model else model


if __name__ == "__main__":
    main()
