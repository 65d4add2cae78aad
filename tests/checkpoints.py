"""Tiny random checkpoints with a real tokenizer, written to disk as any other model would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from secondguess.checkpoint import loader
from secondguess.checkpoint.source import FolderSource, open_source

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


def random_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A random Llama in float32; `changes` replace entries of its config.

    31 tokens, two layers of width 32, four heads over two key heads, 128 positions, and distributions that are neither
    flat nor one-hot.
    """
    sizes = {
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**(sizes | changes))).eval()


def write_llama(directory: Path, seed: int, vocab_size: int = 300, **changes: Any) -> Path:
    """A random Llama checkpoint with its tokenizer; `changes` replace entries of its config."""
    tokens = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": 0}
    sizes = {"max_position_embeddings": 256, "initializer_range": 0.2} | tokens | changes
    random_llama(seed, **sizes).save_pretrained(directory)
    write_tokenizer(directory, vocab_size)
    return directory


def read_module(path, dtype: torch.dtype) -> Any:
    """Return the Transformers module of a checkpoint in a dtype, on the CPU."""
    source, cpu = open_source(str(path)), torch.device("cpu")
    return loader.read_module(source, source.config, dtype, cpu)


def read_tokenizer(path) -> Any:
    """Return the tokenizer of a checkpoint."""
    return (FolderSource(Path(path)) if Path(path).is_dir() else open_source(str(path))).tokenizer
