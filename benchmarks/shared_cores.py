"""Measure the speed of two processes that share cores, relative to their fair share.

    python benchmarks/shared_cores.py --model builtin --model pairs/88m/target

Plain decoding runs in one process, then in two at the same time. The result is the slower
process's tokens/s over half of the tokens/s of a single process. With `--runtime transformers`
torch computes, otherwise our kernels if they support the model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from common import make_parser

PROMPT = [5, 6, 7, 8] * 8
NUM_TOKENS = 16


def decode(options: argparse.Namespace) -> float:
    """Return the tokens/s of this process, measured from a common start signal on."""
    import torch

    import secondguess

    torch.set_num_threads(options.threads)
    llm = secondguess.load(options.model[0], "none", runtime=options.runtime)
    llm.generate(PROMPT, max_tokens=2 * NUM_TOKENS)
    print("ready", flush=True)
    sys.stdin.readline()
    start, num_tokens = time.monotonic(), 0
    while time.monotonic() < start + options.seconds:
        num_tokens += len(llm.generate(PROMPT, max_tokens=NUM_TOKENS).token_ids)
    return num_tokens / (time.monotonic() - start)


def run_together(options: argparse.Namespace, model: str, count: int) -> list[float]:
    """Return the tokens/s of `count` processes that decode at the same time."""
    command = [sys.executable, __file__, "--worker", "--model", model, "--runtime", options.runtime]
    command += ["--seconds", str(options.seconds), "--threads", str(options.threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(count)]  # type: ignore[call-overload]
    try:
        for process in processes:
            if process.stdout.readline().strip() != "ready":
                raise SystemExit("expected a worker that decodes, got one that ended; see its error above")
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        return [float(process.communicate()[0]) for process in processes]
    finally:
        for process in processes:
            process.kill()


def measure(options: argparse.Namespace, model: str) -> dict[str, object]:
    alone, together = [], []
    for _ in range(options.repeats):
        alone += run_together(options, model, 1)
        together.append(run_together(options, model, 2))
    fair = median(alone) / 2
    shares = [min(pair) / fair for pair in together]
    return {
        "model": Path(model).parent.name if "/" in model else model,
        "runtime": options.runtime,
        "alone": alone,
        "together": together,
        "share_of_fair": {"median": median(shares), "least": min(shares)},
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", action="append", help="builtin (default) or a directory; repeatable")
    parser.add_argument("--runtime", default="auto")
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.model = options.model or ["builtin"]
    if options.worker:
        print(decode(options))
        return
    results = [measure(options, model) for model in options.model]
    for result in results:
        print(json.dumps(result))
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
