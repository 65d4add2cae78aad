"""What is compared: small objects that continue a prompt and say how long it took.

`Speculator` is this package: the same loop, the same weights, one drafter and one controller. The systems of
other libraries are in `peers.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from secondguess.api import make_row
from secondguess.controllers import make_controller
from secondguess.decode import Team, decode
from secondguess.drafters import make_drafter
from secondguess.runtime.base import Runtime
from secondguess.runtime.loading import LoadedModel, check_vocabularies, load_runtime
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats
from secondguess.verifiers import make_verifier


@dataclass(frozen=True)
class Run:
    """One prompt continued by one system.

    Args:
        tokens: the new tokens.
        seconds: wall-clock seconds from token ids to token ids, prefill included.
        stats: what the rounds did; None for systems that do not say.
    """

    tokens: list[int]
    seconds: float
    stats: Stats | None = None

    @property
    def tokens_per_second(self) -> float:
        return len(self.tokens) / self.seconds

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
    """

    name: str
    family: str
    speculates: bool
    draft_model: str | None = None

    @abstractmethod
    def generate(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Run:
        """Continue a prompt by exactly `num_tokens` tokens (end tokens do not end it); timed inside."""


class Models:
    """The weights of one benchmark, each model loaded once and shared by all systems of this package."""

    def __init__(self, model: str, dtype: str, device: str, quantize: str | None = None) -> None:
        self.target: LoadedModel = load_runtime(model, dtype=dtype, device=device, quantize=quantize)
        self._dtype = dtype
        self._device = device
        self._draft_models: dict[str, LoadedModel] = {}

    def draft_model(self, name: str) -> LoadedModel:
        if name not in self._draft_models:
            loaded = load_runtime(name, dtype=self._dtype, device=self._device, drafts=True)
            check_vocabularies(self.target, loaded)
            self._draft_models[name] = loaded
        return self._draft_models[name]

    @property
    def draft_models(self) -> dict[str, LoadedModel]:
        """Draft models in use, by the names they were asked for."""
        return dict(self._draft_models)


class Speculator(System):
    """This package with one drafter, under one controller (the drafter's default when none is named)."""

    family = "secondguess"

    def __init__(self, models: Models, drafter: str, controller: str | None = None) -> None:
        self._target = models.target

        def load_draft_model(name: str) -> Runtime:
            self.draft_model = name
            return models.draft_model(name).runtime

        self._drafter = make_drafter(
            drafter, target_vocab_size=models.target.runtime.vocab_size, load_draft_model=load_draft_model
        )
        self._controller = controller or self._drafter.default_controller
        self._verifier = make_verifier("auto")
        self.speculates = drafter != "none"
        shown = f"{public_name(drafter)} {controller or ''}".strip()
        self.name = f"secondguess {shown if self.speculates else 'plain'}"

    def generate(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Run:
        row = make_row(
            self._target,
            self._verifier,
            list(prompt),
            SamplingParams(max_tokens=num_tokens, temperature=temperature),
        )
        row.end_tokens = frozenset()
        # Known noise, yet the verifier of a request without a seed: that is what users get who ask for none.
        row.seed = seed
        # What a controller has learnt must not flow from one measurement into the next.
        controller = make_controller(self._controller)
        team = Team(self._target.runtime, self._drafter, self._verifier, controller)
        start = time.perf_counter()
        with torch.inference_mode():
            for _ in decode(team, [row]):
                pass
        return Run(row.output, time.perf_counter() - start, team.ledger.of(row))


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
