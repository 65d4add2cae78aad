"""Measure `--share-history`: the same drafter with and without the outputs of earlier requests.

    python benchmarks/share_history.py --output share.json
    python benchmarks/share_history.py --model pairs/88m/target --drafter suffix

Streams of requests, each to both systems one after the other, in random order:

- `edits`: three files of the standard library, each edited again and again: in every request
  another identifier is renamed in its beginning, and the target writes what follows.
- `retries`: the beginnings of these files unchanged, at temperature 0.8 with another seed each time.
- `unrelated`: prompts of HumanEval (of our own without `SECONDGUESS_DATA`).
- `drift`: beginnings of modules of one library, then of another.

The texts of both systems are compared. Seconds are those of whole streams, the indexing of outputs
and what the controller learns included; of decoding, without prefill. Passes do not depend on the
machine.
"""

from __future__ import annotations

import ast
import asyncio
import csv
import email
import keyword
import random
import re
import shlex
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common import make_parser, store

import secondguess
from secondguess.bench.tables import table
from secondguess.workloads.loading import load_workload

Json = dict[str, Any]

EDITED = (textwrap, shlex, csv)
LIBRARIES = (email, asyncio)
NUM_EDITS, NUM_RETRIES, NUM_UNRELATED, NUM_MODULES = 8, 5, 24, 10
FIGURES = ("decoding_faster", "faster", "fewer_passes")
NUM_LINES = 20
"""Lines of a file before the text that the target writes."""


@dataclass
class Totals:
    """Seconds, those without prefill, and target passes of a system per request of a stream."""

    seconds: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    passes: list[int] = field(default_factory=list)


def beginning(path: Path) -> str:
    """Return the first lines of a module after its documentation."""
    text = path.read_text(encoding="utf-8")
    first = ast.parse(text).body[0]
    is_documentation = isinstance(first, ast.Expr) and first.end_lineno is not None
    start = first.end_lineno or 0 if is_documentation else 0
    return "\n".join(text.splitlines()[start : start + NUM_LINES]) + "\n"


def edits_of(text: str) -> list[str]:
    """Return versions of a text, each with one more of its identifiers renamed."""
    names = [name for name in re.findall(r"[A-Za-z_]{4,}", text) if not keyword.iskeyword(name)]
    versions = []
    for name in sorted(set(names), key=lambda each: (-names.count(each), each))[:NUM_EDITS]:
        text = re.sub(rf"\b{name}\b", f"{name}_2", text)
        versions.append(text)
    return versions


def make_streams() -> dict[str, list[tuple[str, Json]]]:
    """Return prompts with their settings, in order, by the name of their stream."""
    files = [beginning(Path(str(module.__file__))) for module in EDITED]
    modules = [
        beginning(path)
        for library in LIBRARIES
        for path in sorted(Path(library.__path__[0]).glob("[a-z]*.py"))[:NUM_MODULES]
    ]
    in_turn = [version for of_files in zip(*map(edits_of, files), strict=True) for version in of_files]
    return {
        "edits": [(prompt, {}) for prompt in in_turn],
        "retries": [
            (prompt, {"temperature": 0.8, "seed": seed}) for seed in range(NUM_RETRIES) for prompt in files
        ],
        "unrelated": [(prompt, {}) for prompt in load_workload(num_prompts=NUM_UNRELATED).prompts],
        "drift": [(prompt, {}) for prompt in modules],
    }


def run_stream(
    requests: Sequence[tuple[str, Json]], loading: Json, num_tokens: int, rng: random.Random
) -> dict[str, Totals]:
    """Send a stream to both systems; neither has any outputs before it."""
    systems = {
        name: secondguess.load(**loading, share_history=name == "shared") for name in ("alone", "shared")
    }
    totals = {name: Totals() for name in systems}
    for llm in systems.values():
        llm.generate("x = 1\n", max_tokens=16, history=False)
    for prompt, settings in requests:
        texts = {}
        for name in rng.sample(list(systems), len(systems)):
            start = time.perf_counter()
            output = systems[name].generate(prompt, max_tokens=num_tokens, **settings)
            totals[name].seconds.append(time.perf_counter() - start)
            totals[name].decoding.append(totals[name].seconds[-1] - output.stats.seconds["prefill"])
            totals[name].passes.append(output.stats.num_rounds)
            texts[name] = output.token_ids
        if texts["alone"] != texts["shared"]:
            raise SystemExit("expected the same text with and without shared outputs")
    return totals


def figures(runs: Sequence[dict[str, Totals]], part: slice) -> Json:
    """Return by how much some requests of a stream gain; of several runs, the median."""

    def ratios(what: str) -> list[float]:
        sums = [{name: sum(getattr(run[name], what)[part]) for name in run} for run in runs]
        return [each["alone"] / each["shared"] for each in sums]

    decoding = ratios("decoding")
    return {
        "decoding_faster": median(decoding),
        "of_each_run": decoding,
        "faster": median(ratios("seconds")),
        "fewer_passes": median(ratios("passes")),
    }


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", action="append", help="repeatable; by default suffix")
    parser.add_argument("--tokens", type=int, default=192, help="tokens of each reply")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stream", action="append", help="repeatable; by default all")
    options = parser.parse_args()
    streams, rng = make_streams(), random.Random(0)
    report: Json = {}
    rows = []
    for drafter in options.drafter or ["suffix"]:
        loading = {"model": options.model, "drafter": drafter}
        for name in options.stream or streams:
            requests = streams[name]
            runs = [run_stream(requests, loading, options.tokens, rng) for _ in range(options.repeats)]
            found = figures(runs, slice(None))
            if name == "drift":
                after = len(requests) // 2
                found["second_library"] = figures(runs, slice(after, None))
            report.setdefault(drafter, {})[name] = found
            rows.append([drafter, name, *(f"{found[figure]:.2f}" for figure in FIGURES)])
            print(*rows[-1], flush=True)
    print(table(["drafter", "stream", *FIGURES], rows))
    store(options, report, num_threads=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
