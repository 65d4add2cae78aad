"""Measure a drafter's speed under several controllers, in turns, relative to plain decoding.

    python benchmarks/sweep_controllers.py --temperatures 0 1

The prompts are those of `builtin`, never those used for published results.
"""

import argparse
import json
from pathlib import Path
from statistics import geometric_mean, median

import torch

from secondguess.api import encode
from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.workloads.loading import BUILTIN, load_workload

CONTROLLERS = [
    *(f"fixed:{length}" for length in (1, 2, 3, 4)),
    *(f"confidence:8,threshold={threshold}" for threshold in (0.1, 0.2, 0.3, 0.4, 0.5)),
    *(f"confidence:{length},threshold=0.3" for length in (4, 12)),
]


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    models = Models(options.model, "bfloat16", "cpu")
    systems = [SecondguessSystem(models, "none")]
    systems += [SecondguessSystem(models, options.drafter, controller) for controller in CONTROLLERS]
    prompts = [encode(models.target, text) for text in load_workload(BUILTIN, options.num_prompts).prompts]
    found = {}
    for temperature in options.temperatures:
        speeds: list[list[float]] = [[] for _ in systems]
        for system in systems:
            system.generate(prompts[0], options.tokens, temperature, 0)
        for turn, prompt in enumerate(prompts * options.repeats):
            order = list(enumerate(systems))
            for index, system in order if turn % 2 == 0 else reversed(order):
                run = system.generate(prompt, options.tokens, temperature, turn)
                speeds[index].append(run.tokens_per_second)
        for system, own in zip(systems, speeds, strict=True):
            ratios = [speed / plain for speed, plain in zip(own, speeds[0], strict=True)]
            found[f"{system.name} at {temperature:g}"] = geometric_mean(ratios)
            print(
                f"temperature {temperature:g}  {system.name:<48} median {median(own):6.1f} tokens/s, "
                f"{median(own) / median(speeds[0]):.3f} of plain by medians, {geometric_mean(ratios):.3f} by prompts",
                flush=True,
            )
    if options.output:
        options.output.write_text(json.dumps(found, indent=2) + "\n")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", default="model:builtin-draft")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--num-prompts", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output", type=Path, default=None)
    return parser.parse_args()


if __name__ == "__main__":
    main()
