"""``secondguess train pair``: from Python source to a target and a drafter, in one resumable command.

Every stage leaves a file in the run's directory and is skipped when it finds it finished: the corpus and tokenizer,
the target, the drafter by itself, the target's own text, the distilled drafter, the figures, the exported pair.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy

from secondguess.errors import BadInputError
from secondguess.train.card import write_cards
from secondguess.train.checkpoints import decoder_from, read_checkpoint
from secondguess.train.data import build_corpus
from secondguess.train.distill import (
    OWN_LENGTH,
    MixedStore,
    initial_drafter,
    overlap_loss,
    write_own_text,
)
from secondguess.train.evaluate import PairFigures, bits_per_byte, measure_pair
from secondguess.train.export import export_model, load_exported
from secondguess.train.files import write_atomically
from secondguess.train.growth import deepened
from secondguess.train.model import ModelShape
from secondguess.train.schedule import Budget, Phase, RunSettings
from secondguess.train.tokenizer import load_tokenizer, train_tokenizer
from secondguess.train.tokens import TokenStore, write_tokens
from secondguess.train.trainer import Report, Trainer

TARGET_SHAPE = ModelShape(16, 256, 4, 2, 768, 6144)
# One layer, because on a CPU a pass over one token costs mostly calls, and their number grows with the layers.
DRAFTER_SHAPE = ModelShape(1, 256, 4, 2, 1024, 6144)


@dataclass(frozen=True)
class PairRecipe:
    """Everything that decides the trained pair.

    Args:
        corpus: directories of installed packages to read (``pip install --target``) beside the standard library.
        forbidden_prompts: JSON lines with a ``prompt`` each; no text that holds one of them is trained on.
        include_standard_library: whether the running interpreter's own library is read.
        most_corpus_bytes: stop collecting text after so many bytes.
        start: a target directory of an earlier pair; its weights and tokenizer are continued instead of fresh ones.
        target, drafter: the shapes.
        target_budget, drafter_budget, distill_budget: what each training stage may spend.
        own_rows: rows of text that the target writes for the distillation.
        seed: of the weights, the order of the text and the target's own text.
        compile: whether training steps are compiled (half a minute each time, then 1.2 times as fast).
        most_threads: 0 keeps PyTorch's thread count; otherwise at most so many, fewer while others need the cores.
    """

    corpus: tuple[Path, ...] = ()
    forbidden_prompts: Path | None = None
    include_standard_library: bool = True
    most_corpus_bytes: int | None = None
    start: Path | None = None
    target: ModelShape = TARGET_SHAPE
    drafter: ModelShape = DRAFTER_SHAPE
    target_budget: Budget = field(default_factory=lambda: Budget(minutes=127))
    drafter_budget: Budget = field(default_factory=lambda: Budget(minutes=5))
    distill_budget: Budget = field(default_factory=lambda: Budget(minutes=52))
    own_rows: int = 5120
    seed: int = 0
    compile: bool = True
    most_threads: int = 0

    def __post_init__(self) -> None:
        if self.target.vocab_size != self.drafter.vocab_size:
            raise BadInputError(
                f"target and drafter share a tokenizer: got vocabularies of {self.target.vocab_size} and "
                f"{self.drafter.vocab_size}; give both the same vocab_size"
            )
        if self.own_rows < 1:
            raise BadInputError(
                f"the distillation needs at least 1 row of the target's own text, got {self.own_rows}"
            )
        if not self.corpus and not self.include_standard_library:
            raise BadInputError(
                "nothing to learn from: name a corpus directory or include the standard library"
            )
        if self.seed < 0 or self.most_threads < 0:
            raise BadInputError(
                f"seed and most_threads cannot be negative, got {self.seed} and {self.most_threads}"
            )

    @classmethod
    def small(cls, **changes: object) -> PairRecipe:
        """The same recipe small enough for a test: a few steps of two tiny models on a fraction of the text."""
        recipe = cls(
            target=ModelShape(4, 64, 2, 1, 128, 512),
            drafter=ModelShape(1, 32, 2, 1, 64, 512),
            target_budget=Budget(steps=12),
            drafter_budget=Budget(steps=4),
            distill_budget=Budget(steps=4),
            most_corpus_bytes=400_000,
            own_rows=4,
            compile=False,
        )
        return replace(recipe, **changes)  # type: ignore[arg-type]

    def scaled(self, minutes: float) -> PairRecipe:
        """The same recipe with its three training stages taking ``minutes`` together."""
        budgets = (self.target_budget, self.drafter_budget, self.distill_budget)
        total = sum(budget.minutes or 0.0 for budget in budgets)
        if not minutes > 0 or not total:
            raise BadInputError(f"expected a number of minutes above 0 and budgets in minutes, got {minutes}")
        target, drafter, distill = (
            Budget(minutes=minutes * (budget.minutes or 0.0) / total) for budget in budgets
        )
        return replace(self, target_budget=target, drafter_budget=drafter, distill_budget=distill)

    def target_settings(self) -> RunSettings:
        """Few layers and short windows first, then all layers, then long windows while the rate falls."""
        layers = self.target.num_layers
        # A model that does not start from nothing has its depth already, or gets it at once.
        first, second = (layers, layers) if self.start else (max(1, layers * 3 // 8), max(1, layers * 3 // 4))
        phases = (
            Phase(0.20, first, 128, 8192),
            Phase(0.45, second, 256, 8192),
            Phase(0.84, layers, 256, 12288),
            Phase(1.0, layers, 512, 16384),
        )
        return self._settings(phases, self.target_budget, self.seed)

    def drafter_settings(self) -> RunSettings:
        return replace(
            self._settings(self._drafter_phases(8192), self.drafter_budget, self.seed + 1), decay_share=0.5
        )

    def distill_settings(self) -> RunSettings:
        """Gentler than a start from nothing, and falling nearly from the beginning."""
        settings = self._settings(self._drafter_phases(4096), self.distill_budget, self.seed + 2)
        return replace(
            settings, muon_rate=0.01, adam_rate=0.002, weight_decay=0.0, warmup_steps=20, decay_share=0.8
        )

    def _drafter_phases(self, tokens_per_step: int) -> tuple[Phase, ...]:
        return (Phase(1.0, self.drafter.num_layers, OWN_LENGTH, tokens_per_step),)

    def _settings(self, phases: tuple[Phase, ...], budget: Budget, seed: int) -> RunSettings:
        return RunSettings(phases, budget, seed=seed, compile=self.compile, most_threads=self.most_threads)


def train_pair(recipe: PairRecipe, directory: Path, report: Report = print) -> PairFigures:
    """Run or continue the whole recipe; the pair ends in ``directory/target`` and ``directory/drafter``."""
    train_target(recipe, directory, report)
    train_drafter(recipe, directory, report)
    distil_drafter(recipe, directory, report)
    for name in ("target", "drafter"):
        export_checkpoint(directory, name, directory / name)
    figures = measure(recipe, directory, report)
    write_cards(directory, figures, recipe.seed)
    report(f"finished: {directory / 'target'} and {directory / 'drafter'}")
    return figures


def prepare_data(recipe: PairRecipe, directory: Path, report: Report) -> TokenStore:
    """Corpus, tokenizer and token arrays; each is made once and found again on resuming."""
    tokens = directory / "tokens"
    if (tokens / "summary.json").is_file():
        return TokenStore.open(tokens)
    directory.mkdir(parents=True, exist_ok=True)
    report("collecting Python source")
    corpus = build_corpus(
        recipe.corpus,
        include_standard_library=recipe.include_standard_library,
        forbidden_prompts=recipe.forbidden_prompts,
        most_bytes=recipe.most_corpus_bytes,
    )
    with write_atomically(directory / "manifest.json") as stream:
        stream.write(json.dumps(corpus.manifest(), indent=2).encode())
    if recipe.start is not None:
        tokenizer = load_tokenizer(recipe.start / "tokenizer.json")
    else:
        report("learning the tokenizer")
        # All functions and a quarter of the files: the merges settle long before the text is used up.
        sample = [
            document.text for i, document in enumerate(corpus.training) if document.is_function or i % 4 == 0
        ]
        tokenizer = train_tokenizer(sample, recipe.target.vocab_size)
    with write_atomically(directory / "tokenizer.json") as stream:
        stream.write(tokenizer.to_str().encode())
    report("tokenising")
    write_tokens(corpus, tokenizer, tokens, recipe.seed)
    store = TokenStore.open(tokens)
    report(
        f"{len(store.files)} tokens of files, {len(store.functions)} of functions, {len(store.held_out)} held out"
    )
    return store


def train_target(recipe: PairRecipe, directory: Path, report: Report) -> None:
    """The target, from nothing or from ``recipe.start``."""
    store = prepare_data(recipe, directory, report)
    initial = None
    if recipe.start is not None:
        initial, _ = deepened(load_exported(recipe.start), recipe.target.num_layers)
    trainer = Trainer(
        recipe.target,
        recipe.target_settings(),
        store,
        directory / "target.pt",
        initial=initial,
        report=report,
    )
    trainer.run(after_checkpoint=_held_out_teller(store, report))


def _held_out_teller(store: TokenStore, report: Report) -> Callable[[Trainer], None]:
    def tell(trainer: Trainer) -> None:
        bits = bits_per_byte(trainer.decoder, store, rows=64, length=256)
        report(f"step {trainer.step}  held-out text: {bits:.4f} bits per byte")

    return tell


def train_drafter(recipe: PairRecipe, directory: Path, report: Report) -> None:
    """The drafter by itself: cross-entropy on the corpus, from the target's embedding."""
    store = prepare_data(recipe, directory, report)
    target = decoder_from(read_checkpoint(directory / "target.pt"))
    start = initial_drafter(recipe.drafter, target, recipe.seed)
    checkpoint = directory / "drafter-alone.pt"
    Trainer(recipe.drafter, recipe.drafter_settings(), store, checkpoint, initial=start, report=report).run(
        after_checkpoint=_held_out_teller(store, report)
    )


