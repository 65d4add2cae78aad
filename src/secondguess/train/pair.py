"""``secondguess train pair``: from Python source to a target and a drafter, in one resumable command."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy

from secondguess.errors import BadInputError
from secondguess.train.data import build_corpus
from secondguess.train.distill import MixedStore, initial_drafter, overlap_loss, write_own_text
from secondguess.train.evaluate import bits_per_byte, measure_pair
from secondguess.train.export import export_model
from secondguess.train.files import write_atomically
from secondguess.train.model import ModelShape
from secondguess.train.tokenizer import load_tokenizer, train_tokenizer
from secondguess.train.tokens import TokenStore, write_tokens
from secondguess.train.trainer import Budget, Phase, Report, RunSettings, Trainer, decoder_from, read_checkpoint

TARGET_SHAPE = ModelShape(12, 256, 4, 2, 768, 6144)
DRAFTER_SHAPE = ModelShape(1, 128, 2, 1, 384, 6144)


@dataclass(frozen=True)
class PairRecipe:
    """Everything that decides the trained pair; the same recipe and seed give the same data and starting weights."""

    corpus: tuple[Path, ...] = ()
    forbidden_prompts: Path | None = None
    include_standard_library: bool = True
    most_corpus_bytes: int | None = None
    target: ModelShape = TARGET_SHAPE
    drafter: ModelShape = DRAFTER_SHAPE
    target_budget: Budget = field(default_factory=lambda: Budget(minutes=85))
    drafter_budget: Budget = field(default_factory=lambda: Budget(minutes=5))
    distill_budget: Budget = field(default_factory=lambda: Budget(minutes=9))
    own_rows: int = 8192
    seed: int = 0
    compile: bool = True
    most_threads: int = 0

    def __post_init__(self) -> None:
        if self.target.vocab_size != self.drafter.vocab_size:
            raise BadInputError(
                f"target and drafter share a tokenizer: got vocabularies of {self.target.vocab_size} and "
                f"{self.drafter.vocab_size}; give both the same vocab_size"
            )

    def target_settings(self) -> RunSettings:
        half = max(1, self.target.num_layers // 2) if self.target.num_layers % 2 == 0 else self.target.num_layers
        phases = (
            Phase(0.30, half, 128, 8192),
            Phase(0.65, self.target.num_layers, 256, 8192),
            Phase(0.84, self.target.num_layers, 256, 12288),
            Phase(1.0, self.target.num_layers, 512, 16384),
        )
        return RunSettings(phases, self.target_budget, seed=self.seed, compile=self.compile, most_threads=self.most_threads)


    def drafter_settings(self) -> RunSettings:
        phases = (Phase(1.0, self.drafter.num_layers, 256, 8192),)
        return RunSettings(
            phases, self.drafter_budget, seed=self.seed + 1, decay_share=0.5, compile=self.compile, most_threads=self.most_threads
        )

    def distill_settings(self) -> RunSettings:
        phases = (Phase(1.0, self.drafter.num_layers, 256, 8192),)
        return RunSettings(
            phases, self.distill_budget, seed=self.seed + 2, muon_rate=0.01, adam_rate=0.002, weight_decay=0.0,
            warmup_steps=20, decay_share=0.8, compile=self.compile, most_threads=self.most_threads,
        )


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
    report("learning the tokenizer")
    sample = [d.text for i, d in enumerate(corpus.training) if d.is_function or i % 4 == 0]
    tokenizer = train_tokenizer(sample, recipe.target.vocab_size)
    with write_atomically(directory / "tokenizer.json") as stream:
        stream.write(tokenizer.to_str().encode())
    report("tokenising")
    write_tokens(corpus, tokenizer, tokens, recipe.seed)
    report((tokens / "summary.json").read_text())
    return TokenStore.open(tokens)


def train_target(recipe: PairRecipe, directory: Path, report: Report) -> None:
    store = prepare_data(recipe, directory, report)
    trainer = Trainer(
        recipe.target, recipe.target_settings(), store, directory / "target.pt", report=report
    )

    def tell_held_out(trainer: Trainer) -> None:
        loss = trainer.held_out_loss()
        bits = loss / 0.6931471805599453 / store.bytes_per_token
        report(f"step {trainer.step}  held-out loss {loss:.4f} nats per token, {bits:.4f} bits per byte")

    trainer.run(after_checkpoint=tell_held_out)
    tell_held_out(trainer)


def train_drafter(recipe: PairRecipe, directory: Path, report: Report) -> None:
    """Cross-entropy on the corpus, then overlap with the target on the corpus and on the target's own text."""
    store = prepare_data(recipe, directory, report)
    target = decoder_from(read_checkpoint(directory / "target.pt"))
    start = initial_drafter(recipe.drafter, target, recipe.seed)
    trainer = Trainer(
        recipe.drafter, recipe.drafter_settings(), store, directory / "drafter-alone.pt", initial=start, report=report
    )
    alone = trainer.run()
    report(f"drafter alone: {bits_per_byte(alone, store):.4f} bits per byte")


def distil_drafter(recipe: PairRecipe, directory: Path, report: Report) -> None:
    store = prepare_data(recipe, directory, report)
    target = decoder_from(read_checkpoint(directory / "target.pt"))
    own = directory / "own-text.npy"
    if not own.is_file():
        write_own_text(target, store, own, recipe.own_rows, recipe.seed, report)
    mixed = MixedStore(store, numpy.load(own, mmap_mode="r"))
    alone = decoder_from(read_checkpoint(directory / "drafter-alone.pt"))
    trainer = Trainer(
        recipe.drafter, recipe.distill_settings(), mixed, directory / "drafter.pt",
        initial=alone, loss=overlap_loss(target), report=report,
    )
    drafter = trainer.run()
    report(str(measure_pair(target, drafter, store).as_dict()))


def export_checkpoint(directory: Path, name: str, destination: Path) -> None:
    """Write the current weights of ``name`` (target or drafter) in Transformers format."""
    decoder = decoder_from(read_checkpoint(directory / f"{name}.pt"))
    export_model(decoder, load_tokenizer(directory / "tokenizer.json"), destination)
