"""What is compared: small objects that continue a prompt and say how long it took.

`Speculator` is this package: the same loop, the same weights, one drafter and one controller. The systems of
other libraries are in `peers.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import torch

from secondguess.api import choose_controller, make_row
from secondguess.bench.summary import add_up
from secondguess.controllers.base import Controller
from secondguess.core import Row
from secondguess.decode import Team, decode
from secondguess.drafters import make_drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.loading import LoadedModel, check_vocabularies, load_runtime
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats
from secondguess.verifiers import make_verifier


@dataclass(frozen=True)
class Run:
    """One prompt, or several as one batch, continued by one system.

    Args:
        tokens: the new tokens, those of a batch's rows one after the other; empty for a system that tells only how many.
        seconds: wall-clock seconds from token ids to token ids, prefill included.
        stats: what the rounds did, all rows together; None for systems that do not say.
        lengths: how many new tokens each row has; by default it is one row that has them all.
    """

    tokens: list[int]
    seconds: float
    stats: Stats | None = None
    lengths: tuple[int, ...] | None = None

    @classmethod
    def of_batch(cls, texts: Sequence[Sequence[int]], seconds: float, stats: Stats | None = None) -> Run:
        """From the new tokens of each row."""
        return cls([token for text in texts for token in text], seconds, stats, tuple(map(len, texts)))

    @property
    def row_lengths(self) -> tuple[int, ...]:
        return (len(self.tokens),) if self.lengths is None else self.lengths

    @property
    def num_tokens(self) -> int:
        return sum(self.row_lengths)

    @property
    def tells_tokens(self) -> bool:
        """Whether there are texts to compare."""
        return len(self.tokens) == self.num_tokens

    @property
    def texts(self) -> list[list[int]]:
        """The new tokens of each row."""
        ends = list(accumulate(self.row_lengths))
        return [self.tokens[end - length : end] for length, end in zip(self.row_lengths, ends, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """All new tokens over wall-clock seconds."""
        return self.num_tokens / self.seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds without prefill, where that is known."""
        return self.seconds - (self.stats.seconds["prefill"] if self.stats else 0.0)


