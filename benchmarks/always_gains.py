"""Compare the default controller with the best constant draft length, and after a burst of other load.

    python benchmarks/always_gains.py --pair builtin --pair pairs/88m

Two experiments, each in fresh processes and at each temperature:

- `quiet`: the default controller and every constant draft length decode the same texts, a round of each in
  turn. The figure is the default's tokens/s over those of the best constant length: the one with the most
  tokens/s over all processes together, so that it is not the length that luck favoured in a process. What the
  controller has to learn first is included.
- `burst`: other processes keep both cores busy for some seconds, either before the controller has learned
  anything (`burst at start`) or afterwards (`burst later`). After the burst it decodes `--recovery` tokens,
  which are not counted, and then texts in turns with a second controller that was never disturbed. The
  figure is the ratio of their speeds.

A pair is `builtin`, `MODEL=DRAFTER` such as `SmolLM2-135M-Instruct=self:int4`, or a directory that `make_pair.py` wrote
(its prompts are random tokens).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from math import nan
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from common import make_parser, store
from in_turns import ModelsWithOwnCaches, in_turns

from secondguess.bench.encoding import encode_workload
from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.builtin import builtin_paths
from secondguess.workloads.loading import load_workload

PLAIN = "fixed:0"
BUSY_LOOP = "while True: pass"
EXPERIMENTS = ("quiet", "burst at start", "burst later")


@dataclass(frozen=True)
class Pair:
    """Path of a target and name of a drafter, by the name that the results use."""

    name: str
    target: str
    drafter: str
    prompts_are_random: bool = False

    @classmethod
    def of(cls, name: str) -> Pair:
        if name == "builtin":
            return cls(name, "builtin", "model:builtin-draft")
        target, equals, drafter = name.partition("=")
        if equals:
            return cls(Path(target).name, target, drafter)
        return cls(Path(name).name, f"{name}/target", f"model:{name}/drafter", prompts_are_random=True)

    def prompts(self, models: Models, options: argparse.Namespace) -> list[list[int]]:
        """Token ids of the prompts of a workload, or random ones."""
        if not self.prompts_are_random:
            workload = load_workload(options.prompts, options.num_prompts)
            return encode_workload(models.target, workload, options.max_tokens).prompts
        rng = random.Random(0)
        vocab_size = models.target.runtime.vocab_size
        return [[rng.randrange(vocab_size) for _ in range(96)] for _ in range(options.num_prompts)]


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep `count` processes running in a loop."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


class Worker:
    """One experiment in this process.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.pair = Pair.of(options.pair[0])
        self.temperature = options.temperature[0]
        self.models = Models(self.pair.target, options.dtype, "cpu")
        self.prompts = self.pair.prompts(self.models, options)
        self._endless = cycle(self.prompts)

    def system(self, controller: str) -> SecondguessSystem:
        return SecondguessSystem(ModelsWithOwnCaches(self.models), self.pair.drafter, controller)

    def in_turns(
        self, systems: dict[str, SecondguessSystem], prompts: Sequence[Sequence[int]]
    ) -> dict[str, dict[str, float]]:
        """Decode all prompts; per system tokens per second and tokens per target pass."""
        totals = {name: [0.0, 0, 0] for name in systems}
        for number, prompt in enumerate(prompts):
            runs = in_turns(systems, [prompt], self.options.max_tokens, self.temperature, number)
            for name, run in runs.items():
                assert run.stats is not None
                counts = (run.decode_seconds, run.num_tokens, run.stats.num_rounds)
                totals[name] = [a + b for a, b in zip(totals[name], counts, strict=True)]
        return {
            name: {"speed": tokens / seconds, "tokens_per_pass": tokens / rounds}
            for name, (seconds, tokens, rounds) in totals.items()
        }

    def decode(self, system: SecondguessSystem, *, num_tokens: int = 0, seconds: float = 0.0) -> int:
        """Decode texts one after the other, at least `num_tokens` tokens and for `seconds`; returns the tokens."""
        end, done = time.monotonic() + seconds, 0
        while done < num_tokens or time.monotonic() < end:
            length = self.options.max_tokens
            if done < num_tokens:
                length = min(length, num_tokens - done)
            system.generate([next(self._endless)], length, self.temperature, done)
            done += length
        return done

    def quiet(self) -> dict[str, object]:
        # The kernels and the allocator are warmed up by systems that are not measured.
        self.decode(self.system("fixed:3"), num_tokens=self.options.max_tokens)
        names = ("cost", PLAIN, *(f"fixed:{length}" for length in self.options.lengths))
        return {"systems": self.in_turns({name: self.system(name) for name in names}, self.prompts)}

    def burst(self, *, at_start: bool) -> dict[str, object]:
        options = self.options
        disturbed, undisturbed = self.system("cost"), self.system("cost")
        if not at_start:
            self.decode(disturbed, num_tokens=options.warm_up)
            self.decode(undisturbed, num_tokens=options.warm_up)
        with busy_processes(options.busy):
            during = self.decode(disturbed, seconds=options.burst)
        self.decode(disturbed, num_tokens=options.recovery)
        if at_start:
            self.decode(undisturbed, num_tokens=options.warm_up)
        found = self.in_turns({"disturbed": disturbed, "undisturbed": undisturbed}, self.prompts)
        return {"tokens_in_burst": during, "systems": found}

    def run(self, experiment: str) -> dict[str, object]:
        if experiment == "quiet":
            return self.quiet()
        return self.burst(at_start=experiment == "burst at start")


