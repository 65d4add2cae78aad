"""`secondguess train acceptance`: what a drafter's laws say about the fate of its nodes, learnt from the target's own text.

The target writes, the drafter guesses at every place (`traces.py`), and each node is labelled with the chance that the
target accepts it. What is fitted to that, and how, is in `secondguess.train.acceptance`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from secondguess.api import LLM, encode, load, make_row
from secondguess.bench.systems import public_name
from secondguess.bench.traces import Trace, record
from secondguess.bench.workloads import Workload, load_workload
from secondguess.controllers.acceptance_features import features_of_path
from secondguess.controllers.predictor import Predictor
from secondguess.core import MAX_DRAFT_LENGTH, Row
from secondguess.drafters import draft_model_paths
from secondguess.errors import BadInputError
from secondguess.jobs.acceptance_prompts import STANDARD_LIBRARY, standard_library_prompts
from secondguess.runtime.fingerprint import hash_weights
from secondguess.runtime.loading import find_checkpoint
from secondguess.sampling import SamplingParams
from secondguess.train.acceptance import Examples, FitOptions, Fitted, fit

HELD_OUT = 5
"""Every so-manieth prompt is held out."""
BATCH_SIZE = 8
"""Prompts recorded at a time."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class AcceptanceRecipe:
    """What to learn from.

    Args:
        model, drafter, dtype: the pair, as `load` takes them; the drafter has a model.
        prompts: a JSONL file with a `prompt` per line, or `stdlib` for prompts out of the installed standard library.
        num_prompts: of them, evenly spread; every fifth is held out.
        num_tokens: of the target's text behind each prompt.
        temperatures: of the text; above 0 it is written twice, with and without coupled drafts.
        depth: nodes guessed at every place of the text.
        seed: of the texts and of the network's first weights.
        options: how to fit.

    Raises:
        BadInputError: a value that makes no sense.
    """

    model: str
    drafter: str
    prompts: str
    num_prompts: int = 100
    num_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int = 8
    seed: int = 0
    dtype: str = "auto"
    options: FitOptions = field(default_factory=FitOptions)

    def __post_init__(self) -> None:
        _require_from("the number of prompts", self.num_prompts, HELD_OUT, 100_000)
        _require_from("the number of tokens per prompt", self.num_tokens, 1, 100_000)
        _require_from("the depth of the guesses", self.depth, 1, MAX_DRAFT_LENGTH)
        _require_from("the seed", self.seed, 0, 2**31 - 1)
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise BadInputError(f"expected temperatures, each once, got {list(self.temperatures)}")
        if not all(0 <= temperature <= 100 for temperature in self.temperatures):
            raise BadInputError(f"expected temperatures from 0 to 100, got {list(self.temperatures)}")

    @property
    def manners(self) -> list[tuple[float, bool]]:
        """Temperature of the texts, and whether they are coupled."""
        return [
            (temperature, coupled)
            for temperature in self.temperatures
            for coupled in ((False, True) if temperature else (False,))
        ]


