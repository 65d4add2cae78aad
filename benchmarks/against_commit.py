"""Compare the speed of two installations of the package, for example of two commits, in turns.

    git clone . ../before && git -C ../before checkout COMMIT && make -C ../before setup
    python benchmarks/against_commit.py --other ../before/.venv/bin/python --pair builtin --pair pairs/88m

One process of each installation loads the same checkpoints. For every pair, drafter setting, temperature and
batch size, both generate the same texts in turns, prefill included; the order is reversed on every second text.
The figure is the ratio of the median times (above 1: this installation is faster) with a 90 % bootstrap interval
(prompts resampled in pairs, 1,000 times). Sampled requests have a seed. Every prompt begins with
a number of its own, so that neither reuses the KV cache of an earlier one.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from itertools import count, product
from pathlib import Path
from statistics import median
from typing import Any

from common import make_parser, store

WARM_UP = 2
SETTINGS = {"plain": None, "fixed:4": "fixed:4", "default": None}


def serve_requests(threads: int) -> None:
    """Load and generate what the lines of standard input ask for, one line of JSON per reply."""
    import torch

    import secondguess

    torch.set_num_threads(threads)
    loaded: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        options = {"drafter": request["drafter"], "dtype": "bfloat16", "controller": request["controller"]}
        key = json.dumps([request["target"], options])
        if key not in loaded:
            loaded.clear()  # one model at a time in memory
            loaded[key] = secondguess.load(request["target"], **options)
        begin = time.perf_counter()
        outputs = loaded[key].generate(request["prompts"], **request["sampling"])
        seconds = time.perf_counter() - begin
        num_tokens = sum(len(output.token_ids) for output in outputs)
        print(json.dumps({"seconds_per_token": seconds / num_tokens}), flush=True)


class Installation:
    """A process that generates with one installation of the package."""

    def __init__(self, python: str, threads: int) -> None:
        command = [python, __file__, "--worker", "--threads", str(threads)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def generate(self, request: dict[str, Any]) -> float:
        """Return the seconds per token of a request."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                "expected a reply of the installation, but its process ended: see its error above"
            )
        return float(json.loads(line)["seconds_per_token"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def commit_of(python: str) -> str:
    """Return the commit of the checkout that an installation was made from."""
    find = "import pathlib, secondguess; print(pathlib.Path(secondguess.__file__).parent)"
    folder = subprocess.run([python, "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    command = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=40"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def compare(ours: Installation, other: Installation, requests: list[dict[str, Any]]) -> dict[str, float]:
    """Return the ratio of the median times of all requests but the first two, and its interval."""
    for installation in (ours, other):
        for request in requests[:WARM_UP]:  # loads, and lets the controller learn
            installation.generate(request)
    pairs = []
    for number, request in enumerate(requests[WARM_UP:]):
        order = (ours, other) if number % 2 == 0 else (other, ours)
        seconds = {installation: installation.generate(request) for installation in order}
        pairs.append((seconds[ours], seconds[other]))

    def ratio(pairs: list[tuple[float, float]]) -> float:
        return median(theirs for _, theirs in pairs) / median(mine for mine, _ in pairs)

    resampled = sorted(ratio(random.Random(seed).choices(pairs, k=len(pairs))) for seed in range(1000))
    return {
        "ratio": ratio(pairs),
        "interval": [resampled[49], resampled[949]],
        "tokens_per_second": 1 / median(mine for mine, _ in pairs),
        "other_tokens_per_second": 1 / median(theirs for _, theirs in pairs),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--other", help="Python interpreter of the other installation")
    parser.add_argument("--pair", action="append", help="`builtin`, or a directory that make_pair.py wrote")
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--num-prompts", type=int, default=10)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        serve_requests(options.threads)
        return
    if not options.other:
        parser.error("expected --other, the Python interpreter of the other installation")
    # Only here: the other installation may not have these modules.
    from secondguess.builtin import builtin_paths
    from secondguess.workloads.loading import load_workload

    texts = load_workload(options.prompts, options.num_prompts).prompts
    ours, other = (Installation(python, options.threads) for python in (sys.executable, options.other))
    paths = builtin_paths()
    table, numbers = [], count()
    for pair, setting in product(options.pair or ["builtin"], SETTINGS):
        target, drafter = (paths[0], paths[1]) if pair == "builtin" else (f"{pair}/target", f"{pair}/drafter")
        for temperature, size in product(options.temperature, options.batch_size):
            requests = [
                {
                    "target": str(target),
                    "drafter": "none" if setting == "plain" else f"model:{drafter}",
                    "controller": SETTINGS[setting],
                    "prompts": [
                        f"# {next(numbers)}\n{texts[(number + offset) % len(texts)]}"
                        for offset in range(size)
                    ],
                    "sampling": {
                        "max_tokens": options.max_tokens,
                        "temperature": temperature,
                        "seed": number,
                    },
                }
                for number in range(len(texts) + WARM_UP)
            ]
            row = {
                "pair": Path(pair).name,
                "setting": setting,
                "temperature": temperature,
                "batch_size": size,
            }
            table.append(row | compare(ours, other, requests))
            print(
                "  ".join(
                    f"{key} {round(value, 3) if isinstance(value, float) else value}"
                    for key, value in table[-1].items()
                ),
                flush=True,
            )
    for installation in (ours, other):
        installation.close()
    grown = {Path(pair).name: Path(pair) / "target" for pair in options.pair or () if pair != "builtin"}
    report = {"table": table, "other_commit": commit_of(options.other)}
    models = {"builtin": paths[0], **grown}
    store(options, report, num_threads=options.threads, dtype="bfloat16", models=models)


if __name__ == "__main__":
    main()
