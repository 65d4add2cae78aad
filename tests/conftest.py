"""Fixtures shared by several test files: tiny random checkpoints with a real tokenizer, written once per process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

TRAINING_TEXT = [
    "def quicksort(items):\n    if len(items) < 2:\n        return items\n    first, *rest = items\n",
    "    return [*quicksort(small), first, *quicksort(large)]\n\n\nclass Stack:\n    def push(self, item):\n",
    "        self.items.append(item)\n        return self\n\n\nprint('naïve café — ', sum(range(10)))\n",
]


def write_tokenizer(directory: Path, vocab_size: int = 300) -> None:
    """A byte-level BPE tokenizer with an end token `<|end|>` (id 0), in Transformers format."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TRAINING_TEXT, trainer)
    assert tokenizer.get_vocab_size() == vocab_size
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(directory)


def write_llama(directory: Path, seed: int, vocab_size: int = 300, **changes: int) -> Path:
    """A random Llama checkpoint with its tokenizer; `changes` replace entries of its config."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
    }
    config = LlamaConfig(
        vocab_size=vocab_size, bos_token_id=None, eos_token_id=0, initializer_range=0.2, **(sizes | changes)
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(directory)
    write_tokenizer(directory, vocab_size)
    return directory


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target: a Llama of 2 layers, width 32, 300 tokens, 256 positions."""
    return write_llama(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="session")
def tiny_draft_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model for `tiny_checkpoint`: one layer of width 16 with the same tokenizer."""
    return write_llama(
        tmp_path_factory.mktemp("tiny-draft"),
        seed=1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
    )


@dataclass(frozen=True)
class Finished:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def records(self) -> list[dict[str, Any]]:
        """Standard output, read as one JSON object per line."""
        return [json.loads(line) for line in self.out.splitlines()]


CommandLine = Callable[..., Finished]


@pytest.fixture
def secondguess_command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    """Runs the command line inside this process: `secondguess_command("generate", "x", stdin=b"...")`."""
    from secondguess.cli import main

    def run(*arguments: object, stdin: bytes = b"") -> Finished:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return Finished(code, out, err)

    return run
