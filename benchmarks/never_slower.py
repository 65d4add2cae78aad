"""Compare drafters with plain decoding where speculation may not help: kinds of prompts, contexts, batches, temperatures.

    python benchmarks/never_slower.py --drafter noise itself suffix+noise again
    python benchmarks/never_slower.py --model MODEL --kinds code chat json tools --temperature 0 0.7 1
    python benchmarks/never_slower.py --model MODEL --kinds documents:1000 sources:8000 --num-prompts 1
    python benchmarks/never_slower.py --model MODEL --kinds chat --batch-size 1 4 16 64

A cell is a kind of prompts, a batch size and a temperature. All systems decode a batch at the same time, one round of each
in turn, `--repeats` times (a batch starts at each of the prompts). A controller is kept over all batches of one size and
temperature, as in a loaded model. A batch's ratio is the median over its runs of the speed over that of plain decoding in
the same run, tokens over seconds without prefill; `median` and `worst` are those over batches, `all` is the ratio of all
tokens over all seconds, and `first` that of the first text. `prefill` is the time of the first prefill over that of plain
decoding, the drafter's included. Long prompts (`documents:N`, `sources:N`, with `--num-prompts 1`) stay cached for later
runs. Tokens that a grammar forces are drafted for plain decoding, too.

Drafters: a name as in `--drafter` of the command line; `default`; `again`, plain decoding, which shows the noise of the
machine; `itself`, the target as draft model (perfect and far too slow); and `noise` in a name, a model with random weights.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import TimeLimit, make_parser, show_table, store
from in_turns import ModelsWithOwnCaches, repeat_in_turns, warm_up
from prompts import GRAMMARS, LONG, prompts
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from secondguess.bench.systems import Models, Run, SecondguessSystem
from secondguess.builtin import builtin_paths
from secondguess.params import SamplingParams
from secondguess.workloads.provenance import public_name

PLAIN = "plain"
Runs = Mapping[str, Sequence[Sequence[Run]]]
"""Runs by system, batch and repeat."""


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


class CellSystem(SecondguessSystem):
    """System whose requests are those of a kind of prompts.

    Attributes:
        kind: of the prompts.
    """

    kind = ""

    def params(self, num_tokens: int, temperature: float) -> SamplingParams:
        grammar = GRAMMARS.get(self.kind)
        return SamplingParams(
            num_tokens, temperature=temperature, ignore_eos=grammar is None, grammar=grammar
        )

    @property
    def keeps_prompts(self) -> bool:
        """True for prompts whose prefill takes too long to repeat it."""
        return self.kind.partition(":")[0] in LONG

    def forget_prompts(self) -> None:
        if not self.keeps_prompts:
            super().forget_prompts()

    def release(self) -> None:
        if not self.keeps_prompts:
            super().release()


def speed(runs: Sequence[Run]) -> float:
    """Return tokens over seconds without prefill."""
    return sum(run.num_tokens for run in runs) / sum(run.decode_seconds for run in runs)


def summarise(runs: Runs) -> list[dict[str, Any]]:
    """Return one row per drafter."""
    plain, rows = runs[PLAIN], []
    for name in [name for name in runs if name != PLAIN]:
        ours = runs[name]
        ratios = [
            median(speed([mine]) / speed([theirs]) for mine, theirs in zip(*batch, strict=True))
            for batch in zip(ours, plain, strict=True)
        ]
        stats = [run.stats for batch in ours for run in batch if run.stats is not None]
        rows.append(
            {
                "drafter": public_name(name),
                "num_batches": len(ours),
                "repeats": len(ours[0]),
                "median": median(ratios),
                "worst": min(ratios),
                "all": speed([*chain(*ours)]) / speed([*chain(*plain)]),
                "first": speed(ours[0][:1]) / speed(plain[0][:1]),
                "prefill": prefill_ratio(ours[0][0], plain[0][0]),
                "plain_tokens_per_second": speed([*chain(*plain)]),
                "tokens_per_pass": sum(counts.num_tokens for counts in stats)
                / sum(counts.num_rounds for counts in stats),
                "by_batch": sorted(round(ratio, 3) for ratio in ratios),
            }
        )
    return rows


def prefill_ratio(ours: Run, plain: Run) -> float | None:
    """Return the time of prefill over that of plain decoding; None if the prompt was cached."""
    assert plain.stats is not None
    if plain.stats.num_reused:
        return None
    return (ours.seconds - ours.decode_seconds) / (plain.seconds - plain.decode_seconds)


def tell(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line per row to standard error, without the ratios by batch."""
    for row in rows:
        words = [
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value}"
            for key, value in row.items()
            if key != "by_batch"
        ]
        print("  ".join(words), file=sys.stderr, flush=True)


def batches_of(found: Sequence[list[int]], size: int, count: int) -> list[list[list[int]]]:
    """Return batches that start at each of the first prompts; prompts repeat where there are fewer than a batch takes."""
    starts = range(min(count, len(found)))
    return [[found[(start + offset) % len(found)] for offset in range(size)] for start in starts]


def compare(options: argparse.Namespace, drafters: Mapping[str, str]) -> Iterator[list[dict[str, Any]]]:
    """Yield the table so far, one row per cell and drafter, after every repeat of a cell."""
    models = Models(options.model, options.dtype, "cpu")
    known = {"default": models.default_drafter, "again": "none"}
    named = {name: known.get(name) or drafters[name] for name in options.drafter}
    systems = {
        name: CellSystem(
            ModelsWithOwnCaches(models), drafter, None if drafter == "none" else options.controller
        )
        for name, drafter in {PLAIN: "none", **named}.items()
    }
    table: list[dict[str, Any]] = []
    warm_up(systems, prompts(models.target, options.kinds[0], 1, options.max_tokens))
    cells = list(product(options.kinds, options.batch_size, options.temperature))
    limit = TimeLimit(options.seconds)
    for number, (kind, size, temperature) in enumerate(cells):
        for system in systems.values():
            system.kind = kind
        found = prompts(models.target, kind, max(size, options.num_prompts), options.max_tokens)
        batches = batches_of(found, size, options.num_prompts)
        rows: list[dict[str, Any]] = []
        about = {"kind": kind, "batch_size": size, "temperature": temperature}
        for runs in repeat_in_turns(systems, batches, options.max_tokens, temperature, options.repeats):
            rows = [{**about, **row} for row in summarise(runs)]
            tell(rows)
            yield [*table, *rows]
            if limit.is_over((number + 1) / len(cells)):
                break
        table += rows
    show_table(table)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="builtin", help="the target, a folder or a file")
    parser.add_argument("--drafter", nargs="+", default=["default", "again"])
    parser.add_argument("--kinds", nargs="+", default=["code"], help="kinds of prompts, see prompts.py")
    parser.add_argument("--num-prompts", type=int, default=8, help="prompts at which a batch starts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=600, help="no repeat starts after a cell's share of them"
    )
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--controller", default="cost")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    needs_noise = any("noise" in drafter for drafter in options.drafter)
    with noise_model(options.model) if needs_noise else nullcontext("") as noise:
        special = {"itself": f"model:{options.model}"}
        drafters = {
            name: special.get(name, name.replace("noise", f"model:{noise}"))
            for name in options.drafter
            if name not in ("default", "again")
        }
        models = {
            public_name(options.model): builtin_paths()[0]
            if options.model == "builtin"
            else Path(options.model)
        }
        for table in compare(options, drafters):
            store(options, {"table": table}, num_threads=options.threads, dtype=options.dtype, models=models)


if __name__ == "__main__":
    main()
