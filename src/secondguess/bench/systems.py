"""Systems that a benchmark compares: each continues prompts and measures its own time.

`SecondguessSystem` is this package with one drafter and one controller; all of them run the same decoding
loop on the same weights. Systems of other libraries are in `peers.py`.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from secondguess.api import choose_controller, make_row
from secondguess.bench.summary import sum_stats
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.controllers.base import Controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters import draft_model_paths
from secondguess.drafters.spec import make_drafter
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.engine.models import fits_memory
from secondguess.errors import BadInputError, OutOfMemoryError
from secondguess.names import AUTO, Name
from secondguess.pairing import confirm_default, default_drafter, pair_vocabularies, resolve_drafter
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams
from secondguess.stats import Stats
from secondguess.verifiers import make_verifier
from secondguess.workloads.provenance import Provenance, collect_provenance, public_name


@dataclass(frozen=True)
class Run:
    """Prompts continued by one system as one batch: new tokens of each row, seconds and statistics of all rows.

    The wall-clock seconds are those from token ids to token ids, prefill included.
    """

    texts: list[list[int]]
    seconds: float
    stats: Stats | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.texts))

    @property
    def tokens_per_second(self) -> float:
        """All new tokens over wall-clock seconds."""
        return self.num_tokens / self.seconds

    @property
    def decode_seconds(self) -> float:
        """Seconds without prefill; all seconds if the prefill time is unknown."""
        return self.seconds - (self.stats.seconds["prefill"] if self.stats else 0.0)


class System(ABC):
    """Base class of systems that continue prompts.

    Attributes:
        name: name in reports, unique within a run.
        family: implementation that runs; systems of one family should produce the same texts at
            temperature 0.
        speculates: False for a family's plain decoding, the baseline of the others.
        draft_model: name of the draft model; None if there is none.
        has_draft_probs: whether drafts come with probabilities, as those of models and heads do.
        batches: whether several prompts can be decoded as one batch; other systems run at batch
            size 1 only.
        exact_length: whether exactly the requested number of tokens is generated.
    """

    name: str
    family: str
    speculates: bool
    draft_model: str | None = None
    has_draft_probs: bool = False
    batches: bool = False
    exact_length: bool = True

    @abstractmethod
    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        """Continue prompts as one batch, each by exactly `num_tokens` tokens, ignoring end tokens, and time it.

        A system without batches gets one prompt.
        """

    def reset(self) -> None:
        """Discard what was learnt during the warm-up."""


class Models:
    """Models of one benchmark, each loaded once and shared by all systems of this package.

    Names of `drafters` are checked before weights are read.
    """

    def __init__(
        self,
        model: str,
        dtype: str,
        device: str,
        quantize: str | None = None,
        drafters: Iterable[str] = (),
    ) -> None:
        checkpoint = Checkpoint.resolve(model, dtype=dtype, device=device, quantize=quantize)
        for drafter in drafters:
            if drafter != AUTO:
                resolve_drafter(drafter, checkpoint)
        default = default_drafter(model, checkpoint)
        self.target = load_model(checkpoint)
        self.default_drafter = confirm_default(default, self.target.runtime)
        self._name, self._dtype, self._device = model, dtype, device
        self._draft_models: dict[str, LoadedModel] = {}

    def draft_model(self, name: str) -> LoadedModel:
        """Return a draft model, loaded on the first call."""
        if name not in self._draft_models:
            self._draft_models[name] = self._load_draft_model(name)
        return self._draft_models[name]

    def _load_draft_model(self, name: str) -> LoadedModel:
        return load_model(Checkpoint.resolve(name, dtype=self._dtype, device=self._device, drafts=True))

    def check_batch_memory(self, drafters: Iterable[str], num_rows: int, num_tokens: int) -> None:
        """Refuse rows of at most `num_tokens` that do not fit into memory with the caches of the draft models."""
        paths = dict.fromkeys(path for name in drafters for path in draft_model_paths(name))
        loaded = [self.target, *map(self.draft_model, paths)]
        cache_bytes = sum(model.checkpoint.cache_bytes_per_token for model in loaded)
        runtime = self.target.runtime
        if not fits_memory(runtime, cache_bytes, num_rows, num_tokens):
            raise OutOfMemoryError(
                f"expected batches whose KV caches and logits fit into the memory available on {runtime.device}, got "
                f"{num_rows:,} rows of up to {num_tokens:,} tokens; give a smaller --batch-size or --max-tokens"
            )

    def pair_vocabularies(self, drafter: Name) -> VocabularyPair | None:
        """Return the vocabularies of the target and a drafter's model; None if they have one tokenizer."""
        checkpoint = self.draft_model(drafter.argument or "").checkpoint
        return pair_vocabularies(self.target.checkpoint, checkpoint, drafter)

    def provenance(self, num_threads: int, seed: int) -> Provenance:
        """Return the provenance of what was measured with all models loaded so far."""
        all_loaded = {self._name: self.target, **self._draft_models}
        loaded = {public_name(name): model for name, model in all_loaded.items()}
        return collect_provenance(
            num_threads=num_threads,
            device=self.target.device,
            dtype=self.target.dtype,
            seed=seed,
            models={name: Path(model.path) for name, model in loaded.items()},
            runtimes={name: model.runtime_description for name, model in loaded.items()},
        )


