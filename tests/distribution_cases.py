"""Distributions, drafters and helpers of the tests that enumerate output distributions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product
from typing import NoReturn

import torch
from torch import Tensor

from grammar_cases import tiny_matcher
from recursive_rejection import RecursiveVerifier
from secondguess.beyond.images.jacobi import JacobiDrafter
from secondguess.controllers import make_controller
from secondguess.controllers.base import Controller
from secondguess.controllers.cost.controller import CostController, CostOptions
from secondguess.controllers.cost.times import RoundTimes
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Budgets, Candidate, Draft, RoundTime, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.model import ModelDrafter
from secondguess.drafters.suffix import SuffixDrafter, SuffixOptions
from secondguess.drafters.trees import TreeOptions
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.proof.enumeration import (
    Branch,
    TextProbs,
    enumerate_rounds,
    exact_dist,
    largest_difference,
    text_dist,
)
from secondguess.proof.fakes import NextTokenDist, ScriptedDrafter, TableModel, random_probs
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import Noise
from secondguess.sampling.probs import compute_target_probs
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import Verifier
from tree_drafter import DistTreeDrafter
from vocabulary_cases import tiny_pair

ROUNDING = 1e-12
PROMPT = (0, 1)


@dataclass(frozen=True)
class Pair:
    """Next-token distributions of a target and a drafter over the same few tokens."""

    vocab_size: int
    target: NextTokenDist
    drafter: NextTokenDist


def one_hot_dist(vocab_size: int, seed: int) -> NextTokenDist:
    sharp = random_probs(vocab_size, seed)
    return cache(lambda context: torch.nn.functional.one_hot(sharp(context).argmax(), vocab_size).double())


def confined_dist(vocab_size: int, seed: int, tokens: Sequence[int]) -> NextTokenDist:
    """Return a random distribution over some of the tokens."""
    free = random_probs(vocab_size, seed)
    kept = torch.zeros(vocab_size, dtype=torch.float64)
    kept[list(tokens)] = 1.0

    @cache
    def dist(context: tuple[int, ...]) -> Tensor:
        probs = free(context) * kept
        return probs / probs.sum()

    return dist


def sometimes(one: NextTokenDist, other: NextTokenDist) -> NextTokenDist:
    """Return one distribution after contexts with an even sum, the other after the rest."""
    return lambda context: (one if sum(context) % 2 == 0 else other)(context)


def turned(*probs: float) -> NextTokenDist:
    """Return probabilities whose tokens are rotated by the sum of the context."""
    return cache(lambda context: torch.tensor(probs, dtype=torch.float64).roll(sum(context)))


PAIRS = {
    "binary": Pair(2, random_probs(2, 1), random_probs(2, 2)),
    "ternary": Pair(3, random_probs(3, 3), random_probs(3, 4)),
    "zeros": Pair(3, random_probs(3, 5, zeros=0.4), random_probs(3, 6, zeros=0.4)),
    "equal": Pair(3, random_probs(3, 7), random_probs(3, 7)),
    "equal-at-times": Pair(3, random_probs(3, 8), sometimes(random_probs(3, 8), random_probs(3, 9))),
    "certain-target": Pair(3, one_hot_dist(3, 10), random_probs(3, 11)),
    "certain-drafter": Pair(3, random_probs(3, 12), one_hot_dist(3, 13)),
    "disjoint": Pair(4, confined_dist(4, 14, [0, 1]), confined_dist(4, 15, [2, 3])),
    "rare": Pair(3, turned(0.6, 0.3995, 0.0005), turned(0.9, 0.0998, 0.0002)),
    "sharp": Pair(3, random_probs(3, 16, sharpness=6), random_probs(3, 17, sharpness=6)),
}
PAIRS_WITH_END = {
    "four": Pair(4, random_probs(4, 30), random_probs(4, 31)),
    "four-zeros": Pair(4, random_probs(4, 32, zeros=0.3), random_probs(4, 33, zeros=0.3)),
}
"""Pairs over the vocabulary of `grammar_cases`; in the second, what a grammar allows can be impossible."""
SAMPLED = SamplingParams(temperature=1.0, max_tokens=20)
VOCABULARIES = {
    "wholly": (["a", "b", "c"], ["c", "a", "b"]),
    "partly": (["a", "b", "c"], ["x", "c", "b", "bb"]),
    "straddling": (["a", "b", "ab"], ["b", "a", "ba"]),
    "none": (["a", "b", "c"], ["ab", "ba", "ac", "cb"]),
}
"""Tokens of a target and of a draft model, by what they share."""


def script(row: Row) -> list[int]:
    """Return a deterministic draft that depends on the row's tokens."""
    return [(sum(row.tokens) + place) % 2 for place in range(4)]


