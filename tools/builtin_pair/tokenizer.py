"""Byte-level BPE tokenizer for Python source, shared by target and drafter.

Text is split so that a prompt may end at any usual place. A line end is a piece of its own, never
merged with the punctuation before it or the indentation after it: a prompt that ends with ``:`` or
with a line end is then tokenised like the same text in the middle of a file. Indentation is one
token; a word includes one leading character (a space, a dot, an underscore).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from secondguess.errors import BadInputError, CheckpointError

END_TOKEN = "<|endoftext|>"
PIECES = (
    r" ?__\p{L}+__"  # a dunder name
    r"|[^\r\n\p{L}\p{N}]?\p{L}+"  # a word with the character before it
    r"| ?\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"  # punctuation
    r"|\n+"
    r"|[ \t]+"
    r"|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer; the same texts in the same order give the same tokenizer.

    Raises:
        BadInputError: a vocabulary of fewer than 300 tokens.
    """
    if vocab_size < 300:
        raise BadInputError(f"vocab_size must be at least 300 (256 bytes and some merges), got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=24,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def as_transformers(tokenizer: Tokenizer, max_positions: int) -> Any:
    """Return the tokenizer as a ``PreTrainedTokenizerFast``, the form saved with a model."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        bos_token=END_TOKEN,
        pad_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
    )


def load_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer of a run.

    Raises:
        CheckpointError: a file that is missing, unreadable or without the end token.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
        end_token_id(tokenizer)
    except Exception as error:
        raise CheckpointError(
            f"expected a tokenizer made by `python -m builtin_pair run` in {path}, got: {error}"
        ) from error
    return tokenizer


def end_token_id(tokenizer: Tokenizer) -> int:
    """Return the id of the token that ends a document."""
    token: int | None = tokenizer.token_to_id(END_TOKEN)
    if token is None:
        raise CheckpointError(f"the tokenizer has no token {END_TOKEN}")
    return token
