"""Compare `cost` with the best constant draft length, on code, prose and repetitive text.

    python benchmarks/hindsight.py --num-prompts 14

The comparison is made twice: in replay, over traces and costs recorded in this run, where it is
exact; and measured, with all controllers decoding every prompt at the same time, one round of
each in turn. Speeds are all tokens over all seconds of a part (code, prose or repetitive text):
without prefill in replay, with and without it in the measured run. "Best constant" is the
length that was best for that part, chosen afterwards.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from operator import attrgetter
from statistics import median

import torch
from common import make_parser, store
from in_turns import ModelsWithOwnCaches, repeat_in_turns, warm_up
from replay import replay
from round_costs import Stage, measure_round_costs
from traces import record

from secondguess.api import encode, load
from secondguess.bench.encoding import encode_workload
from secondguess.bench.systems import Models, Run, SecondguessSystem
from secondguess.bench.tables import table
from secondguess.builtin import builtin_paths
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.drafters import draft_model_paths
from secondguess.sampling import SamplingParams
from secondguess.workloads.loading import Workload, load_workload

LENGTHS = (0, 1, 2, 3, 4, 5, 6, 8, 12)
REPETITIVE = (
    "".join(f"    assert add({i}, {i + 1}) == {2 * i + 1}\n" for i in range(12)),
    "| name | value |\n|---|---|\n" + "".join(f"| item {i} | {i * 10} |\n" for i in range(14)),
    "names = [\n" + "".join(f"    'row {i}',\n" for i in range(30)),
    "".join(f'{{"id": {i}, "name": "user{i}", "active": true}}\n' for i in range(16)),
    "".join(f"def get_{w}(self):\n    return self._{w}\n\n\n" for w in ("name", "size", "color", "width")),
    "The wheels on the bus go round and round,\nround and round, round and round.\n" * 8,
    "x = 0\n" + "x = x + 1\n" * 40,
    "<ul>\n" + "".join(f'  <li><a href="/page/{i}">Page {i}</a></li>\n' for i in range(16)),
    "".join(f"INSERT INTO t VALUES ({i}, 'b{i}', {i}.5);\n" for i in range(14)),
    "".join(
        f"    {w}: int = {i}\n" for i, w in enumerate(["alpha", "beta", "gamma", "delta", "eta", "theta"])
    ),
    "".join(f"from package.module{i} import function{i}\n" for i in range(18)),
    "".join(f"2026-11-{day:02d}  OK  {day * 7} requests\n" for day in range(1, 24)),
    "a b c d e f g\n" * 24,
    "".join(f"print('step {i} of 20')\n" for i in range(1, 18)),
)


def workload(num_prompts: int) -> Workload:
    """Return equally many prompts of code, prose and repetitive text, interleaved."""
    code = load_workload(("humaneval",), num_prompts)
    prose = load_workload(("spec-bench",), max(num_prompts, 6))
    parts = {
        "code": code.prompts[:num_prompts],
        "prose": prose.prompts[:num_prompts],
        "repetitive": (REPETITIVE * (num_prompts // len(REPETITIVE) + 1))[:num_prompts],
    }
    mixed = [
        (text, part)
        for texts in zip(*parts.values(), strict=True)
        for text, part in zip(texts, parts, strict=True)
    ]
    return Workload("mix", tuple(text for text, _ in mixed), tasks=tuple(part for _, part in mixed))


def in_replay(
    options: argparse.Namespace, controllers: Sequence[str], temperature: float
) -> dict[str, dict[str, float]]:
    """Return tokens/s of each controller in replay, by part and for `all`."""
    llm = load("builtin", options.drafter, controller="fixed:3", dtype=options.dtype)
    mix = workload(options.num_prompts)
    prompts = encode_workload(llm.target, mix, options.max_tokens + 20).prompts

    def row(tokens: Sequence[int], number: int, room: int) -> Row:
        return Row(list(tokens), SamplingParams(max_tokens=room, temperature=temperature), seed=number)

    traces = [
        record(
            llm.target.runtime,
            llm.drafter,
            llm.verifier,
            row(tokens, number, options.max_tokens + 20),
            options.max_tokens,
            task=part,
        )
        for number, (tokens, part) in enumerate(zip(prompts, mix.tasks, strict=True))
    ]
    repeated = encode(llm.target, "def f(x):\n" * 12)
    stage = Stage(llm.target.runtime, llm.drafter, llm.verifier, lambda: row(repeated, 0, 800))
    costs = measure_round_costs(stage, num_cycles=30)
    speeds = {}
    for name in controllers:
        results = replay(make_controller(name), traces, costs)
        by_part = {part: [each for each in results if each.task == part] for part in dict.fromkeys(mix.tasks)}
        by_part["all"] = results
        speeds[name] = {
            part: sum(each.num_tokens for each in of) / sum(each.seconds for each in of)
            for part, of in by_part.items()
        }
    return speeds


def for_real(
    options: argparse.Namespace, controllers: Sequence[str], temperature: float
) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Return measured tokens/s of each controller by part, with and without prefill."""
    models = Models("builtin", options.dtype, "cpu")
    mix = workload(options.num_prompts)
    prompts = encode_workload(models.target, mix, options.max_tokens).prompts
    systems = {
        name: SecondguessSystem(ModelsWithOwnCaches(models), options.drafter, name) for name in controllers
    }
    batches = [[prompt] for prompt in prompts]
    warm_up(systems, batches[0])
    *_, runs = repeat_in_turns(systems, batches, options.max_tokens, temperature, options.repeats)
    whole, decoding = (
        speeds_of(runs, seconds, mix.tasks, options.max_tokens)
        for seconds in (attrgetter("seconds"), attrgetter("decode_seconds"))
    )
    return whole, decoding


