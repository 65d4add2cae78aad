"""`python -m builtin_pair run`: train a target and its draft model on Python source, in one command.

The stages are the text, the target (`target.py`), and the draft model, which is trained as
`secondguess train draft` trains one for any target. The command can be resumed: finished stages are
reused, and training continues from its checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from builtin_pair.card import write_target_card
from builtin_pair.data import Corpus, build_corpus
from builtin_pair.target import (
    Report,
    TargetShape,
    TargetTrainer,
    bits_per_byte,
    fresh_target,
)
from builtin_pair.tokenizer import as_transformers, end_token_id, load_tokenizer, train_tokenizer
from builtin_pair.tokens import TokenStore, write_tokens
from secondguess.builtin import builtin_paths
from secondguess.checkpoint.weight_files import hash_weights
from secondguess.errors import BadInputError
from secondguess.files import write_atomically
from secondguess.heads.files import Provenance
from secondguess.names import check_range
from secondguess.runtime.system.quiet import quiet
from secondguess.train.head_training import HeadJob, ProgressDisplay, train_head
from secondguess.train.run_folder import Budget, check_or_record_options
from secondguess.train.training_texts import AnswerSettings

with quiet():
    from transformers import LlamaForCausalLM

DRAFTER_SHARE = 0.3
"""Share of the minutes in which the draft model is trained."""
REPORT_SECONDS = 20.0


@dataclass(frozen=True)
class PairRecipe:
    """Settings that determine the trained pair.

    Args:
        corpus: folders of installed packages (`pip install --target`), used in addition to the standard library.
        forbidden_prompts: JSON-lines file with a `prompt` per line; files that contain one are excluded.
        include_standard_library: whether the running interpreter's library is included.
        most_corpus_bytes: size of the text after which no more is collected.
        start: target folder of an earlier pair, whose weights and tokenizer are continued.
        target: shape of the target.
        drafter: `NAME=VALUE` settings of the recipe of `secondguess train draft`.
        target_budget, drafter_budget: budgets of the two training runs.
        answers: text that the target generates for the draft model.
        num_prompts: number of prompts of this text.
        seed: seed of the weights, the order of the text and the generated text.
        compile: whether the target's training is compiled (half a minute at each start).

    Raises:
        BadInputError: a value out of range, or no text to train on.
    """

    corpus: tuple[Path, ...] = ()
    forbidden_prompts: Path | None = None
    include_standard_library: bool = True
    most_corpus_bytes: int | None = None
    start: Path | None = None
    target: TargetShape = field(default_factory=TargetShape)
    drafter: tuple[str, ...] = ("num_layers=1", "width=256")
    target_budget: Budget = field(default_factory=lambda: Budget(minutes=127))
    drafter_budget: Budget = field(default_factory=lambda: Budget(minutes=57))
    answers: AnswerSettings = field(default_factory=lambda: AnswerSettings(max_tokens=160, length=256))
    num_prompts: int = 5120
    seed: int = 0
    compile: bool = True

    def __post_init__(self) -> None:
        check_range("--seed", self.seed, 0, 2**31 - 1)
        if not self.corpus and not self.include_standard_library:
            raise BadInputError(
                "nothing to learn from: name a corpus directory or include the standard library"
            )
        if self.forbidden_prompts and not self.forbidden_prompts.is_file():
            raise BadInputError(
                f"expected a file of evaluation prompts, found none at {self.forbidden_prompts}"
            )

    def identity(self) -> dict[str, Any]:
        """Return the options and hashes that determine the data and the target; a run is continued with the same."""
        prompts = self.forbidden_prompts
        return {
            "corpus": [str(path.resolve()) for path in self.corpus],
            "exclude_prompts_sha256": prompts and hashlib.sha256(prompts.read_bytes()).hexdigest(),
            "include_standard_library": self.include_standard_library,
            "most_corpus_bytes": self.most_corpus_bytes,
            "start_sha256": self.start and hash_weights(self.start),
            "target": asdict(self.target),
            "seed": self.seed,
        }

    def lasting(self, minutes: float) -> PairRecipe:
        """Return the recipe with budgets of `minutes` in total."""
        drafter = DRAFTER_SHARE * minutes
        return replace(self, target_budget=Budget(minutes - drafter), drafter_budget=Budget(drafter))


def train_pair(recipe: PairRecipe, folder: Path, report: Report = print) -> Provenance:
    """Run or continue the whole recipe; the pair is written to the folders `target` and `drafter`.

    Returns:
        The provenance of the draft model, with its measured figures.
    """
    store = prepare_data(recipe, folder, report)
    train_target(recipe, folder, store, report)
    provenance = train_drafter(recipe, folder, report)
    report(f"finished: {folder / 'target'} and {folder / 'drafter'}\n{json.dumps(provenance.figures)}")
    return provenance


def prepare_data(recipe: PairRecipe, folder: Path, report: Report) -> TokenStore:
    """Return the token store; corpus, tokenizer, prompts and tokens are created by the first call only.

    Raises:
        BadInputError: the folder holds a run with other options.
    """
    tokens = folder / "tokens"
    if (tokens / "summary.json").is_file():
        check_or_record_options(folder, recipe.identity())
        return TokenStore.open(tokens)
    report("collecting Python source")
    corpus = build_corpus(
        recipe.corpus,
        include_standard_library=recipe.include_standard_library,
        forbidden_prompts=recipe.forbidden_prompts,
        most_bytes=recipe.most_corpus_bytes,
    )
    if recipe.start is not None:
        tokenizer = load_tokenizer(recipe.start / "tokenizer.json")
    else:
        report("learning the tokenizer")
        # More text than a quarter of the files hardly changes the merges.
        tokenizer = train_tokenizer([*corpus.functions, *corpus.files[::4]], recipe.target.vocab_size)
    # Recorded only now, so that a command with a wrong option can be corrected.
    check_or_record_options(folder, recipe.identity())
    texts = {
        "manifest.json": json.dumps(corpus.manifest(), indent=2),
        "tokenizer.json": tokenizer.to_str(),
        "prompts.jsonl": prompts_of(corpus),
    }
    for name, text in texts.items():
        with write_atomically(folder / name) as stream:
            stream.write(text.encode())
    report("tokenising")
    write_tokens(corpus, tokenizer, tokens, recipe.seed)
    return TokenStore.open(tokens)


def prompts_of(corpus: Corpus) -> str:
    """Return the first halves of the documented functions, as JSON lines."""
    halves = []
    for function in corpus.functions:
        lines = function.splitlines(keepends=True)
        halves.append("".join(lines[: (len(lines) + 1) // 2]))
    return "".join(json.dumps({"prompt": half}) + "\n" for half in dict.fromkeys(halves))


def train_target(recipe: PairRecipe, folder: Path, store: TokenStore, report: Report) -> None:
    """Train the target, from random weights or from `recipe.start`, and write it in Transformers format."""
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    if recipe.start is None:
        model = fresh_target(recipe.target, end_token_id(tokenizer), recipe.seed)
    else:
        model = LlamaForCausalLM.from_pretrained(recipe.start, dtype=torch.float32)
    trainer = TargetTrainer(
        model,
        store,
        recipe.target_budget,
        folder / "target.pt",
        seed=recipe.seed,
        report=report,
        compiled=recipe.compile,
    )
    trainer.run()
    bits = bits_per_byte(model, store)
    report(f"target: {bits:.4f} bits per byte of held-out text")
    model.bfloat16().save_pretrained(folder / "target")
    shutil.copymode(folder / "target" / "config.json", folder / "target" / "model.safetensors")
    as_transformers(tokenizer, model.config.max_position_embeddings).save_pretrained(folder / "target")
    _name_tokenizer_class(folder / "target")
    write_target_card(folder, trainer, bits, recipe.seed)


def train_drafter(recipe: PairRecipe, folder: Path, report: Report) -> Provenance:
    """Train the draft model towards the target, on text that the target generates from prompts of the corpus."""
    job = HeadJob(
        "draft",
        folder / "drafter",
        str(folder / "target"),
        data=(folder / "prompts.jsonl",),
        num_prompts=recipe.num_prompts,
        answers=recipe.answers,
        changes=recipe.drafter,
        budget=recipe.drafter_budget,
        seed=recipe.seed,
    )
    last_report = time.monotonic()

    def show(done: int, total: int, words: str) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > REPORT_SECONDS:
            last_report = time.monotonic()
            report(f"{done} of {total}: {words}")

    provenance = train_head(job, ProgressDisplay(show, lambda: None))
    _name_tokenizer_class(folder / "drafter")
    return provenance


def _name_tokenizer_class(folder: Path) -> None:
    """Set a tokenizer class that every version of Transformers accepts: version 5 writes another name."""
    path = folder / "tokenizer_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def install_pair(folder: Path, destination: Path) -> None:
    """Copy a finished pair, with its cards, to the folders target and drafter of a destination."""
    for name in ("target", "drafter"):
        (destination / name).mkdir(parents=True, exist_ok=True)
        for path in sorted(path for path in (folder / name).iterdir() if path.is_file()):
            with write_atomically(destination / name / path.name) as stream, path.open("rb") as source:
                shutil.copyfileobj(source, stream)


def install_head(folder: Path, destination: Path) -> None:
    """Copy a trained head of the built-in target, with its card, to a folder of the package.

    Copies of the target's embeddings and LM head are left out: loading takes them from the target.
    """
    table = load_file(builtin_paths().target / "model.safetensors")["model.embed_tokens.weight"]
    tensors = load_file(folder / "model.safetensors")
    own = {
        name: tensor
        for name, tensor in tensors.items()
        if tensor.shape != table.shape or not torch.equal(tensor, table)
    }
    destination.mkdir(parents=True, exist_ok=True)
    files = {name: (folder / name).read_bytes() for name in ("config.json", "secondguess.json", "README.md")}
    for name, content in {**files, "model.safetensors": save(own)}.items():
        with write_atomically(destination / name) as stream:
            stream.write(content)