def distil_drafter(recipe: PairRecipe, directory: Path, report: Report) -> None:
    """The drafter towards the target: overlap on the corpus and on the target's own text."""
    store = prepare_data(recipe, directory, report)
    target = decoder_from(read_checkpoint(directory / "target.pt"))
    own = directory / "own-text.npy"
    if not own.is_file():
        write_own_text(target, store, own, recipe.own_rows, recipe.seed, report)
    alone = decoder_from(read_checkpoint(directory / "drafter-alone.pt"))
    Trainer(
        recipe.drafter,
        recipe.distill_settings(),
        MixedStore(store, numpy.load(own, mmap_mode="r")),
        directory / "drafter.pt",
        initial=alone,
        loss=overlap_loss(target),
        report=report,
    ).run()


def measure(recipe: PairRecipe, directory: Path, report: Report, rows: int = 64) -> PairFigures:
    """The figures of the model cards, for the checkpoints as they are now."""
    target, drafter = (
        decoder_from(read_checkpoint(directory / f"{name}.pt")) for name in ("target", "drafter")
    )
    store = prepare_data(recipe, directory, report)
    figures = measure_pair(target, drafter, store, rows=rows, seed=recipe.seed)
    with write_atomically(directory / "figures.json") as stream:
        stream.write(json.dumps(figures.as_dict(), indent=2).encode())
    report(json.dumps(figures.as_dict()))
    return figures


def export_checkpoint(directory: Path, name: str, destination: Path) -> None:
    """Write the current weights of ``name`` (target or drafter) in Transformers format, at any time in a run."""
    decoder = decoder_from(read_checkpoint(directory / f"{name}.pt"))
    export_model(decoder, load_tokenizer(directory / "tokenizer.json"), destination)


def install_pair(directory: Path, destination: Path) -> None:
    """Copy a finished pair, cards included, to ``destination/target`` and ``destination/drafter``."""
    for name in ("target", "drafter"):
        (destination / name).mkdir(parents=True, exist_ok=True)
        for path in sorted((directory / name).iterdir()):
            with write_atomically(destination / name / path.name) as stream, path.open("rb") as source:
                shutil.copyfileobj(source, stream)