def run_processes(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run every experiment of every pair and temperature in fresh processes; yield the result of each."""
    for number in range(options.processes):
        for pair in options.pair:
            for temperature in options.temperature:
                for experiment in options.experiment:
                    found = run_process(options, pair, temperature, experiment)
                    about = {"pair": Pair.of(pair).name, "temperature": temperature, "experiment": experiment}
                    yield {**about, **found}
                    print(
                        f"process {number}: {pair} T={temperature:g} {experiment}",
                        file=sys.stderr,
                        flush=True,
                    )


def run_process(
    options: argparse.Namespace, pair: str, temperature: float, experiment: str
) -> dict[str, object]:
    command = [sys.executable, __file__, "--worker", "--pair", pair]
    command += ["--temperature", str(temperature), "--experiment", experiment]
    for name in (
        "num_prompts", "max_tokens", "warm_up", "recovery", "burst", "busy", "threads", "dtype",
    ):  # fmt: skip
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--lengths", *map(str, options.lengths)]
    if options.prompts is not None:
        command += ["--prompts", options.prompts]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def summarise(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per pair, temperature and experiment: the median, the least and the largest ratio over processes."""
    groups: dict[tuple[object, ...], list[dict[str, Any]]] = {}
    for result in results:
        key = (result["pair"], result["temperature"], result["experiment"])
        groups.setdefault(key, []).append(result)
    summary = []
    for (pair, temperature, experiment), runs in groups.items():
        about = {"pair": pair, "temperature": temperature, "experiment": experiment}
        first, second = "disturbed", "undisturbed"
        if experiment == "quiet":
            first, second = "cost", best_constant(runs)
            about["best"] = second
            about["over_plain"] = median(speed_ratio(run, first, PLAIN) for run in runs)
        ratios = [speed_ratio(run, first, second) for run in runs]
        spread = {"median": median(ratios), "least": min(ratios), "largest": max(ratios)}
        summary.append({**about, "processes": len(runs), **spread, "ratios": ratios})
    return summary


def best_constant(runs: Sequence[dict[str, Any]]) -> str:
    """The constant draft length that was fastest over all processes, each of which counts the same."""
    names = [name for name in runs[0]["systems"] if name not in ("cost", PLAIN)]
    return max(names, key=lambda name: fmean(speed_ratio(run, name, PLAIN) for run in runs))


def speed_ratio(run: dict[str, Any], first: str, second: str) -> float:
    """Tokens per second of one system over those of another, in one process."""
    systems = run["systems"]
    return float(systems[first]["speed"] / systems[second]["speed"])


def show(summary: Sequence[dict[str, object]]) -> None:
    print(
        f"{'pair':10}{'T':>4}  {'experiment':16}{'processes':>10}{'median':>8}{'least':>8}{'largest':>8}"
        f"  {'against':12}{'over plain':>10}"
    )
    for row in summary:
        print(
            f"{row['pair']:10}{row['temperature']:4g}  {row['experiment']:16}{row['processes']:10}"
            f"{row['median']:8.3f}{row['least']:8.3f}{row['largest']:8.3f}"
            f"  {row.get('best', 'undisturbed'):12}{row.get('over_plain', nan):10.3f}"
        )


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--pair", action="append", help="builtin (default), MODEL=DRAFTER, or a directory; repeatable"
    )
    parser.add_argument("--experiment", choices=EXPERIMENTS, nargs="+", default=list(EXPERIMENTS))
    parser.add_argument("--processes", type=int, default=10, help="fresh processes for each experiment")
    parser.add_argument("--prompts", default=None, help="as for `secondguess bench`")
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8], help="constant draft lengths"
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--warm-up", type=int, default=768, help="tokens of an undisturbed controller")
    parser.add_argument("--recovery", type=int, default=200, help="tokens after a burst, not counted")
    parser.add_argument("--burst", type=float, default=4.0, help="seconds")
    parser.add_argument("--busy", type=int, default=2, help="processes that keep cores busy")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.pair = options.pair or ["builtin"]
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    if options.worker:
        print(json.dumps(Worker(options).run(options.experiment[0])))
        return
    results: list[dict[str, Any]] = []
    for result in run_processes(options):
        results.append(result)
        # What there is so far, so that an interrupted run is not lost.
        report = {"summary": summarise(results), "results": results}
        models = {"builtin": builtin_paths()[0]}
        store(options, report, num_threads=options.threads, dtype=options.dtype, models=models)
    show(summarise(results))


if __name__ == "__main__":
    main()
