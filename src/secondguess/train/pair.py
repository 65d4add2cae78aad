"""``secondguess train pair``: from Python source to a target and a drafter, in one resumable command."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from secondguess.errors import BadInputError
from secondguess.train.data import build_corpus
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
    seed: int = 0
    compile: bool = True

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
            Phase(0.72, self.target.num_layers, 256, 12288),
            Phase(1.0, self.target.num_layers, 512, 16384),
        )
        return RunSettings(phases, self.target_budget, seed=self.seed, compile=self.compile)


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


def export_checkpoint(directory: Path, name: str, destination: Path) -> None:
    """Write the current weights of ``name`` (target or drafter) in Transformers format."""
    decoder = decoder_from(read_checkpoint(directory / f"{name}.pt"))
    export_model(decoder, load_tokenizer(directory / "tokenizer.json"), destination)