class TreeDrafter(Drafter):
    """Drafter that proposes one fixed deterministic tree for every row."""

    name = "tree"
    deterministic = True

    def __init__(self, tokens: Sequence[int], parents: Sequence[int]) -> None:
        self.tokens = tokens
        self.parents = parents

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        as_rows = lambda values: torch.tensor(values).repeat(len(rows), 1)  # noqa: E731
        lengths = torch.full((len(rows),), len(self.tokens))
        return Draft(as_rows(self.tokens), as_rows(self.parents), lengths)


class SometimesScripted(ScriptedDrafter):
    """Scripted drafter that drafts only after texts with an odd sum, such as the prompt."""

    def candidates(self, rows: Sequence[Row]) -> list[tuple[Candidate]]:
        return [(Candidate(longest=4 if sum(row.tokens) % 2 else 0, deterministic=True),) for row in rows]


def make_pair_drafter(kind: str, pair: Pair) -> Drafter:
    """Return a drafter.

    `sampled`, `deterministic` (without probabilities), `jacobi`, `shared` (for rows with a history), a `tree` or
    `small-tree` of tokens, `text` (of a model with another vocabulary, for targets of three tokens), or `either` in turn.
    """
    if kind == "sampled":
        return ModelDrafter(TableModel(pair.vocab_size, pair.drafter), "model:table", pair.vocab_size)
    if kind == "deterministic":
        return ScriptedDrafter(script)
    if kind == "jacobi":
        return JacobiDrafter()
    if kind == "shared":
        return make_shared_drafter()
    if kind == "text":
        return make_other_drafter("straddling")
    if kind == "either":
        parts = [SometimesScripted(script), make_pair_drafter("sampled", pair)]
        return CombinedDrafter(parts, pair.vocab_size)
    if kind == "small-tree":
        return TreeDrafter(tokens=[0, 1, 2], parents=[-1, 0, 0])
    assert kind == "tree"
    return TreeDrafter(tokens=[0, 1, 1, 0, 1], parents=[-1, -1, 0, 1, 1])


def make_other_drafter(shared: str) -> TranslatingDrafter:
    """Return a draft model with another vocabulary, for a target of three tokens; see `VOCABULARIES`."""
    vocabularies = tiny_pair(*VOCABULARIES[shared])
    size = len(VOCABULARIES[shared][1])  # without a token for unknown text, which would never be drafted
    runtime = TableModel(size, random_probs(size, 40, zeros=0.3))
    return TranslatingDrafter(runtime, "model:table", 3, vocabularies)


def make_shared_drafter() -> SuffixDrafter:
    """Return a look-up that has nothing to draft from in `PROMPT`, and outputs of earlier rows of the owner ""."""
    drafter = SuffixDrafter(SuffixOptions(min=1, factor=2.0, threshold=0.0))
    for output in ((0, 1, 1, 0), (1, 1, 0, 1), (0, 1, 1, 1)):
        row = Row([*PROMPT], SamplingParams(max_tokens=4), history="")
        for token in output:
            row.commit([], token)
        drafter.release(row)
    return drafter


def make_tree_drafter(
    pair: Pair, widths: Sequence[int], without_replacement: bool, min_prob: float = 0.0
) -> DistTreeDrafter:
    """Return a drafter of trees; with `min_prob` only nodes on more probable paths get children."""
    grows = (lambda prob: prob > min_prob) if min_prob else None
    return DistTreeDrafter(pair.vocab_size, pair.drafter, widths, without_replacement, grows)


def make_grown_drafter(pair: Pair, tree: str = "2x1", **options: int) -> ModelDrafter:
    """Return a `ModelDrafter` with a tree shape over the pair's draft distribution."""
    shape = TreeOptions(tree, **options).shape
    return ModelDrafter(TableModel(pair.vocab_size, pair.drafter), "model:table", pair.vocab_size, shape)


def play(
    pair: Pair,
    drafter: Drafter,
    verifier: Verifier | str,
    controller: Controller | str,
    params: SamplingParams = SAMPLED,
    num_rounds: int = 1,
    **row_settings: object,
) -> list[Branch]:
    """Return all branches of the decoding loop's first rounds after the prompt."""
    if verifier == RecursiveVerifier.name:
        verifier = RecursiveVerifier()
    rule = make_verifier(verifier) if isinstance(verifier, str) else verifier
    decider = make_controller(controller) if isinstance(controller, str) else controller
    components = Components(TableModel(pair.vocab_size, pair.target), drafter, rule, decider)

    def make_rows() -> list[Row]:
        return [Row(list(PROMPT), params, grammar=tiny_matcher(params, pair.vocab_size), **row_settings)]

    (branches,) = enumerate_rounds(components, make_rows, num_rounds)
    return branches