def _require_from(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadInputError(f"expected {what} from {low} to {high}, got {value}")


def train_acceptance(recipe: AcceptanceRecipe, report: Report) -> Predictor:
    """Record, fit, calibrate and describe.

    Raises:
        BadInputError: prompts that cannot be read or do not fit the models, or a drafter that has no laws.
        CheckpointError: a model that cannot be loaded.
    """
    workload = read_workload(recipe)
    llm = load_pair(recipe)
    traces = record_traces(llm, workload, recipe, report)
    training, held_out = split(traces, len(workload.prompts))
    fitted = fit(examples_of(training), examples_of(held_out), recipe.options, recipe.seed, report)
    return Predictor(fitted.layers, fitted.calibration, _provenance(recipe, workload, llm, fitted))


def read_workload(recipe: AcceptanceRecipe) -> Workload:
    """The prompts; at least as many as make one to hold out."""
    if recipe.prompts == STANDARD_LIBRARY:
        return standard_library_prompts(recipe.num_prompts)
    workload = load_workload(recipe.prompts, recipe.num_prompts)
    if len(workload.prompts) < HELD_OUT:
        raise BadInputError(
            f"expected at least {HELD_OUT} prompts (every fifth is held out) in {workload.name}, got "
            f"{len(workload.prompts)}"
        )
    return workload


def load_pair(recipe: AcceptanceRecipe) -> LLM:
    """Target and drafter.

    Raises:
        BadInputError: a drafter without a model: it has no laws to learn from.
    """
    paths = draft_model_paths(recipe.drafter)
    if len(paths) != 1:
        raise BadInputError(f"expected a drafter with a model, such as model:PATH, got {recipe.drafter!r}")
    return load(recipe.model, recipe.drafter, controller="fixed:1", dtype=recipe.dtype)


def record_traces(llm: LLM, workload: Workload, recipe: AcceptanceRecipe, report: Report) -> list[Trace]:
    """The target's text in every manner behind every prompt: manner by manner, in the order of the prompts."""
    prompts = [encode(llm.target, prompt) for prompt in workload.prompts]
    traces: list[Trace] = []
    for temperature, coupled in recipe.manners:
        for start in range(0, len(prompts), BATCH_SIZE):
            rows = [
                _row(llm, recipe, prompts[index], index, temperature, coupled)
                for index in range(start, min(start + BATCH_SIZE, len(prompts)))
            ]
            traces += record(
                llm.target.runtime, llm.drafter, llm.verifier, rows, recipe.num_tokens, recipe.depth
            )
            manner = f"temperature {temperature:g}{', coupled' if coupled else ''}"
            report(f"recording, {manner}: {start + len(rows)} of {len(prompts)} prompts")
    return traces


def _row(
    llm: LLM, recipe: AcceptanceRecipe, ids: list[int], index: int, temperature: float, coupled: bool
) -> Row:
    # A trace takes one place at a time, each with room for a whole guess; an end of the text would cut the batch.
    room = recipe.num_tokens + recipe.depth + 2
    most = llm.target.runtime.context_length - room
    if most < 1:
        raise BadInputError(
            f"expected tokens and depth to leave room for a prompt in the context of "
            f"{llm.target.runtime.context_length}, got {recipe.num_tokens} and {recipe.depth}; ask for fewer"
        )
    seed = recipe.seed + index if coupled else None
    params = SamplingParams(max_tokens=room, temperature=temperature, seed=seed)
    row = make_row(llm.target, llm.verifier, ids[-most:], params)
    row.end_tokens = frozenset()
    row.seed = recipe.seed + index
    return row


def split(traces: Sequence[Trace], num_prompts: int) -> tuple[list[Trace], list[Trace]]:
    """Training traces and held-out ones, by prompt."""
    held_out = [index % num_prompts % HELD_OUT == HELD_OUT - 1 for index in range(len(traces))]
    return (
        [trace for trace, out in zip(traces, held_out, strict=True) if not out],
        [trace for trace, out in zip(traces, held_out, strict=True) if out],
    )


def examples_of(traces: Sequence[Trace]) -> Examples:
    """Features and chances of all guesses that were drawn from laws."""
    guesses = [(trace, guess) for trace in traces for part in trace.guesses for guess in part if guess.laws]
    if not guesses:
        raise BadInputError("expected guesses with laws, got none; the texts left the drafter no room")
    depth = max(guess.num_nodes for _, guess in guesses)
    first = features_of_path(guesses[0][1].laws, 0.0, False)
    features = numpy.zeros((len(guesses), depth, len(first[0])))
    chances, real = numpy.zeros((len(guesses), depth)), numpy.zeros((len(guesses), depth), bool)
    for index, (trace, guess) in enumerate(guesses):
        length = min(len(guess.laws), guess.num_nodes)
        features[index, :length] = features_of_path(guess.laws[:length], trace.temperature, trace.coupled)
        chances[index, :length] = guess.chances[:length]
        real[index, :length] = True
    return Examples(features, chances, real)


def _provenance(recipe: AcceptanceRecipe, workload: Workload, llm: LLM, fitted: Fitted) -> dict[str, object]:
    (draft_path,) = draft_model_paths(recipe.drafter)
    return {
        "model": public_name(recipe.model),
        "model_sha256": hash_weights(Path(llm.target.path)),
        "drafter": public_name(recipe.drafter),
        "drafter_sha256": hash_weights(Path(find_checkpoint(draft_path))),
        "dtype": llm.target.dtype,
        "workload": workload.name,
        "workload_sha256": workload.sha256,
        "num_prompts": len(workload.prompts),
        "num_tokens_per_prompt": recipe.num_tokens,
        "depth": recipe.depth,
        "temperatures": list(recipe.temperatures),
        "seed": recipe.seed,
        **fitted.figures,
    }
