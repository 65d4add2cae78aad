"""Time of the parts of a round at several batch sizes, with the default controller and without drafts.

    python benchmarks/batch_overhead.py --prompts humaneval --rows 1 16

`scheduler` is what the shared batch adds: queueing, admission, delivery of results and text.
`models` are the forward passes of target and drafter with their bookkeeping, `controller` its
decisions and its learning. Runs of both modes alternate; medians over repeats.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from secondguess import LLM, load
from secondguess.bench.tables import table
from secondguess.sampling import SamplingParams
from secondguess.workloads.loading import load_workload
from secondguess.workloads.provenance import collect_provenance

PARTS = ("seconds", "score", "draft", "prefill", "verify", "controller", "other", "scheduler")


@contextmanager
def timed(owner: Any, names: tuple[str, ...], seconds: dict[str, float], key: str) -> Iterator[None]:
    """Add the time spent in methods of an object to `seconds[key]`."""
    originals = {name: getattr(owner, name) for name in names}

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **more)
            finally:
                seconds[key] += time.perf_counter() - start

        return call

    for name, original in originals.items():
        setattr(owner, name, wrapped(original))
    try:
        yield
    finally:
        for name in originals:
            delattr(owner, name)


def measure(llm: LLM, prompts: list[str], params: SamplingParams) -> dict[str, float]:
    """Return the seconds of each part, the number of rounds and the tokens of one batch."""
    seconds: dict[str, float] = defaultdict(float)
    phases: dict[str, float] = defaultdict(float)
    shared = llm.shared_batch
    batch, recorder = shared._batch, shared.components.recorder
    original_round = recorder.round

    @contextmanager
    def counted_round(rows: Any) -> Iterator[None]:
        with original_round(rows):
            yield
        for name, spent in recorder._phase_seconds.items():
            phases[name] += spent

    recorder.round = counted_round  # type: ignore[method-assign]
    num_rounds = 0.0
    controller = ("plan", "keep_drafting", "learn")
    try:
        with (
            timed(shared, ("_step",), seconds, "steps"),
            timed(batch, ("add", "prefill", "run"), seconds, "batch"),
            timed(llm.controller, controller, seconds, "controller"),
        ):
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds["seconds"] = time.perf_counter() - start
    finally:
        del recorder.round
    num_rounds = max(output.stats.num_rounds for output in outputs)
    in_score_and_verify = {name: phases[name] for name in ("score", "draft", "prefill", "verify")}
    return {
        "seconds": seconds["seconds"],
        **in_score_and_verify,
        "controller": seconds["controller"],
        "other": phases["other"],
        "scheduler": seconds["steps"] - seconds["batch"],
        "rounds": num_rounds,
        "tokens": float(sum(len(output.token_ids) for output in outputs)),
        "drafted": float(sum(output.stats.num_drafted for output in outputs)),
        "accepted": float(sum(output.stats.num_accepted for output in outputs)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", default=None)
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None, help="a JSON file for results and provenance")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    llm = load(options.model, options.drafter)
    rows = []
    for num_rows in options.rows:
        prompts = list(load_workload(options.prompts, num_rows * options.repeats).prompts)
        modes: dict[str, dict[str, Any]] = {"default": {}, "plain": {"draft_length": 0}}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in modes}
        for repeat in range(-1, options.repeats):  # the first is a warm-up
            chosen = prompts[repeat * num_rows :][:num_rows] if repeat >= 0 else prompts[-num_rows:]
            for name, settings in modes.items():
                llm.reset_prefix_cache()
                params = SamplingParams(
                    max_tokens=options.max_tokens,
                    temperature=options.temperature,
                    seed=repeat + 1,
                    **settings,
                )
                result = measure(llm, chosen, params)
                if repeat >= 0:
                    found[name].append(result)
                    print(num_rows, name, {key: round(value, 4) for key, value in result.items()}, flush=True)
        for name, results in found.items():
            total = {key: median(result[key] for result in results) for key in results[0]}
            speed = median(result["tokens"] / result["seconds"] for result in results)
            rows.append({"rows": num_rows, "mode": name, "tokens_per_second": speed, **total})
    header = ["rows", "mode", "tokens/s", *PARTS[1:], "scheduler share"]
    cells = [
        [
            str(row["rows"]),
            str(row["mode"]),
            f"{row['tokens_per_second']:.0f}",
            *[f"{row[part] / row['seconds']:.1%}" for part in PARTS[1:]],
            f"{row['scheduler'] / row['seconds']:.2%}",
        ]
        for row in rows
    ]
    print(table(header, cells))
    if options.output is not None:
        about = collect_provenance(
            num_threads=options.threads, device="cpu", dtype="auto", seed=0, models={}, runtimes={}
        )
        report = {"table": rows, "provenance": about.as_dict()}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