class System(ABC):
    """One way to continue a prompt.

    Attributes:
        name: how a report calls it, unique within a run.
        family: whose code runs; systems of one family should agree at temperature 0.
        speculates: False for a family's plain decoding, the baseline of the others.
        draft_model: name of the model that drafts; None for plain decoding and look-ups.
        batches: whether it decodes several prompts as one batch; others run at batch size 1 only.
        keeps_length: whether it writes exactly as many tokens as asked; others are compared by tokens/s alone.
    """

    name: str
    family: str
    speculates: bool
    draft_model: str | None = None
    batches: bool = False
    keeps_length: bool = True

    @abstractmethod
    def generate(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Run:
        """Continue a prompt by exactly `num_tokens` tokens (end tokens do not end it); timed inside."""

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        """Continue prompts together, each by exactly `num_tokens` tokens."""
        if len(prompts) != 1:
            raise BadInputError(
                f"expected one prompt for {self.name}, which has no batches, got {len(prompts)}"
            )
        return self.generate(prompts[0], num_tokens, temperature, seed)

    def begin_measuring(self) -> None:
        """The warm-up is over: forget what it taught."""


class Models:
    """The weights of one benchmark, each model loaded once and shared by all systems of this package."""

    def __init__(self, model: str, dtype: str, device: str, quantize: str | None = None) -> None:
        self.target: LoadedModel = load_runtime(model, dtype=dtype, device=device, quantize=quantize)
        self._dtype = dtype
        self._device = device
        self._draft_models: dict[str, LoadedModel] = {}

    def draft_model(self, name: str) -> LoadedModel:
        if name not in self._draft_models:
            self._draft_models[name] = self._load_draft_model(name)
        return self._draft_models[name]

    def _load_draft_model(self, name: str) -> LoadedModel:
        loaded = load_runtime(name, dtype=self._dtype, device=self._device, drafts=True)
        check_vocabularies(self.target, loaded)
        return loaded

    @property
    def draft_models(self) -> dict[str, LoadedModel]:
        """Draft models in use, by the names they were asked for."""
        return dict(self._draft_models)


class ModelsApart(Models):
    """The weights of other models with caches of their own, for texts that are decoded at the same time.

    Raises:
        UnsupportedModelError: runtimes that cannot lend their weights.
    """

    def __init__(self, lender: Models) -> None:
        self.target = with_own_cache(lender.target)
        self._lender = lender
        self._draft_models = {}

    def _load_draft_model(self, name: str) -> LoadedModel:
        return with_own_cache(self._lender.draft_model(name))


def with_own_cache(loaded: LoadedModel) -> LoadedModel:
    """The same weights in a runtime that holds other rows."""
    apart = loaded.runtime.without_layers(())
    assert isinstance(apart, CachedRuntime)  # as every loaded model's
    return replace(loaded, runtime=apart)


class Performance:
    """A batch that is decoded round by round, by a clock that stands still in between."""

    def __init__(self, team: Team, rows: Sequence[Row]) -> None:
        self._team = team
        self._rows = rows
        self._rounds = decode(team, rows)
        self._seconds = 0.0

    def play(self) -> bool:
        """The next round, the first with the reading of the prompts; False when all has been said."""
        start = time.perf_counter()
        with torch.inference_mode():
            goes_on = next(self._rounds, None) is not None
        self._seconds += time.perf_counter() - start
        return goes_on

    def run(self) -> Run:
        """What came of it so far."""
        stats = together([self._team.ledger.of(row) for row in self._rows])
        return Run.of_batch([row.output for row in self._rows], self._seconds, stats)


class Speculator(System):
    """This package with one drafter, under one controller (the drafter's default when none is named).

    A user's controller lives as long as the loaded model. So there is one for each temperature and batch size, made
    after the warm-up, which keeps over the prompts what it has learnt; what it learnt under one condition never
    reaches another.

    Args:
        ends_texts: end tokens end a text, as for a user; else every text has the length that is asked for.
    """

    family = "secondguess"
    batches = True

    def __init__(
        self, models: Models, drafter: str, controller: str | None = None, *, ends_texts: bool = False
    ) -> None:
        self._target = models.target
        self._ends_texts = ends_texts

        def load_draft_model(name: str) -> Runtime:
            self.draft_model = name
            return models.draft_model(name).runtime

        self._drafter = make_drafter(
            drafter,
            target_vocab_size=models.target.runtime.vocab_size,
            load_draft_model=load_draft_model,
            target=self._target,
        )
        self.drafter = drafter
        self._controller = controller
        # Made once already here: an unknown name, or one that this drafter would leave unheard, is refused at once.
        self._make_controller()
        self._controllers: dict[tuple[float, int], Controller] = {}
        self._verifier = make_verifier("auto")
        self.speculates = drafter != "none"
        self.drafts_with_laws = self.speculates and not self._drafter.certain
        self.name = speculator_name(drafter, controller)

    def generate(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Run:
        return self.generate_batch([prompt], num_tokens, temperature, seed)

    def generate_batch(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        performance = self.perform(prompts, num_tokens, temperature, seed)
        while performance.play():
            pass
        return performance.run()

    def release(self) -> None:
        """Give the target's cache back; the next text gets another."""
        self._target.runtime.release()

    def perform(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Performance:
        """What `generate_batch` runs to its end, for those who play its rounds themselves."""
        rows = [
            self._row(prompt, num_tokens, temperature, seed, stream) for stream, prompt in enumerate(prompts)
        ]
        controller = self.controller(temperature, len(prompts))
        return Performance(Team(self._target.runtime, self._drafter, self._verifier, controller), rows)

    def controller(self, temperature: float, batch_size: int) -> Controller:
        """The one that has seen the earlier prompts of this condition."""
        key = (temperature, batch_size)
        if key not in self._controllers:
            self._controllers[key] = self._make_controller()
        return self._controllers[key]

    def _make_controller(self) -> Controller:
        return choose_controller(self._controller, self._drafter)

    def begin_measuring(self) -> None:
        self._controllers.clear()

    def _row(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int, stream: int) -> Row:
        params = SamplingParams(max_tokens=num_tokens, temperature=temperature)
        row = make_row(self._target, self._verifier, list(prompt), params)
        if not self._ends_texts:
            row.end_tokens = frozenset()
        # Known noise, yet the verifier of a request without a seed: that is what users get who ask for none.
        row.seed, row.stream = seed, stream
        return row


def together(rows: Sequence[Stats]) -> Stats:
    """The counters of a batch's rows; its seconds are those of the row that has most of them, since rows share them."""
    total = add_up(rows)
    total.seconds = dict(max(rows, key=lambda stats: sum(stats.seconds.values())).seconds)
    total.drafting_seconds = max(stats.drafting_seconds for stats in rows)
    return total


def speculator_name(drafter: str, controller: str | None = None) -> str:
    """How a report calls one of our systems.

    >>> speculator_name("ngram", "fixed:3"), speculator_name("none")
    ('secondguess ngram fixed:3', 'secondguess plain')
    """
    shown = f"{public_name(drafter)} {controller or ''}".strip()
    return f"secondguess {'plain' if drafter == 'none' else shown}"


def public_name(name: str) -> str:
    """A model or drafter name as a report may show it: an absolute path becomes its last part.

    >>> public_name("model:/data/models/tiny,dtype=float32"), public_name("some/model")
    ('model:tiny,dtype=float32', 'some/model')
    """
    kind, colon, path = name.rpartition(":")
    return f"{kind}{colon}{Path(path).name if Path(path).is_absolute() else path}"


def draft_models(systems: Iterable[System]) -> list[str]:
    """Names of the models that draft for some system, each once."""
    return list(dict.fromkeys(system.draft_model for system in systems if system.draft_model))
