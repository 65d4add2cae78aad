"""Statistical certificate that decoding samples from the target's distribution.

Exact probabilities come from the model's own forward pass, without cache, batch, draft or our
attention. Samples come from the real decoding loop and runtime: batches, KV caches, the drafter,
keyed noise. Texts of a few tokens are sorted into cells; the cell counts are tested in two ways.

*G-test* of the hypothesis that the counts follow the target's distribution:
G = 2 sum n_c ln(n_c / n p_c), pooling cells with an expected count below 5.

*Upper bound on the total variation distance.* Let P be the target's distribution over cells, Q the
unknown one of the decoding loop, and Q' the observed frequencies of n texts. Then
TV(P, Q) <= E TV(P, Q'), because the distance is convex. One sample changes TV(P, Q') by at most
1/n, so by McDiarmid's inequality, with probability 1 - delta,

    TV(P, Q) <= TV(P, Q') + sqrt(ln(1 / delta) / (2 n))

for every Q. The bound is not asymptotic; the number of cells enters only through TV(P, Q').
"""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from secondguess.checkpoint.loader import reference_module
from secondguess.controllers import make_controller
from secondguess.core import Commit, Draft, Row
from secondguess.decode import Components, decode
from secondguess.drafters.none import NoDrafter
from secondguess.drafters.spec import make_drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats, StatsRecorder
from secondguess.validation import Count, Settings, Temperature
from secondguess.verifiers import make_verifier

if TYPE_CHECKING:
    from secondguess.api import LLM

Text = tuple[int, ...]
TINY_DRAFTER = "perturbed-copy"
"""Name of the draft model of `tiny_system`."""
OTHER_TOKEN = -1
"""Placeholder, at the end of a cell, for all tokens without a branch of their own there."""
MIN_EXPECTED = 5.0
Share = Annotated[float, Field(gt=0, lt=1)]
MIN_P_VALUE = 1e-6
FEW_TOKENS = 1.05
"""Tokens per target pass below which verification is hardly tested."""

Progress = Callable[[int, int, str], None]
"""Callback with (done, total, description)."""


class CertifyOptions(Settings):
    """Sample size and thresholds of a certificate.

    Args:
        num_samples: texts to sample.
        num_tokens: tokens per text. Longer texts take several rounds.
        num_cells: approximate number of cells.
        temperature: sampling temperature of target and drafter.
        limit: largest bound with which the certificate passes.
        delta: probability that the bound is wrong.
        batch_size: rows decoded together.
        seed: seed of the noise; the same seed gives the same certificate.

    Raises:
        BadInputError: a value is out of range.
    """

    num_samples: Annotated[int, Field(ge=1000)] = 200_000
    num_tokens: Count = 4
    num_cells: Annotated[int, Field(ge=2)] = 81
    temperature: Temperature = 1.0
    limit: Share = 0.01
    delta: Share = 1e-6
    batch_size: Count = 1024
    seed: Annotated[int, Field(ge=0, lt=2**64)] = 0

    @model_validator(mode="after")
    def _check_num_samples(self) -> Self:
        if self.slack >= self.limit:
            least = math.floor(math.log(1 / self.delta) / (2 * self.limit**2)) + 1
            raise BadInputError(
                f"expected at least {least:,} samples for a limit of {self.limit:g} at delta = {self.delta:g}, got "
                f"{self.num_samples:,}, with which no certificate can pass; draw more samples, or raise the limit"
            )
        return self

    @property
    def slack(self) -> float:
        """Difference between the bound and the observed distance."""
        return math.sqrt(math.log(1 / self.delta) / (2 * self.num_samples))


@dataclass(frozen=True)
class CertifiedSystem:
    """Decoding configuration under test."""

    components: Components
    reference_logits: Callable[[Sequence[int]], Tensor]  # [vocab] after a text, without this package's code
    prompt: Text  # token ids that every text continues
    model: str  # the target's name
    dtype: str  # of the target's weights


