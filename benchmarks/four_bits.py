"""Measure 4-bit weights: a target in int4, and a bfloat16 target that drafts with its own copy in int4.

    python benchmarks/four_bits.py --model pairs/grown-1b/target --draft-model pairs/grown-1b/drafter \
        --output four-bits.json

Systems decode every prompt one after the other, in random order, with exactly the same number of
tokens. Systems on the same weights must write the same greedy texts. Speeds are those of decoding,
without prefill: medians over prompts, and ratios with the lowest of any prompt. Also reports the
milliseconds of a pass over 1, 5 and 9 tokens in each precision.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from common import make_parser

from secondguess.api import encode
from secondguess.bench.costs import ForwardTimer
from secondguess.bench.summary import compare, sum_stats
from secondguess.bench.systems import Models, Run, SecondguessSystem
from secondguess.workloads.loading import load_workload

Json = dict[str, Any]
WIDTHS = (1, 5, 9)
WARM_UP_TOKENS = 16


def systems_of(
    models: dict[str, Models], draft_model: str | None, controllers: list[str | None]
) -> dict[str, tuple[str, SecondguessSystem]]:
    """Return systems by name, each with the precision of its target."""
    drafters = {"bfloat16": ["none", "self:int4"], "int4": ["none"]}
    if draft_model is not None:
        for of_precision in drafters.values():
            of_precision.append(f"model:{draft_model}")
    systems = {}
    for precision, names in drafters.items():
        for drafter in names:
            for controller in [None] if drafter == "none" else controllers:
                system = SecondguessSystem(models[precision], drafter, controller)
                systems[f"{precision} {system.name.removeprefix('secondguess ')}"] = (precision, system)
    return systems


def decode_all(
    systems: dict[str, tuple[str, SecondguessSystem]],
    prompts: list[list[int]],
    num_tokens: int,
    temperature: float,
    rng: random.Random,
) -> dict[str, list[Run]]:
    """Return the runs of each system, one per prompt."""
    runs: dict[str, list[Run]] = defaultdict(list)
    for _, system in systems.values():
        system.reset()
        system.generate(prompts[:1], WARM_UP_TOKENS, temperature, 0)
    for index, prompt in enumerate(prompts):
        for name in rng.sample(list(systems), len(systems)):
            runs[name].append(systems[name][1].generate([prompt], num_tokens, temperature, index))
    return runs


def count_equal_texts(runs: dict[str, list[Run]]) -> dict[str, int]:
    """Return for each system how many of its texts are those of plain decoding with the same weights."""
    return {
        name: sum(
            run.texts == plain.texts
            for run, plain in zip(of_prompts, runs[f"{name.partition(' ')[0]} plain"], strict=True)
        )
        for name, of_prompts in runs.items()
    }


def figures(runs: dict[str, list[Run]]) -> Json:
    """Return the speed of each system, compared with plain decoding in bfloat16 and on its own weights."""
    speeds = {name: [run.num_tokens / run.decode_seconds for run in of] for name, of in runs.items()}
    found: Json = {}
    for name, of_prompts in runs.items():
        stats = sum_stats([run.stats for run in of_prompts if run.stats])
        found[name] = {
            "tokens_per_second": median(speeds[name]),
            "tokens_per_pass": sum(run.num_tokens for run in of_prompts) / stats.num_rounds,
            "accepted_share": stats.num_accepted / max(1, stats.num_drafted),
        }
        for other in dict.fromkeys(("bfloat16 plain", f"{name.partition(' ')[0]} plain")):
            if other != name:
                found[name][f"over {other}"] = asdict(compare(speeds[name], speeds[other]))
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--draft-model", help="path of a draft model to measure in addition to the copy")
    parser.add_argument(
        "--runtime", default="auto", help="transformers for the cost of a Transformers module"
    )
    parser.add_argument("--controller", action="append", help="repeatable; by default the drafter's own")
    parser.add_argument("--prompts", default="humaneval")
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, action="append", help="repeatable; by default 0 and 1")
    options = parser.parse_args()
    models = {
        name: Models(options.model, "bfloat16", "cpu", quantize, options.runtime)
        for name, quantize in (("bfloat16", None), ("int4", "int4"))
    }
    systems = systems_of(models, options.draft_model, options.controller or [None])
    texts = load_workload(options.prompts, options.num_prompts).prompts
    prompts = [encode(models["bfloat16"].target, text) for text in texts]
    rng = random.Random(0)
    report: Json = {}
    for temperature in options.temperature or [0.0, 1.0]:
        runs = decode_all(systems, prompts, options.tokens, temperature, rng)
        if temperature == 0 and set((equal := count_equal_texts(runs)).values()) != {len(prompts)}:
            raise SystemExit(
                f"expected the {len(prompts)} texts of plain decoding from every system, got {equal}"
            )
        report[f"temperature {temperature:g}"] = figures(runs)
    report["milliseconds_of_a_pass"] = {}
    for name, each in models.items():
        timer = ForwardTimer(each.target.runtime, {}, prompts[0], WIDTHS)
        timer.warm_up()
        for _ in range(5):
            timer.sample()
        costs = timer.costs().target
        report["milliseconds_of_a_pass"][name] = {width: 1000 * costs[width] for width in WIDTHS}
    print(json.dumps(report, indent=1))
    if options.output:
        provenance = models["bfloat16"].provenance(torch.get_num_threads(), 0).as_dict()
        options.output.write_text(json.dumps({"provenance": provenance, **report}, indent=1) + "\n")


if __name__ == "__main__":
    main()
