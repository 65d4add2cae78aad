"""Measure the cost of speculation where it cannot help: `cost` with useless drafters.

    python benchmarks/never_slower.py --num-prompts 40 --batch-size 1

Drafters: a model with random weights (its drafts are noise), the target itself (its drafts are
perfect but far too slow), and look-ups together with the noise, which may help. All systems decode every
prompt at the same time, one round of each in turn, `--repeats` times (a batch starts at each of
the prompts). One controller is kept over all prompts, as in a loaded model. A prompt's ratio is
the median over its runs, each compared with plain decoding in the same run: `median_prompt` is the median and `worst` the
minimum of these ratios. `median` is the ratio of the medians over prompts' median times, `all`
that of all seconds, and `first` that of the first text, before the controller has learnt
anything. A second plain decoding shows the noise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TextIO

import torch
from common import make_parser, store
from in_turns import ModelsWithOwnCaches, repeat_in_turns
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from secondguess.bench.encoding import encode_workload
from secondguess.bench.systems import Models, SecondguessSystem
from secondguess.builtin import builtin_paths
from secondguess.workloads.loading import load_workload


@contextmanager
def noise_model(target: str) -> Iterator[str]:
    """Make a temporary checkpoint with random weights: the built-in drafter's, or a quarter of the target's layers."""
    trained = builtin_paths()[1] if target == "builtin" else target
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(trained)
        if target != "builtin":
            config.num_hidden_layers = max(config.num_hidden_layers // 4, 1)
        model = AutoModelForCausalLM.from_config(config)
        model.bfloat16().save_pretrained(folder)
        AutoTokenizer.from_pretrained(trained).save_pretrained(folder)
        yield folder


def speed_ratios(plain: list[list[float]], ours: list[list[float]]) -> list[float]:
    """Return our speed over plain decoding's by prompt: the median over runs decoded in turn."""
    return [
        median(theirs / mine for theirs, mine in zip(*runs, strict=True))
        for runs in zip(plain, ours, strict=True)
    ]


def summarise(
    seconds: dict[str, list[list[float]]], temperature: float, batch_size: int
) -> list[dict[str, object]]:
    """Return the rows of the table at one temperature, one per drafter.

    Args:
        seconds: seconds of each run, by system and batch.
    """
    plain = seconds["plain"]
    rows: list[dict[str, object]] = []
    for name in [name for name in seconds if name != "plain"]:
        ours = seconds[name]
        ratios = speed_ratios(plain, ours)
        rows.append(
            {
                "drafter": name,
                "temperature": temperature,
                "batch_size": batch_size,
                "num_batches": len(ours),
                "repeats": len(ours[0]),
                "median": median(map(median, plain)) / median(map(median, ours)),
                "median_prompt": median(ratios),
                "worst": min(ratios),
                "all": sum(map(sum, plain)) / sum(map(sum, ours)),
                "first": plain[0][0] / ours[0][0],
                "by_prompt": sorted(round(ratio, 3) for ratio in ratios),
            }
        )
    return rows


def tell(rows: list[dict[str, object]], to: TextIO) -> None:
    """Print one line per row, without the ratios by prompt."""
    for row in rows:
        words = [
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key != "by_prompt"
        ]
        print("  ".join(words), file=to, flush=True)


def compare(options: argparse.Namespace, drafters: dict[str, str]) -> list[dict[str, object]]:
    """Return the table, one row per temperature and drafter.

    Intermediate rows are printed to standard error after every repeat.
    """
    models = Models(options.model, options.dtype, "cpu")
    workload = load_workload(options.prompts, options.num_prompts)
    prompts = encode_workload(models.target, workload, options.max_tokens).prompts
    # Plain decoding twice: the difference between the two is the machine's noise.
    drafters = {"plain": "none", "plain again": "none", **drafters}
    systems = {
        name: SecondguessSystem(
            ModelsWithOwnCaches(models), drafter, None if drafter == "none" else options.controller
        )
        for name, drafter in drafters.items()
    }
    size = options.batch_size
    batches = [
        [prompts[(start + offset) % len(prompts)] for offset in range(size)] for start in range(len(prompts))
    ]
    table = []
    for temperature in options.temperature:
        for runs in repeat_in_turns(systems, batches, options.max_tokens, temperature, options.repeats):
            seconds = {
                name: [[run.seconds for run in repeated] for repeated in own] for name, own in runs.items()
            }
            rows = summarise(seconds, temperature, size)
            tell(rows, sys.stderr)
        tell(rows, sys.stdout)
        table.extend(rows)
    return table


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin", help="the target, a folder")
    parser.add_argument("--prompts", default=None)
    parser.add_argument("--num-prompts", type=int, default=40)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--controller", default="cost")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with noise_model(options.model) as noise:
        table = compare(
            options,
            {
                "noise": f"model:{noise}",
                "itself": f"model:{options.model}",
                "suffix and noise": f"suffix+model:{noise}",
            },
        )
    models = {options.model: builtin_paths()[0] if options.model == "builtin" else Path(options.model)}
    store(options, {"table": table}, num_threads=options.threads, dtype=options.dtype, models=models)


if __name__ == "__main__":
    main()