class RunningBatch:
    """Measured run of one batch, advanced round by round; time between rounds does not count."""

    def __init__(self, components: Components, rows: Sequence[Row]) -> None:
        self._components, self._rows = components, rows
        self._rounds = decode(components, rows)
        self._seconds = 0.0

    def step(self) -> bool:
        """Run the next round, the first one with prefill; return False if no round was left."""
        start = time.perf_counter()
        with torch.inference_mode():
            has_run = next(self._rounds, None) is not None
        self._seconds += time.perf_counter() - start
        return has_run

    def run(self) -> Run:
        """Return the run so far: counters are summed over the rows; seconds, which rows share, are the maximum."""
        row_stats = [self._components.recorder.of(row) for row in self._rows]
        stats = sum_stats(row_stats)
        stats.seconds = dict(max(row_stats, key=lambda row: sum(row.seconds.values())).seconds)
        stats.drafting_seconds = max(row.drafting_seconds for row in row_stats)
        return Run([row.output for row in self._rows], self._seconds, stats)


class SecondguessSystem(System):
    """This package with one drafter and one controller (by default the drafter's own).

    In normal use a controller is kept as long as the loaded model. Here one is kept per
    temperature and batch size: it is made after the warm-up and learns over all prompts, and
    nothing learnt under one condition affects another. With `ends_texts` end tokens end a text, as
    for a user; otherwise every text has the requested number of tokens.
    """

    family = "secondguess"
    batches = True

    def __init__(
        self, models: Models, drafter: str, controller: str | None = None, *, ends_texts: bool = False
    ) -> None:
        self._target, self.exact_length = models.target, not ends_texts

        def load_draft_model(name: str) -> Runtime:
            self.draft_model = name
            return models.draft_model(name).runtime

        self._drafter = make_drafter(
            drafter,
            target_vocab_size=models.target.runtime.vocab_size,
            load_draft_model=load_draft_model,
            pair_vocabularies=models.pair_vocabularies,
            target=self._target,
        )
        self.drafter, self.controller_name = drafter, controller
        # Refuses an unknown controller, or one that this drafter cannot use, at once.
        choose_controller(controller, self._drafter)
        self._controllers: dict[tuple[float, int], Controller] = {}
        self._verifier = make_verifier("auto")
        self.speculates = drafter != "none"
        self.has_draft_probs = self.speculates and not self._drafter.deterministic
        self.name = speculator_name(drafter, controller)

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        running_batch = self.start(prompts, num_tokens, temperature, seed)
        while running_batch.step():
            pass
        return running_batch.run()

    def release(self) -> None:
        """Free the target's KV cache; it is allocated again for the next text."""
        self._target.runtime.free()

    def start(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> RunningBatch:
        """Start a measured run whose rounds the caller runs one by one."""
        params = self.params(num_tokens, temperature)
        rows = [
            make_row(
                self._target, self._verifier, list(prompt), params, draws_by_race=self._drafter.draws_by_race
            )
            for prompt in prompts
        ]
        for index, row in enumerate(rows):
            # Seeded noise, but the verifier of requests without a seed, which are the common case.
            row.seed, row.sample_index = seed, index
        controller = self.controller(temperature, len(prompts))
        self.forget_prompts()
        return RunningBatch(Components(self._target.runtime, self._drafter, self._verifier, controller), rows)

    def params(self, num_tokens: int, temperature: float) -> SamplingParams:
        """Return the settings of a text."""
        return SamplingParams(num_tokens, temperature=temperature, ignore_eos=self.exact_length)

    def forget_prompts(self) -> None:
        """Forget cached prompts: every system prefills every prompt, whichever has decoded it before."""
        self._target.runtime.reset_prefix_cache()
        self._drafter.reset_prefix_cache()

    def controller(self, temperature: float, batch_size: int) -> Controller:
        """Return the controller kept for this temperature and batch size."""
        key = (temperature, batch_size)
        if key not in self._controllers:
            self._controllers[key] = choose_controller(self.controller_name, self._drafter)
        return self._controllers[key]

    def reset(self) -> None:
        self._controllers.clear()


def speculator_name(drafter: str, controller: str | None = None) -> str:
    """Return the name of one of our systems in reports.

    >>> speculator_name("ngram", "fixed:3"), speculator_name("none")
    ('secondguess ngram fixed:3', 'secondguess plain')
    """
    shown = f"{public_name(drafter)} {controller or ''}".strip()
    return f"secondguess {'plain' if drafter == 'none' else shown}"


def require_different_names(systems: Sequence[System]) -> None:
    """Refuse systems with the same name in reports, with a `BadInputError`."""
    names = [system.name for system in systems]
    if len(set(names)) < len(names):
        raise BadInputError(f"expected drafters whose names differ in a report, got {', '.join(names)}")


def draft_models(systems: Iterable[System]) -> list[str]:
    """Return the names of the systems' draft models, each once."""
    return list(dict.fromkeys(system.draft_model for system in systems if system.draft_model))


@contextmanager
def threads(number: int | None) -> Iterator[int]:
    """Set the number of torch threads (None: leave it), give the number in use, and restore the former one at exit."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
