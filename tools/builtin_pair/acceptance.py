"""Training of the predictor that the controller `learned` reads, for any target and draft model.

The target generates text, the drafter drafts at every position of it, and each node is labelled
with the probability that the target accepts it. The fit is in `acceptance_fit.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy
import torch
from torch import Tensor

from builtin_pair.acceptance_fit import Drafts, fit
from secondguess.api import LLM, encode, load
from secondguess.checkpoint.resolve import find_checkpoint
from secondguess.checkpoint.weight_files import hash_weights
from secondguess.controllers.base import Controller
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.controllers.predictor import PathFeatures, Predictor
from secondguess.core import Candidate, Draft, Plan, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters import draft_model_paths
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import Noise
from secondguess.train.stdlib_prompts import STANDARD_LIBRARY, standard_library_prompts
from secondguess.verifiers.base import Exactness, Verifier, likelihood_ratios, query_depths
from secondguess.workloads.loading import Workload, load_workload
from secondguess.workloads.provenance import public_name

HELD_OUT_EVERY = 5
"""One in this many prompts is held out."""
BATCH_SIZE = 8
"""Prompts recorded at a time."""

Report = Callable[[str], None]
RecordedDraft = tuple[list[list[float]], list[float]]
"""Features `[depth][feature]` of a draft's nodes, and their acceptance probabilities `[depth]`."""


@dataclass(frozen=True)
class AcceptanceRecipe:
    """Settings of the data and the fit.

    Args:
        model, drafter, dtype: as `load` takes them; the drafter must have a model.
        prompts: a file of prompts, or `stdlib` for prompts from the installed standard library.
        num_prompts: number of prompts, evenly spread; every fifth is held out.
        num_tokens: tokens that the target generates for each prompt.
        temperatures: sampling temperatures; above 0, text is generated with and without coupled
            verification.
        depth: draft length at every position.
        seed: seed of the texts and of the network's initial weights.
        reject_weight: weight of rejections in the loss.
    """

    model: str = "builtin"
    drafter: str = "model:builtin-draft"
    prompts: str = STANDARD_LIBRARY
    num_prompts: int = 100
    num_tokens: int = 64
    temperatures: tuple[float, ...] = (0.0, 1.0)
    depth: int = 8
    seed: int = 0
    dtype: str = "auto"
    reject_weight: float = 6.0

    @property
    def manners(self) -> list[tuple[float, bool]]:
        """Sampling conditions of the texts: temperature, and whether verification is coupled."""
        return [
            (temperature, coupled)
            for temperature in self.temperatures
            for coupled in ((False, True) if temperature else (False,))
        ]


def train_acceptance(recipe: AcceptanceRecipe, report: Report) -> Predictor:
    """Record drafts, fit and calibrate a predictor, and return it with its provenance.

    Raises:
        BadInputError: prompts that cannot be read or do not fit the models, or a drafter without a
            model or of trees.
        CheckpointError: a model that cannot be loaded.
    """
    workload = _read_workload(recipe)
    llm, draft_path = _load_pair(recipe)
    training, held_out = record_drafts(llm, workload.prompts, recipe, report)
    provenance = {
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
    }
    return fit(training, held_out, recipe.reject_weight, recipe.seed, provenance)


def _read_workload(recipe: AcceptanceRecipe) -> Workload:
    if recipe.prompts == STANDARD_LIBRARY:
        return standard_library_prompts(recipe.num_prompts)
    workload = load_workload(recipe.prompts, recipe.num_prompts)
    if len(workload.prompts) < HELD_OUT_EVERY:
        raise BadInputError(
            f"expected at least {HELD_OUT_EVERY} prompts (every fifth is held out) in {workload.name}, got "
            f"{len(workload.prompts)}"
        )
    return workload


def _load_pair(recipe: AcceptanceRecipe) -> tuple[LLM, str]:
    """Load target and drafter, and return them with the path of the draft model."""
    paths = draft_model_paths(recipe.drafter)
    if len(paths) != 1:
        raise BadInputError(f"expected a drafter with a model, such as model:PATH, got {recipe.drafter!r}")
    llm = load(recipe.model, recipe.drafter, controller="fixed:1", dtype=recipe.dtype)
    if llm.drafter.can_draft_trees:
        raise BadInputError(
            f"expected a drafter of chains, got {recipe.drafter!r}; leave out its option tree"
        )
    return llm, paths[0]