@dataclass(frozen=True)
class Certificate:
    """Tested configuration and results.

    Args:
        runtime: class of the target's runtime.
        bound: upper bound on the total variation distance between the cell distributions, with
            confidence `1 - delta`.
        distance: total variation distance between the observed frequencies and the target's cell
            distribution.
        p_value: p-value of the G-test.
        num_cells: number of cells.
        covers_all_texts: each text has a cell of its own; otherwise differences inside a cell are
            not detected.
        acceptance_rate: accepted over drafted nodes; None when nothing was drafted.
        acceptance_length: tokens per target pass.
        accepted_per_position: accepted draft tokens at position 0, 1, ... of a draft.
        rejected_per_position: drafts whose first rejected token was at this position. Tokens after
            it were never compared with the target, so they are in neither list.
    """

    model: str
    runtime: str
    drafter: str
    verifier: str
    exactness: str
    controller: str
    dtype: str
    temperature: float
    num_tokens: int
    num_samples: int
    num_cells: int
    covers_all_texts: bool
    distance: float
    bound: float
    limit: float
    delta: float
    p_value: float
    acceptance_rate: float | None
    acceptance_length: float
    accepted_per_position: list[int]
    rejected_per_position: list[int]
    seconds: float

    @property
    def is_conclusive(self) -> bool:
        """False if nothing was drafted although there is a drafter: only plain decoding was tested."""
        return self.acceptance_rate is not None or self.drafter == NoDrafter.name

    @property
    def passed(self) -> bool:
        """True if the distributions agree, within the limit, and drafts were verified."""
        return self._agrees and self.is_conclusive

    @property
    def _agrees(self) -> bool:
        return self.p_value >= MIN_P_VALUE and self.bound <= self.limit

    def as_dict(self) -> dict[str, object]:
        """Return all fields, `passed` and `is_conclusive`, ready for JSON."""
        return {"passed": self.passed, "is_conclusive": self.is_conclusive, **asdict(self)}

    @property
    def _result(self) -> str:
        if self.passed:
            return "PASSED"
        if self._agrees:
            return (
                f"INCONCLUSIVE: {self.drafter} drafted nothing; give a drafter that samples, such as model:PATH, a "
                "controller that drafts, such as fixed:2, and more than one token, or --drafter none to test plain decoding"
            )
        if self.dtype not in ("bfloat16", "float16"):
            return "FAILED"
        return (
            f"FAILED, the rounding of {self.dtype} included: compare with --dtype float32 or --drafter none"
        )

    def __str__(self) -> str:
        cells = (
            f"for each of the {self.num_cells} texts of {self.num_tokens} tokens"
            if self.covers_all_texts
            else f"for {self.num_cells} cells, groups of texts of {self.num_tokens} tokens that begin alike (the most "
            "probable prefixes, and the rest of each prefix); differences within a cell are not detected"
        )
        rate = self.acceptance_rate
        accepted = "nothing drafted" if rate is None else f"acceptance rate {rate:.0%}"
        verified = zip(self.accepted_per_position, self.rejected_per_position, strict=True)
        positions = [
            f"{position}: {accepted:,} accepted, {rejected:,} rejected"
            for position, (accepted, rejected) in enumerate(verified, start=1)
        ]
        untested = (
            "" if any(self.rejected_per_position) else "; with nothing rejected, rejection is not tested"
        )
        is_short = rate is not None and self.acceptance_length < FEW_TOKENS
        few = "; few were drafted, --controller fixed:2 drafts more" if is_short else ""
        return "\n".join(
            [
                f"target       {self.model} ({self.dtype}, {self.runtime}), temperature {self.temperature:g}",
                f"drafter      {self.drafter}, controller {self.controller}",
                f"verifier     {self.verifier} ({self.exactness})",
                f"compared     {self.num_samples:,} sampled texts with exact probabilities by Transformers, {cells}",
                f"drafting     {accepted}, {self.acceptance_length:.2f} tokens per target pass{few}",
                f"by position  {'; '.join(positions) or 'none'}{untested}",
                f"G-test       p-value {self.p_value:.3g} (fails below {MIN_P_VALUE:g})",
                f"certificate  total variation distance <= {self.bound:.4f} with confidence 1 - {self.delta:g} "
                f"(observed {self.distance:.4f}, limit {self.limit:g})",
                f"duration     {self.seconds:.1f} s",
                f"result       {self._result}",
            ]
        )


def tiny_system(
    drafter: str = "model", verifier: str = "auto", controller: str = "fixed:2"
) -> CertifiedSystem:
    """Return a random model with a vocabulary of three tokens and a real KV cache.

    The parts are given by name; the drafter `model` is a perturbed copy of the target, and none other may have a model.
    """
    from secondguess.checkpoint.loader import module_runtime
    from secondguess.checkpoint.plan import Checkpoint
    from secondguess.runtime.modules.tiny import tiny_pair

    model, _ = tiny_pair()

    def runtime(which: int) -> Runtime:
        own = tiny_pair()[which]  # the reference model must stay intact
        checkpoint = Checkpoint.from_module(own)
        found = module_runtime(checkpoint, checkpoint.runtimes[0], own)
        assert found is not None
        return found

    def load_draft_model(path: str) -> Runtime:
        if path != TINY_DRAFTER:
            raise BadInputError(
                f"expected model:{TINY_DRAFTER} as the draft model of the random target, got 'model:{path}'; name its target too"
            )
        return runtime(1)

    name = f"model:{TINY_DRAFTER}" if drafter == "model" else drafter
    made = make_drafter(name, target_vocab_size=model.config.vocab_size, load_draft_model=load_draft_model)
    components = Components(runtime(0), made, make_verifier(verifier), make_controller(controller))
    return CertifiedSystem(
        components, plain_logits_of(model), (0,), "random Llama with 3 tokens", _name(model.dtype)
    )


