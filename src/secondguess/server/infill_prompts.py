"""Fill-in-the-middle prompts, for tokenizers that have tokens for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from secondguess.server.errors import refused
from secondguess.server.served_model import ServedModel

FORMATS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 - as the tokenizer writes them
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
)
"""Tokens before the prefix, before the suffix and before the middle: Qwen, StarCoder, SantaCoder,
DeepSeek and Code Llama."""
SUFFIX_FIRST = ("[SUFFIX]", "[PREFIX]")
"""Tokens before the suffix and before the prefix, which the middle follows: Codestral."""
ENDS = frozenset([
    "<|endoftext|>", "<|fim_pad|>", "<|file_sep|>", "<|repo_name|>", "<|cursor|>",
    "<fim_pad>", "<fim-pad>", "<file_sep>", "<repo_name>", "<reponame>", "<filename>", "\u2581<EOT>",
])  # fmt: skip
"""Tokens after a middle, with which text of another file would begin; a model's end tokens are often others."""
REPOSITORY, FILE = (
    ("<|repo_name|>", "<repo_name>", "<reponame>"),
    ("<|file_sep|>", "<file_sep>", "<filename>"),
)
"""Tokens before the name of a repository, and before the name and the text of each of its files."""


def encode_infill(
    target: ServedModel,
    prefix: str,
    suffix: str,
    files: Sequence[tuple[str, str]] = (),
    max_tokens: int = 0,
) -> list[int]:
    """Return the token ids of a prompt that asks for the text between a prefix and a suffix.

    Names and texts of other files come first, the last ones as far as `max_tokens` positions stay free for the middle.
    """
    tokenizer: Any = target.tokenizer
    vocab = tokenizer.get_vocab()
    first, second = (
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids for text in (prefix, suffix)
    )
    if all(name in vocab for name in SUFFIX_FIRST):
        before_suffix, before_prefix = (vocab[name] for name in SUFFIX_FIRST)
        beginning = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        return _after_files(
            target, files, max_tokens, beginning, [before_suffix, *second, before_prefix, *first]
        )
    tokens = next((names for names in FORMATS if all(name in vocab for name in names)), None)
    if tokens is None:
        raise refused(
            "suffix",
            f"cannot use a suffix: the tokenizer of {target.name} has no fill-in-the-middle tokens. Use /v1/completions "
            "without one.",
            "unsupported_parameter",
        )
    before_prefix, before_suffix, before_middle = (vocab[name] for name in tokens)
    return _after_files(
        target, files, max_tokens, [], [before_prefix, *first, before_suffix, *second, before_middle]
    )


def _after_files(
    target: ServedModel,
    files: Sequence[tuple[str, str]],
    max_tokens: int,
    beginning: list[int],
    rest: list[int],
) -> list[int]:
    """Return the token ids of a prompt with those of files, as many of the last ones as fit into the context."""
    if not files:
        return beginning + rest
    tokenizer: Any = target.tokenizer
    vocab = tokenizer.get_vocab()
    repository, file = (
        next(([vocab[name]] for name in names if name in vocab), []) for names in (REPOSITORY, FILE)
    )

    def encoded(text: str) -> list[int]:
        tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        return tokens

    found = repository + encoded("project\n") if repository else []
    for name, text in files:
        found += file + encoded(f"{name}\n{text}" if file else f"\n\n--- {name} ---\n\n{text}")
    found += file + encoded("file\n") if file else encoded("\n\n--- file ---\n\n")
    room = target.context_length - 1 - max_tokens - len(beginning) - len(rest)
    return beginning + found[max(0, len(found) - max(0, room)) :] + rest


def end_tokens(target: ServedModel) -> list[int]:
    """Return the token ids after which the text between a prefix and a suffix has ended."""
    vocab = target.tokenizer.get_vocab()
    return sorted(vocab[name] for name in ENDS & vocab.keys())
