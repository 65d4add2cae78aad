"""Helpers of the tests of drafters: a small target, the decoding loop, and one drafter of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from secondguess.beyond.images.grid import GridDrafter, GridOptions
from secondguess.beyond.images.jacobi import JacobiDrafter, JacobiOptions
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.ngram import NgramDrafter, NgramOptions
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.suffix import SuffixDrafter, SuffixOptions
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.proof.fakes import NextTokenDist, TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats
from secondguess.verifiers import make_verifier
from vocabulary_cases import tiny_pair

VOCAB_SIZE = 6
TARGET_DIST = random_probs(VOCAB_SIZE, seed=11)
GREEDY = SamplingParams(max_tokens=14)
PROMPTS = [[1, 2, 3, 1, 2], [0], [5, 5, 5, 5, 5, 5, 5], [4, 3, 4, 3, 4, 3, 2]]


def noisy_dist(dist: NextTokenDist, seed: int, sharpness: float = 1.0) -> NextTokenDist:
    """Return a draft distribution near `dist`: its logits with noise."""
    noise = random_probs(VOCAB_SIZE, seed, sharpness)
    return lambda context: (dist(context).log() + noise(context).log()).softmax(-1)


def worst_dist(dist: NextTokenDist) -> NextTokenDist:
    """Return a draft distribution that is one-hot at the target's least probable token."""

    def worst(context: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(dist(context).argmin(), VOCAB_SIZE).double()

    return worst


def model_drafter(dist: NextTokenDist, **settings: int) -> ModelDrafter:
    """Return a `ModelDrafter` over a function from context to probabilities."""
    return ModelDrafter(TableModel(VOCAB_SIZE, dist, **settings), "model:table", VOCAB_SIZE)


OTHER_TOKENS = ["f", "x", "b", "c", "e", "bc", "d"]
"""Tokens of a draft model for a target whose tokens are the letters from `a` to `f`."""


def other_drafter(tokens: Sequence[str] = OTHER_TOKENS) -> TranslatingDrafter:
    """Return a draft model with another vocabulary, which knows the target's distribution."""

    def dist(context: tuple[int, ...]) -> torch.Tensor:
        text = "".join(tokens[token] for token in context).replace("x", "")
        target = TARGET_DIST(tuple("abcdef".index(letter) for letter in text))
        own = torch.tensor(
            [float(target["abcdef".index(each)]) if each in set("abcdef") else 0.1 for each in tokens]
        )
        return own / own.sum()

    pair = tiny_pair("abcdef", tokens)
    return TranslatingDrafter(TableModel(len(tokens), dist), "model:table", VOCAB_SIZE, pair)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "none": NoDrafter,
    "ngram": lambda: NgramDrafter(NgramOptions(max=3, min=1)),
    "suffix": lambda: SuffixDrafter(SuffixOptions(min=1, factor=2.0, offset=1)),
    "grid": lambda: GridDrafter(GridOptions(width=2)),
    "jacobi": lambda: JacobiDrafter(JacobiOptions(width=2)),
    "model alike": lambda: model_drafter(noisy_dist(TARGET_DIST, seed=5)),
    "model itself": lambda: model_drafter(TARGET_DIST),
    "model worst": lambda: model_drafter(worst_dist(TARGET_DIST)),
    "model of text": other_drafter,
    "suffix or model": lambda: CombinedDrafter(
        [SuffixDrafter(SuffixOptions(min=3)), model_drafter(noisy_dist(TARGET_DIST, seed=5))], VOCAB_SIZE
    ),
    "jacobi or model": lambda: CombinedDrafter(
        [JacobiDrafter(), model_drafter(noisy_dist(TARGET_DIST, seed=5))], VOCAB_SIZE
    ),
    "look-ups in turn": lambda: CombinedDrafter(
        [SuffixDrafter(SuffixOptions(min=2)), NgramDrafter(NgramOptions(max=3, min=1))], VOCAB_SIZE
    ),
    "model short context": lambda: model_drafter(TARGET_DIST, context_length=9),
}
CONTROLLERS = [
    "fixed:0",
    "fixed:1",
    "fixed:4",
    "confidence:6",
    "confidence:6,threshold=0.9",
    "entropy:6",
    "cost",
    "learned:6",
]
ADAPTIVE = ("cost", "entropy", "learned")
"""Controllers that learn from the other rows of a batch, so that draft lengths depend on these rows."""


def is_controlled(drafter: str, controller: str) -> bool:
    """Return whether the controller can decide anything about the drafter's drafts.

    As in `choose_controller`: a drafter that never drafts needs none, and without draft distributions there is nothing
    to read for controllers that stop by them.
    """
    made = DRAFTERS[drafter]()
    if made.never_drafts:
        return controller == "fixed:0"
    return not (made.deterministic and make_controller(controller).needs_probs)


CONTROLLED = [
    (drafter, controller)
    for drafter in DRAFTERS
    for controller in CONTROLLERS
    if is_controlled(drafter, controller)
]


def never_called(dists: torch.Tensor, depth: int, acceptance_probs: object = None) -> list[bool]:
    """Return nothing: a `Budgets.keep_drafting` that fails when it is called."""
    raise AssertionError(
        "keep_drafting was called for a deterministic drafter or a controller that reads no distributions"
    )


@dataclass(frozen=True)
class Run:
    """Output tokens and statistics per row, and the target."""

    outputs: list[list[int]]
    stats: list[Stats]
    target: TableModel


def run(
    drafter: Drafter,
    prompts: Sequence[list[int]] = PROMPTS,
    params: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    controller: str = "fixed:4",
    verifier: str = "auto",
    dist: NextTokenDist = TARGET_DIST,
    vocab_size: int = VOCAB_SIZE,
    **row_settings: object,
) -> Run:
    """Decode prompts to their ends through the loop."""
    target = TableModel(vocab_size, dist)
    components = Components(target, drafter, make_verifier(verifier), make_controller(controller))
    settings = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    rows = [
        Row(list(prompt), each, seed=100 + len(prompt), **row_settings)  # type: ignore[arg-type]
        for prompt, each in zip(prompts, settings, strict=True)
    ]
    for _ in decode(components, rows):
        pass
    return Run([row.output for row in rows], [components.recorder.of(row) for row in rows], target)


def greedy_text(prompt: list[int], num_tokens: int, dist: NextTokenDist = TARGET_DIST) -> list[int]:
    """Return the text of plain greedy decoding, without the package's decoding loop."""
    return list(_greedy_text(tuple(prompt), num_tokens, dist))


@cache
def _greedy_text(prompt: tuple[int, ...], num_tokens: int, dist: NextTokenDist) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(dist(tuple(tokens)).argmax()))
    return tokens[len(prompt) :]