def system_of(llm: LLM, prompt: Sequence[int]) -> CertifiedSystem:
    """Return a loaded model and its drafter as a subject whose texts continue the prompt."""
    components = Components(llm.target.runtime, llm.drafter, llm.verifier, llm.controller)
    model = reference_module(llm.target)
    return CertifiedSystem(
        components, plain_logits_of(model), tuple(prompt), llm.target.name, _name(model.dtype)
    )


def plain_logits_of(model: Any) -> Callable[[Sequence[int]], Tensor]:
    """Return a function from token ids to next-token logits `[vocab]` in float64.

    It runs the Transformers model over the whole text, with eager attention and without a cache.
    """

    def reference_logits(tokens: Sequence[int]) -> Tensor:
        ids = torch.tensor([list(tokens)], device=model.device)
        with _eager_attention(model), torch.inference_mode():
            logits: Tensor = model(input_ids=ids, use_cache=False).logits[0, -1]
        return logits.double().cpu()

    return reference_logits


@contextmanager
def _eager_attention(model: Any) -> Iterator[None]:
    ours = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ours)


def certify(
    subject: CertifiedSystem,
    options: CertifyOptions,
    progress: Progress = lambda *_: None,
) -> Certificate:
    """Sample texts with the decoding loop and compare their distribution with the target's.

    `progress` is called with the number of cells whose exact probability is computed, then with
    the number of texts sampled.
    """
    start = time.perf_counter()
    cells = Cells.split(
        _next_dist(subject, options.temperature), options.num_tokens, options.num_cells, progress
    )
    counts, recorder = _sample(subject, options, cells, progress)
    expected = {cell: options.num_samples * mass for cell, mass in cells.masses.items()}
    distance = sum(abs(counts[cell] - count) for cell, count in expected.items()) / (2 * options.num_samples)
    components = subject.components
    return Certificate(
        model=subject.model,
        runtime=type(components.target).__name__,
        drafter=components.drafter.name,
        verifier=components.verifier.name,
        exactness=str(components.verifier.exactness),
        controller=components.controller.name,
        dtype=subject.dtype,
        temperature=options.temperature,
        num_tokens=options.num_tokens,
        num_samples=options.num_samples,
        num_cells=len(cells.masses),
        covers_all_texts=cells.covers_all_texts(options.num_tokens),
        distance=distance,
        bound=distance + options.slack,
        limit=options.limit,
        delta=options.delta,
        p_value=g_test([counts[cell] for cell in expected], list(expected.values())),
        acceptance_rate=recorder.total.acceptance_rate,
        acceptance_length=recorder.total.acceptance_length,
        accepted_per_position=recorder.total.accepted_per_position,
        rejected_per_position=recorder.rejected_per_position,
        seconds=time.perf_counter() - start,
    )


def _next_dist(subject: CertifiedSystem, temperature: float) -> Callable[[Text], Tensor]:
    """Return the target's next-token distribution as a function of the output so far.

    It does not use the package's sampling code, so that the certificate tests that code too.
    """

    def next_dist(output: Text) -> Tensor:
        logits = subject.reference_logits((*subject.prompt, *output))
        if temperature == 0:
            return torch.nn.functional.one_hot(logits.argmax(), logits.numel()).double()
        return (logits / temperature).softmax(-1)

    return next_dist


