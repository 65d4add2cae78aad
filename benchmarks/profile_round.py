"""Break down the time of a round: phases, forward passes, overhead, and functions.

    python benchmarks/profile_round.py --controller fixed:5

Prints milliseconds per round for each phase, then the cost of the rounds' forward passes in
isolation (the cost model of `secondguess.bench.costs`); the difference is our overhead. If our
kernels run all models, it also prints the time to read their weights from memory; the rest is
arithmetic, waiting and calls. A second, slower run under cProfile lists the functions with the
most time.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from statistics import median

import torch
from common import make_parser

from secondguess.api import encode
from secondguess.bench.costs import ForwardTimer, predicted_seconds, typical_context
from secondguess.bench.systems import Models, Run, SecondguessSystem, draft_models
from secondguess.runtime.native.decoder import NativeDecoder
from secondguess.runtime.native.runtime import NativeRuntime
from secondguess.stats import Stats
from secondguess.workloads.loading import BUILTIN, load_workload

READINGS = 20


def main() -> None:
    options = read_options()
    torch.set_num_threads(options.threads)
    models = Models(options.model, options.dtype, options.device)
    system = SecondguessSystem(models, options.drafter, options.controller)
    prompts = [
        encode(models.target, text) for text in load_workload(options.prompts, options.num_prompts).prompts
    ]
    probe = ForwardTimer(
        models.target.runtime,
        {name: models.draft_model(name).runtime for name in draft_models([system])},
        typical_context(prompts, options.tokens),
        widths=range(1, 2 + options.widest),
    )
    for phase in (
        probe.warm_up,
        lambda: system.generate(prompts[:1], options.tokens, options.temperature, 0),
    ):
        phase()
    runs = []
    for index, prompt in enumerate(prompts):
        runs.append(system.generate([prompt], options.tokens, options.temperature, index))
        probe.sample()
    show_phases(system, models, runs, probe)
    if options.functions:
        show_functions(system, prompts, options)


def show_phases(system: SecondguessSystem, models: Models, runs: list[Run], probe: ForwardTimer) -> None:
    """Print medians over prompts, in milliseconds per round."""
    costs = probe.costs(system.draft_model)
    told = [(run, run.stats) for run in runs if run.stats is not None]

    def per_round(seconds: list[float]) -> float:
        return 1000 * median(
            spent / stats.num_rounds for spent, (_, stats) in zip(seconds, told, strict=True)
        )

    print(f"{system.name}: {len(runs)} prompts, {told[0][1].num_rounds} rounds in the first")
    for phase in ("draft", "score", "verify", "other"):
        print(f"  {phase:<28}{per_round([stats.seconds[phase] for _, stats in told]):8.3f} ms per round")
    measured = per_round([run.decode_seconds for run, _ in told])
    forwards = per_round([predicted_seconds(stats, costs) for _, stats in told])
    print(f"  {'a round, measured':<28}{measured:8.3f} ms")
    print(f"  {'its forwards alone':<28}{forwards:8.3f} ms")
    print(
        f"  {'overhead':<28}{measured - forwards:8.3f} ms, measured/predicted speed {forwards / measured:.3f}"
    )
    show_bytes(system, models, told, measured)
    print(f"  T(m) in ms: {', '.join(f'{m}: {1000 * costs.target[m]:.2f}' for m in sorted(costs.target))}")
    print(f"  draft step {1000 * costs.draft_step:.3f} ms, c = {costs.cost_ratio:.3f}")


def show_bytes(
    system: SecondguessSystem, models: Models, told: list[tuple[Run, Stats]], measured: float
) -> None:
    """Print the share of a round spent reading weights, if our kernels run all models."""
    target = models.target.runtime
    drafters = [models.draft_model(name).runtime for name in draft_models([system])]
    if not all(isinstance(runtime, NativeRuntime) for runtime in (target, *drafters)):
        return
    steps = median(sum(stats.drafted_per_position) / stats.num_rounds for _, stats in told)
    total = 0.0
    for label, runtime, times in (("target", target, 1.0), *(("drafter", each, steps) for each in drafters)):
        seconds, num_bytes = reading_time(runtime.decoder)
        total += 1000 * seconds * times
        print(
            f"  {f'reading the {label}':<28}{1000 * seconds:8.3f} ms: {num_bytes / 1e6:.1f} MB at "
            f"{num_bytes / seconds / 1e9:.1f} GB/s, {times:.2f} times a round"
        )
    print(
        f"  {'all but reading':<28}{measured - total:8.3f} ms, {100 * (1 - total / measured):.0f} % of the round"
    )


def reading_time(decoder: NativeDecoder) -> tuple[float, int]:
    """Return the median seconds to read a decoder's weights once, and their size in bytes."""
    found = []
    for _ in range(READINGS):
        start = time.perf_counter()
        num_bytes = decoder.read_weights(torch.get_num_threads())
        found.append(time.perf_counter() - start)
    return median(found), num_bytes


def show_functions(system: SecondguessSystem, prompts: list[list[int]], options: argparse.Namespace) -> None:
    """Print the functions with the most time of their own; cProfile inflates small calls."""
    profile = cProfile.Profile()
    profile.enable()
    num_rounds = 0
    for index, prompt in enumerate(prompts):
        run = system.generate([prompt], options.tokens, options.temperature, index)
        num_rounds += run.stats.num_rounds if run.stats else 0
    profile.disable()
    statistics = pstats.Stats(profile)
    entries = sorted(statistics.stats.items(), key=lambda entry: -entry[1][2])  # type: ignore[attr-defined]
    print("\n     own     with callees   calls   (ms and calls per round, under cProfile)")
    for (file, line, name), (_, calls, own, cumulative, _) in entries[: options.functions]:
        where = "" if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} "
        numbers = (
            f"{1000 * own / num_rounds:8.3f} {1000 * cumulative / num_rounds:12.3f} {calls / num_rounds:9.1f}"
        )
        print(f"{numbers}   {where}{name}")


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__, output=False)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--drafter", default="model:builtin-draft")
    parser.add_argument("--controller", default=None, help="default: chosen by drafter")
    parser.add_argument("--prompts", default=BUILTIN)
    parser.add_argument("--num-prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--widest", type=int, default=8, help="longest draft to time a pass for")
    parser.add_argument("--functions", type=int, default=30, help="functions to list; 0 for none")
    return parser.parse_args()


if __name__ == "__main__":
    main()
