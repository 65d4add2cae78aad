"""Measure the processor time of the `cost` controller per round, in microseconds, without a model.

    OMP_NUM_THREADS=1 python benchmarks/controller_overhead.py

The controller is driven directly with synthetic rounds: it plans from draft candidates,
acceptance is drawn at random, and `learn` gets synthetic timings. Printed is the processor time
of `plan`, `keep_drafting` and `learn` per round, the minimum over `--repeats` runs, since other load
only adds time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from common import make_parser

from secondguess.bench.tables import table
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Candidate, Draft, Plan, RoundTime, Row, Verdict
from secondguess.sampling import SamplingParams

PASS, STEP, NODE = 1e-3, 0.15e-3, 0.03e-3
"""Synthetic seconds of a plain round, of a draft step, and that each node adds to the pass."""


class FixedConfidences(DraftProbs):
    """Draft distributions that consist of given confidences only.

    Computing confidences from logits depends on the vocabulary size and is no controller overhead.
    """

    def __init__(self, confidences: Sequence[float]) -> None:
        self.acceptance_probs = None
        self._confidences = confidences


@dataclass(frozen=True)
class Scene:
    """Synthetic workload.

    Args:
        candidates: returns the draft candidates of every row, by round number.
        acceptance_prob: acceptance probability of a node; confidences are drawn around it.
    """

    name: str
    candidates: Callable[[int], tuple[Candidate, ...]]
    acceptance_prob: float
    num_rows: int = 1


MODEL = Candidate(part=1)
SCENES = (
    Scene("a draft model that pays", lambda number: (MODEL,), 0.75),
    Scene("a draft model that does not pay", lambda number: (MODEL,), 0.0),
    Scene(
        "a look-up that pays",
        lambda number: (Candidate(kind=number % 4, longest=10, deterministic=True),),
        0.8,
    ),
    Scene(
        "a look-up or a model",
        lambda number: (Candidate(kind=number % 4, longest=number % 8, deterministic=True), MODEL),
        0.75,
    ),
    Scene("a draft model, 8 rows", lambda number: (MODEL,), 0.75, 8),
)


METHODS = ("plan", "keep_drafting", "learn", "nothing")


@dataclass
class Meter:
    """Processor time and number of calls by method."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(METHODS, 0.0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))

    def time(self, name: str, work: Callable[[], object]) -> object:
        start = time.process_time_ns()
        result = work()
        self.seconds[name] += (time.process_time_ns() - start) * 1e-9
        self.calls[name] += 1
        return result


def plan_round(
    controller: Controller, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]
) -> Sequence[Plan]:
    """Return the plans of a round; a paused one has none of its own, as in the decoding loop."""
    return controller.plan(rows, candidates) if controller.begin_round(rows) else [Plan(0, 0)] * len(rows)


def play(controller: Controller, scene: Scene, num_rounds: int, meter: Meter) -> None:
    rng = random.Random(0)
    rows = [Row([0] * 50, SamplingParams(max_tokens=10**6)) for _ in range(scene.num_rows)]
    for number in range(num_rounds):
        choices = scene.candidates(number)
        candidates = [choices] * scene.num_rows
        plans = meter.time("plan", lambda candidates=candidates: plan_round(controller, rows, candidates))
        deterministic = [
            next((choice.deterministic for choice in choices if choice.part == plan.part), True)
            for plan in plans
        ]
        lengths = [
            plan.length if looks_up else min(plan.length, 1)
            for plan, looks_up in zip(plans, deterministic, strict=True)
        ]
        active = [
            index
            for index, plan in enumerate(plans)
            if not deterministic[index] and plan.length > lengths[index]
        ]
        while active:
            dists = FixedConfidences(
                [min(max(scene.acceptance_prob + rng.uniform(-0.2, 0.2), 0.05), 0.995) for _ in rows]
            )
            depth = max(lengths[index] for index in active) - 1
            answers = meter.time(
                "keep_drafting", lambda dists=dists, depth=depth: controller.keep_drafting(rows, dists, depth)
            )
            active = [index for index in active if answers[index]]
            for index in active:
                lengths[index] += 1
            active = [index for index in active if plans[index].length > lengths[index]]
        accepted = [
            next((d for d in range(length) if rng.random() >= scene.acceptance_prob), length)
            for length in lengths
        ]
        draft = Draft.chains([[0] * length for length in lengths])
        verdict = Verdict.from_chain(accepted, [0] * len(rows))
        steps = max(
            (length for length, looks_up in zip(lengths, deterministic, strict=True) if not looks_up),
            default=0,
        )
        drafting = STEP * steps
        total = PASS + drafting + NODE * max(lengths)
        seen = RoundTime(0.0, drafting, total)
        meter.time("nothing", lambda: None)
        meter.time(
            "learn",
            lambda draft=draft, verdict=verdict, seen=seen: controller.learn(rows, draft, verdict, seen),
        )
        for row, count in zip(rows, accepted, strict=True):
            row.tokens += [0] * (count + 1)
            if len(row.tokens) > 400:
                del row.tokens[50:]


def main() -> None:
    parser = make_parser(__doc__, output=False)
    parser.add_argument("--controller", default="cost")
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for scene in SCENES:
        least: dict[str, float] = {}
        calls = 0.0
        for _ in range(options.repeats):
            controller, meter = make_controller(options.controller), Meter()
            play(controller, scene, options.rounds // 3, Meter())
            play(controller, scene, options.rounds, meter)
            calls = meter.calls["keep_drafting"] / options.rounds
            # The time measured for an empty call is subtracted.
            nothing = meter.seconds["nothing"] / meter.calls["nothing"]
            for name in METHODS[:3]:
                spent = 1e6 * (meter.seconds[name] - nothing * meter.calls[name]) / options.rounds
                least[name] = min(spent, least.get(name, spent))
        times = [*(least[name] for name in METHODS[:3]), sum(least.values())]
        rows.append([scene.name, *(f"{each:.1f}" for each in times), f"{calls:.2f}"])
    print(table(["microseconds of a round", *METHODS[:3], "all", "calls of keep_drafting"], rows))


if __name__ == "__main__":
    main()