@dataclass(frozen=True)
class Cells:
    """Partition of texts by prefix, with exact probabilities.

    A cell is a whole text, a prefix, or a prefix that ends in `OTHER_TOKEN`.
    """

    masses: dict[Text, float]  # probability of each cell
    branches: dict[Text, frozenset[int]]  # by split prefix, tokens with a branch of their own

    @classmethod
    def split(
        cls,
        next_dist: Callable[[Text], Tensor],
        num_tokens: int,
        num_cells: int,
        progress: Progress = lambda *_: None,
    ) -> Cells:
        """Build cells by repeatedly splitting the most probable prefix.

        Each split gives the prefix's four most probable tokens a branch each, and the others one
        cell together, until there are about `num_cells` cells of texts of `num_tokens` tokens.
        `next_dist` returns the target's distribution `[vocab]` after an output.
        """
        masses: dict[Text, float] = {}
        branches: dict[Text, frozenset[int]] = {}
        open_prefixes: list[tuple[float, Text]] = [(-1.0, ())]
        while open_prefixes and len(masses) + len(open_prefixes) < num_cells:
            progress(len(masses) + len(open_prefixes), num_cells, "exact probabilities")
            negative_mass, prefix = heapq.heappop(open_prefixes)
            probs = next_dist(prefix)
            top_probs, tokens = probs.topk(min(4, len(probs)))
            branches[prefix] = frozenset(tokens.tolist())
            if len(probs) > len(tokens):
                masses[(*prefix, OTHER_TOKEN)] = -negative_mass * max(0.0, 1 - float(top_probs.sum()))
            for token, prob in zip(tokens.tolist(), top_probs.tolist(), strict=True):
                longer, mass = (*prefix, token), -negative_mass * prob
                if len(longer) == num_tokens:
                    masses[longer] = mass
                else:
                    heapq.heappush(open_prefixes, (-mass, longer))
        return cls(masses | {prefix: -negative for negative, prefix in open_prefixes}, branches)

    def cell_of(self, text: Text) -> Text:
        """Return the cell that contains a text."""
        prefix: Text = ()
        while prefix in self.branches:
            token = text[len(prefix)]
            prefix = (*prefix, token if token in self.branches[prefix] else OTHER_TOKEN)
        return prefix

    def covers_all_texts(self, num_tokens: int) -> bool:
        """Return whether every text of `num_tokens` tokens has a cell of its own."""
        return all(len(cell) == num_tokens and cell[-1] != OTHER_TOKEN for cell in self.masses)


class _TotalRecorder(StatsRecorder):
    """Recorder of the sum over all rows, and of the position at which each draft was rejected."""

    def __init__(self) -> None:
        super().__init__()
        self.total = Stats()
        self._rejected: Counter[int] = Counter()

    def of(self, row: Row) -> Stats:
        return self.total

    def record(
        self, rows: Sequence[Row], draft: Draft, commits: Sequence[Commit], predicted: Sequence[bool] = ()
    ) -> None:
        super().record(rows, draft, commits, predicted)
        for depth, commit in zip(draft.num_levels, commits, strict=True):
            if commit.num_accepted < depth:
                self._rejected[commit.num_accepted] += 1

    @property
    def rejected_per_position(self) -> list[int]:
        return [self._rejected[position] for position in range(len(self.total.drafted_per_position))]


def _sample(
    subject: CertifiedSystem, options: CertifyOptions, cells: Cells, progress: Progress
) -> tuple[Counter[Text], _TotalRecorder]:
    """Return the count of each cell, and the statistics of the rounds."""
    params = SamplingParams(temperature=options.temperature, max_tokens=options.num_tokens)
    draws_by_race = subject.components.drafter.draws_by_race
    coupled = subject.components.verifier.uses_coupling(False, draws_by_race)
    texts: Counter[Text] = Counter()
    components = replace(subject.components, recorder=(recorder := _TotalRecorder()))
    for first in range(0, options.num_samples, options.batch_size):
        last = min(first + options.batch_size, options.num_samples)
        rows = [
            Row(list(subject.prompt), params, seed=options.seed, sample_index=sample, coupled=coupled)
            for sample in range(first, last)
        ]
        progress(first, options.num_samples, "sampling texts")
        for _ in decode(components, rows):
            progress(first + sum(row.finished for row in rows), options.num_samples, "sampling texts")
        texts.update(tuple(row.output) for row in rows)
    counts: Counter[Text] = Counter()
    for text, count in texts.items():
        counts[cells.cell_of(text)] += count
    return counts, recorder


def g_test(observed: Sequence[int], expected: Sequence[float]) -> float:
    """Return the p-value of the G-test of observed against expected counts.

    Cells with an expected count below `MIN_EXPECTED` are pooled with the next rarest, and those
    left over with the last pool. The result is 0 if a cell of probability zero was observed, and 1
    if fewer than two pooled cells remain.
    """
    pooled: list[tuple[float, int]] = []
    rare_expected, rare_observed = 0.0, 0
    for mass, count in sorted(zip(expected, observed, strict=True)):
        if mass == 0 and count:
            return 0.0
        rare_expected, rare_observed = rare_expected + mass, rare_observed + count
        if rare_expected >= MIN_EXPECTED:
            pooled.append((rare_expected, rare_observed))
            rare_expected, rare_observed = 0.0, 0
    if len(pooled) < 2:
        return 1.0
    pooled[-1] = (pooled[-1][0] + rare_expected, pooled[-1][1] + rare_observed)
    statistic = 2 * sum(count * math.log(count / mass) for mass, count in pooled if count)
    half_degrees = torch.tensor((len(pooled) - 1) / 2, dtype=torch.float64)
    half_statistic = torch.tensor(max(statistic, 0.0) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_degrees, half_statistic))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