def record_drafts(
    llm: LLM, prompts: Sequence[str], recipe: AcceptanceRecipe, report: Report
) -> tuple[Drafts, Drafts]:
    """Record drafts at every position of texts of every sampling condition.

    Returns:
        The drafts of training prompts and those of held-out prompts.
    """
    # The text advances by one token per round and needs room for a whole draft each time.
    room = recipe.num_tokens + recipe.depth + 2
    most = llm.target.runtime.context_length - room
    if most < 1:
        raise BadInputError(
            f"expected tokens and depth to leave room for a prompt in the context of "
            f"{llm.target.runtime.context_length}, got {recipe.num_tokens} and {recipe.depth}; ask for fewer"
        )
    ids = [encode(llm.target, prompt)[-most:] for prompt in prompts]
    recorded: tuple[list[RecordedDraft], list[RecordedDraft]] = ([], [])
    for temperature, coupled in recipe.manners:
        params = SamplingParams(max_tokens=room, temperature=temperature)
        for start in range(0, len(ids), BATCH_SIZE):
            numbers = range(start, min(start + BATCH_SIZE, len(ids)))
            # Without end tokens: a text that ends would shrink the batch.
            rows = [Row(ids[n], params, seed=recipe.seed + n, coupled=coupled) for n in numbers]
            drafts_of_rows = record(llm.target.runtime, llm.drafter, rows, recipe.num_tokens, recipe.depth)
            for n, drafts in zip(numbers, drafts_of_rows, strict=True):
                recorded[n % HELD_OUT_EVERY == HELD_OUT_EVERY - 1].extend(drafts)
            manner = f"temperature {temperature:g}{', coupled' if coupled else ''}"
            report(f"recording, {manner}: {numbers.stop} of {len(ids)} prompts")
    training, held_out = map(_stack, recorded)
    return training, held_out


def _stack(drafts: Sequence[RecordedDraft]) -> Drafts:
    if not drafts:
        raise BadInputError(
            "expected drafts of full depth for training and held-out prompts, got none; the texts left the "
            "drafter no room: ask for fewer tokens or a smaller depth"
        )
    features, acceptance_probs = zip(*drafts, strict=True)
    return Drafts(
        torch.tensor(features, dtype=torch.float64), torch.tensor(acceptance_probs, dtype=torch.float64)
    )


def record(
    target: Runtime, drafter: Drafter, rows: Sequence[Row], num_tokens: int, depth: int
) -> list[list[RecordedDraft]]:
    """Extend rows by `num_tokens` tokens of the target, and return the drafts of each row.

    Drafts that a full context cuts below `depth` are left out.
    """
    recorder = DraftRecorder(depth, len(rows))
    for _ in islice(decode(Components(target, drafter, recorder, recorder), rows), num_tokens):
        pass
    return recorder.drafts


class DraftRecorder(Controller, Verifier):
    """Controller and verifier that record drafts and commit one token of the target per round.

    Args:
        depth: nodes to record; one more is drafted, because `keep_drafting` is not called after the last.
        num_rows: batch size.
    """

    name = "recorder"
    exactness = Exactness.LOSSLESS

    def __init__(self, depth: int, num_rows: int) -> None:
        self.drafts: list[list[RecordedDraft]] = [[] for _ in range(num_rows)]
        self._depth = depth
        self._path_features = PathFeatures()
        self._levels: list[list[list[float]]] = []

    def plan(self, rows: Sequence[Row], candidates: Sequence[Sequence[Candidate]]) -> list[Plan]:
        self._levels = []
        parts = [next(each.part for each in choices if not each.deterministic) for choices in candidates]
        return [Plan(part, self._depth + 1) for part in parts]

    def keep_drafting(self, rows: Sequence[Row], draft_probs: DraftProbs, depth: int) -> list[bool]:
        self._levels.append(self._path_features.level_features(rows, draft_probs, depth))
        return [True] * len(rows)

    def verify(self, draft: Draft, target_probs: Tensor, noise: Noise) -> Verdict:
        chosen = noise.race(target_probs, query_depths(draft))
        self._record(draft, acceptance_probs(draft, target_probs, chosen, noise))
        return Verdict.from_chain([0] * draft.num_rows, chosen[:, 0].tolist())

    def verify_greedy(self, draft: Draft, chosen: Sequence[Sequence[int]]) -> Verdict:
        pairs = zip(draft.token_lists, chosen, strict=True)
        self._record(
            draft, [[float(one == other) for one, other in zip(*each, strict=False)] for each in pairs]
        )
        return Verdict.from_chain([0] * draft.num_rows, [row[0] for row in chosen])

    def _record(self, draft: Draft, acceptance_probs: Sequence[Sequence[float]]) -> None:
        for index, length in enumerate(draft.lengths.tolist()):
            if length > self._depth:
                features = [level[index] for level in self._levels[: self._depth]]
                self.drafts[index].append((features, list(acceptance_probs[index][: self._depth])))


def acceptance_probs(draft: Draft, target_probs: Tensor, chosen: Tensor, noise: Noise) -> list[list[float]]:
    """Return the acceptance probability `[row][node]` of each node of chains given its prefix.

    It is that of the rejection rule (arXiv 2211.17192), min(1, p(x) / q(x)), the training target
    of SpecDec++ (arXiv 2405.19715). At temperature 0 and for coupled rows it is 1 or 0, as the
    text `chosen` `[row, query]` is decided before the draft.
    """
    ratios = likelihood_ratios(draft, target_probs).clip(max=1)
    matches = (draft.tokens == chosen[:, :-1]).cpu().numpy()
    acceptance_probs: list[list[float]] = numpy.where(noise.coupled[:, None], matches, ratios).tolist()
    return acceptance_probs