def speeds_of(
    runs: dict[str, list[list[Run]]], seconds: Callable[[Run], float], tasks: Sequence[str], num_tokens: int
) -> dict[str, dict[str, float]]:
    """Return tokens/s by name and part, from the median seconds of every prompt's runs."""
    speeds = {}
    for name, of_prompts in runs.items():
        typical = [median(map(seconds, repeated)) for repeated in of_prompts]
        by_part = {
            part: [time for time, task in zip(typical, tasks, strict=True) if task == part]
            for part in dict.fromkeys(tasks)
        }
        by_part["all"] = typical
        speeds[name] = {part: num_tokens * len(times) / sum(times) for part, times in by_part.items()}
    return speeds


def show(title: str, speeds: dict[str, dict[str, float]]) -> dict[str, object]:
    """Print speeds and their ratios to the best constant length, for each part and for `all`."""
    fixed = [name for name in speeds if name.startswith("fixed")]
    parts = list(next(iter(speeds.values())))
    best = {part: max(fixed, key=lambda name: speeds[name][part]) for part in parts}
    rows = [
        [name, *(f"{speed:.0f} ({speed / speeds[best[part]][part]:.3f})" for part, speed in by_part.items())]
        for name, by_part in speeds.items()
    ]
    print(f"\n{title}: tokens/s (over the best constant length)")
    print(table(["", *parts], [*rows, ["best constant", *best.values()]]), flush=True)
    return {"title": title, "tokens_per_second": speeds, "best_constant": best}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--drafter", default="suffix+model:builtin-draft")
    parser.add_argument("--num-prompts", type=int, default=14, help="of each part")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0])
    parser.add_argument("--controller", nargs="*", default=["cost"])
    parser.add_argument("--only-replay", action="store_true")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    controllers = [*(f"fixed:{length}" for length in LENGTHS), *options.controller]
    tables = []
    for temperature in options.temperature:
        where = f"{options.drafter}, temperature {temperature:g}"
        tables.append(show(f"replay, {where}", in_replay(options, controllers, temperature)))
        if not options.only_replay:
            whole, decoding = for_real(options, controllers, temperature)
            tables.append(show(f"measured, {where}", whole))
            tables.append(show(f"measured without prefill, {where}", decoding))
    names = ["builtin", *draft_model_paths(options.drafter)]
    models = dict(zip(names, builtin_paths(), strict=False))
    store(options, {"tables": tables}, num_threads=options.threads, dtype=options.dtype, models=models)


if __name__ == "__main__":
    main()
