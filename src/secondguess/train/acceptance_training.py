"""`secondguess train acceptance`: train a predictor of acceptance from a drafter's probabilities.

The target generates text, the drafter drafts at every position of it (`bench/traces.py`), and each
node is labelled with the probability that the target accepts it. The predictor and its fit are in
`secondguess.train.acceptance_fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy

from secondguess.api import LLM, encode, load, make_row
from secondguess.bench.traces import Trace, record
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.checkpoint.weights import hash_weights
from secondguess.controllers.acceptance_features import features_of_path
from secondguess.controllers.predictor import Predictor
from secondguess.core import MAX_DRAFT_LENGTH, Row
from secondguess.drafters import draft_model_paths
from secondguess.errors import BadInputError
from secondguess.sampling import SamplingParams
from secondguess.train.acceptance_fit import Examples, FitOptions, Fitted, fit
from secondguess.train.stdlib_prompts import STANDARD_LIBRARY, standard_library_prompts
from secondguess.workloads.loading import Workload, load_workload
from secondguess.workloads.provenance import public_name

HELD_OUT_EVERY = 5
"""One in this many prompts is held out."""
BATCH_SIZE = 8
"""Prompts recorded at a time."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class AcceptanceRecipe:
    """Settings of the data and the fit.

    Args:
        model, drafter, dtype: as `load` takes them; the drafter must have a model.
        prompts: a JSONL file with a `prompt` per line, or `stdlib` for prompts from the installed
            standard library.
        num_prompts: number of prompts, evenly spread; every fifth is held out.
        num_tokens: tokens that the target generates for each prompt.
        temperatures: sampling temperatures; above 0, text is generated with and without coupled
            verification.
        depth: draft length at every position.
        seed: seed of the texts and of the network's initial weights.
        options: options of the fit.

    Raises:
        BadInputError: a value out of range.
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
        _require_from("the number of prompts", self.num_prompts, HELD_OUT_EVERY, 100_000)
        _require_from("the number of tokens per prompt", self.num_tokens, 1, 100_000)
        _require_from("the draft depth", self.depth, 1, MAX_DRAFT_LENGTH)
        _require_from("the seed", self.seed, 0, 2**31 - 1)
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise BadInputError(f"expected temperatures, each once, got {list(self.temperatures)}")
        if not all(0 <= temperature <= 100 for temperature in self.temperatures):
            raise BadInputError(f"expected temperatures from 0 to 100, got {list(self.temperatures)}")

    @property
    def manners(self) -> list[tuple[float, bool]]:
        """Sampling conditions of the texts: temperature, and whether verification is coupled."""
        return [
            (temperature, coupled)
            for temperature in self.temperatures
            for coupled in ((False, True) if temperature else (False,))
        ]


def _require_from(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadInputError(f"expected {what} from {low} to {high}, got {value}")


def train_acceptance(recipe: AcceptanceRecipe, report: Report) -> Predictor:
    """Record traces, fit and calibrate a predictor, and return it with its provenance.

    Raises:
        BadInputError: prompts that cannot be read or do not fit the models, or a drafter without
            probabilities.
        CheckpointError: a model that cannot be loaded.
    """
    workload = read_workload(recipe)
    llm = load_pair(recipe)
    traces = record_traces(llm, workload, recipe, report)
    training, held_out = split(traces, len(workload.prompts))
    fitted = fit(examples_of(training), examples_of(held_out), recipe.options, recipe.seed, report)
    return Predictor(fitted.layers, fitted.calibration, _provenance(recipe, workload, llm, fitted))


def read_workload(recipe: AcceptanceRecipe) -> Workload:
    """Return the prompts.

    Raises:
        BadInputError: too few prompts to hold one out.
    """
    if recipe.prompts == STANDARD_LIBRARY:
        return standard_library_prompts(recipe.num_prompts)
    workload = load_workload(recipe.prompts, recipe.num_prompts)
    if len(workload.prompts) < HELD_OUT_EVERY:
        raise BadInputError(
            f"expected at least {HELD_OUT_EVERY} prompts (every fifth is held out) in {workload.name}, got "
            f"{len(workload.prompts)}"
        )
    return workload


def load_pair(recipe: AcceptanceRecipe) -> LLM:
    """Load target and drafter.

    Raises:
        BadInputError: a drafter without a model, which has no probabilities to learn from.
    """
    paths = draft_model_paths(recipe.drafter)
    if len(paths) != 1:
        raise BadInputError(f"expected a drafter with a model, such as model:PATH, got {recipe.drafter!r}")
    return load(recipe.model, recipe.drafter, controller="fixed:1", dtype=recipe.dtype)


def record_traces(llm: LLM, workload: Workload, recipe: AcceptanceRecipe, report: Report) -> list[Trace]:
    """Record a trace for every sampling condition and prompt.

    Returns:
        Traces by condition, and for each condition in the order of the prompts.
    """
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
    # A trace advances by one token per round and needs room for a whole draft each time. End
    # tokens are disabled, because a text that ends would shrink the batch.
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
    """Split traces into training traces and held-out traces, by prompt."""
    held_out = [index % num_prompts % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for index in range(len(traces))]
    return (
        [trace for trace, out in zip(traces, held_out, strict=True) if not out],
        [trace for trace, out in zip(traces, held_out, strict=True) if out],
    )


def examples_of(traces: Sequence[Trace]) -> Examples:
    """Return features and labels of all drafts that have probabilities.

    Raises:
        BadInputError: no such draft.
    """
    drafts = [(trace, guess) for trace in traces for part in trace.drafts for guess in part if guess.dists]
    if not drafts:
        raise BadInputError(
            "expected drafts with distributions, got none; the texts left the drafter no room"
        )
    depth = max(guess.num_nodes for _, guess in drafts)
    first = features_of_path(drafts[0][1].dists, 0.0, False)
    features = numpy.zeros((len(drafts), depth, len(first[0])))
    chances, real = numpy.zeros((len(drafts), depth)), numpy.zeros((len(drafts), depth), bool)
    for index, (trace, guess) in enumerate(drafts):
        length = min(len(guess.dists), guess.num_nodes)
        features[index, :length] = features_of_path(guess.dists[:length], trace.temperature, trace.coupled)
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