class SharedRaces(Noise):
    """Races between two tokens in which all rounds share the noise of a position, as in `KeyedNoise`.

    With e_0, e_1 ~ Exp(1) and u = e_0 / (e_0 + e_1), which is uniform, e_0 / p < e_1 / (1 - p) if and only if u < p.

    Args:
        uniforms: `[row, position]`, u of every position of the output.
        starts: `[row]`, length of the output at the beginning of the round.
    """

    def __init__(self, uniforms: Tensor, starts: Tensor) -> None:
        self.uniforms, self.starts = uniforms, starts
        self.coupled = torch.ones(len(starts), dtype=torch.bool)
        self.greedy = ~self.coupled

    def race(self, dists: Tensor, depths: Tensor) -> Tensor:
        places = (self.starts[:, None] + depths).clamp(max=self.uniforms.shape[1] - 1)
        return (self.uniforms.gather(1, places) >= dists[..., 0]).long()

    def draft(self, dists: Tensor, depth: int, *_: object) -> Tensor:  # type: ignore[override]
        return self.race(dists[:, None], torch.full((len(dists), 1), depth))[:, 0]

    def select(self, rows: Tensor) -> SharedRaces:
        return SharedRaces(self.uniforms[rows], self.starts[rows])

    def accept(self, probs: object) -> NoReturn:
        raise AssertionError("a coupled row accepts nothing by chance")

    draw = accept  # type: ignore[assignment]


def coupled_text_dist(
    pair: Pair, drafter: Drafter, length: int, num_tokens: int = 4, verifier: str = "coupled"
) -> TextProbs:
    """Return the exact distribution of coupled texts over two tokens, decoded to their ends.

    The uniform of a position matters only by its place among the probabilities of token 0 after all texts up to there.
    One row decodes for each combination of such places, with its probability.
    """
    cells: list[list[tuple[float, float]]] = []
    for place in range(num_tokens):
        texts = product(range(2), repeat=place)
        limits = sorted({0.0, 1.0, *(float(pair.target((*PROMPT, *text))[0]) for text in texts)})
        cells.append([((low + high) / 2, high - low) for low, high in pairwise(limits)])
    outcomes = list(product(*cells))
    params = SamplingParams(temperature=1.0, max_tokens=num_tokens)
    rows = {Row(list(PROMPT), params, coupled=True): [u for u, _ in outcome] for outcome in outcomes}

    def make_noise(members: Sequence[Row]) -> SharedRaces:
        uniforms = torch.tensor([rows[row] for row in members], dtype=torch.float64)
        return SharedRaces(uniforms, torch.tensor([row.num_output for row in members]))

    target, controller = TableModel(2, pair.target), make_controller(f"fixed:{length}")
    components = Components(target, drafter, make_verifier(verifier), controller, make_noise=make_noise)
    for _ in decode(components, list(rows)):
        pass
    found: TextProbs = {}
    for row, outcome in zip(rows, outcomes, strict=True):
        text = tuple(row.output)
        found[text] = found.get(text, 0.0) + math.prod(chance for _, chance in outcome)
    return found


class EvenTimes(RoundTimes):
    """Round times that are the same at every batch size: an enumeration puts all branches into one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_plain(1, 5, 1.0)

    def needs_plain(self, num_rows: int, context: float) -> bool:
        return False

    def plain(self, num_rows: int) -> float:
        return 1.0

    def pass_cost(self, num_rows: int, num_nodes: int) -> float:
        return 0.01 * num_nodes / num_rows


@cache
def seasoned(length: int = 3, step: float = 0.02, accepted: float = 0.6) -> CostController:
    """Return a `cost` controller with observations in which drafting pays, so that its first round drafts.

    Enumeration works on copies of it.

    Args:
        length: its largest draft length.
        step: seconds of a draft step, where a plain round takes 1 second.
        accepted: approximate acceptance rate of the observations.
    """
    controller = CostController(CostOptions(length))
    controller.times = EvenTimes()
    pattern = torch.rand(200, generator=torch.Generator().manual_seed(7)).tolist()
    for part, deterministic in ((0, False), (0, True), (1, False)):
        row = Row([0] * 5, SAMPLED)
        for fate in pattern:
            plan = controller.plan([row], [(Candidate(part=part, deterministic=deterministic),)])[0]
            for depth in range(plan.length - 1):
                if not deterministic:
                    dist = torch.tensor([[0.5, 0.3, 0.2]])
                    if not controller.keep_drafting([row], DraftProbs(dist.log()), depth)[0]:
                        plan = plan._replace(length=depth + 1)
                        break
            kept = plan.length if fate < accepted else 0
            draft = Draft.chains([[0] * plan.length])
            verdict = Verdict.from_chain([kept], [0])
            drafting = step * plan.length
            time = RoundTime(prefill=0.0, draft=drafting, total=1 + drafting + 0.01 * plan.length)
            controller.learn([row], draft, verdict, time)
        controller.release(row)
    return controller


def with_observations(controller: str) -> Controller:
    """Return a controller by its name; `cost` begins with plain rounds, so it gets observations."""
    name, _, length = controller.partition(":")
    return seasoned(int(length)) if name == "cost" else make_controller(controller)


def dist_error(
    branches: Sequence[Branch],
    next_dist: Callable[[tuple[int, ...]], Tensor],
    num_tokens: int,
    end_tokens: frozenset[int] = frozenset(),
) -> float:
    """Return the largest error in the probability of any text of that many tokens."""
    found = text_dist(branches, next_dist, num_tokens, end_tokens)
    return largest_difference(found, exact_dist(next_dist, num_tokens, end_tokens))


def after_prompt(dist: NextTokenDist) -> Callable[[tuple[int, ...]], Tensor]:
    return lambda output: dist((*PROMPT, *output))


def plain_dist(pair: Pair, params: SamplingParams) -> Callable[[tuple[int, ...]], Tensor]:
    """Return the distribution of plain decoding as a function of the output so far."""

    def next_dist(output: tuple[int, ...]) -> Tensor:
        row = Row(list(PROMPT), params)
        row.tokens.extend(output)
        logits = pair.target(tuple(row.tokens)).log()[None, None]
        return compute_target_probs(logits, [row], Draft.empty(1))[0, 0]

    return next_dist


def mean_accepted(branches: Sequence[Branch]) -> float:
    return sum(branch.probability * branch.num_accepted for branch in branches)


def expected_accepted(pair: Pair, length: int, rule: str) -> float:
    """Return the mean number of accepted nodes of a sampled chain by the formulas in docs/verifiers.md."""
    total = 0.0
    for draft in product(range(pair.vocab_size), repeat=length):
        chance, survival = 1.0, 1.0
        for place, token in enumerate(draft):
            context = (*PROMPT, *draft[:place])
            p, q = float(pair.target(context)[token]), float(pair.drafter(context)[token])
            chance *= q
            if chance == 0:
                break
            ratio = p / q
            survival = survival * min(1.0, ratio) if rule == "rejection" else min(1.0, survival * ratio)
            # The draft's further tokens sum to one, so a prefix is counted with the chance of its last token.
            rest = pair.vocab_size ** (length - place - 1)
            total += chance * survival / rest
    return total


def outcome_dist(branches: Sequence[Branch]) -> dict[tuple[int, tuple[int, ...]], float]:
    """Return the joint distribution of the number of accepted nodes and the committed text."""
    dist: dict[tuple[int, tuple[int, ...]], float] = {}
    for branch in branches:
        outcome = branch.num_accepted, branch.tokens
        dist[outcome] = dist.get(outcome, 0.0) + branch.probability
    return dist


@dataclass(frozen=True)
class TreeGains:
    """Mean accepted nodes per round: of a tree under two verifiers, and of a chain of its depth under `block`."""

    traversal: float
    recursive: float
    chain: float


@cache
def chain_branches(pair: str, drafter: str, verifier: str, controller: str) -> list[Branch]:
    """Return all branches of a round with a drafter from `make_pair_drafter`."""
    return play(PAIRS[pair], make_pair_drafter(drafter, PAIRS[pair]), verifier, with_observations(controller))


@cache
def tree_branches(pair: str, widths: tuple[int, ...], without_replacement: bool, rule: str) -> list[Branch]:
    """Return all branches of a round with such a tree."""
    return play(PAIRS[pair], make_tree_drafter(PAIRS[pair], widths, without_replacement), rule, "fixed:9")


def tree_gains(pair: str, widths: tuple[int, ...], without_replacement: bool) -> TreeGains:
    """Return the mean accepted nodes of a tree, as in the table in docs/verifiers.md."""
    accepted = [
        mean_accepted(tree_branches(pair, widths, without_replacement, rule))
        for rule in ("traversal", "recursive")
    ]
    return TreeGains(*accepted, expected_accepted(PAIRS[pair], len(widths), "block"))
