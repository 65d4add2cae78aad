"""A tiny vocabulary for grammars, and an oracle of masks that shares no code with llguidance."""

from __future__ import annotations

import re
import string
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import product

import torch
from llguidance import LLTokenizer, TokenizerWrapper
from torch import Tensor

from secondguess.params import Grammar, SamplingParams
from secondguess.proof.fakes import NextTokenDist
from secondguess.sampling.grammar import GrammarCompiler, GrammarMatcher

TEXTS = [*string.ascii_lowercase, "ab", "ca", "bc", "aa"]


class TinyTokenizer:
    """Letters, a few pairs of letters, and an end token, which is the last one."""

    bos_token_id = None

    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = vocab_size - 1
        self.special_token_ids = [self.eos_token_id]
        self.texts = TEXTS[: vocab_size - 1]
        self.tokens = [*(text.encode() for text in self.texts), b"<end>"]

    def __call__(self, text: bytes | str) -> list[int]:
        left = text.decode() if isinstance(text, bytes) else text
        found = []
        while left:
            best = max((each for each in self.texts if left.startswith(each)), key=len, default="")
            found += [self.texts.index(best)] if best else []
            left = left[len(best) or 1 :]
        return found


@cache
def tiny_compiler(vocab_size: int, num_logits: int | None = None) -> GrammarCompiler:
    """Compiler for a target with logits of all tokens, or of the first `num_logits`."""
    tokenizer = LLTokenizer(TokenizerWrapper(TinyTokenizer(vocab_size)))
    return GrammarCompiler(tokenizer, num_logits or vocab_size)


def tiny_matcher(params: SamplingParams, vocab_size: int) -> GrammarMatcher | None:
    """A matcher for a row with these settings; None for settings without a grammar."""
    return None if params.grammar is None else tiny_compiler(vocab_size).matcher(params.grammar)


END = 3
"""The end token of the vocabulary of `a`, `b`, `c` and the end."""
ENDS = frozenset({END})
REGEXES = {
    "may-end": "a(b|ca)*",
    "short": "a|cb",
    "must-end": "a(b|cb)a",
    "forced": "(abc|cab)(a|b)",
}
MOST_LETTERS_TO_THE_END = 4


def viable(regex: str, text: str) -> bool:
    """Return True if some text of the grammar begins like this."""
    return any(
        re.fullmatch(regex, text + "".join(rest))
        for length in range(MOST_LETTERS_TO_THE_END + 1)
        for rest in product("abc", repeat=length)
    )


@cache
def allowed_tokens(regex: str, output: tuple[int, ...]) -> tuple[bool, ...]:
    """The mask over `a`, `b`, `c` and the end, by trying all texts."""
    text = "".join(TEXTS[token] for token in output)
    letters = [viable(regex, text + letter) for letter in "abc"]
    return (*letters, re.fullmatch(regex, text) is not None)


def masked_dist(
    dist: NextTokenDist, regex: str, prompt: tuple[int, ...], greedy: bool = False
) -> Callable[[tuple[int, ...]], Tensor]:
    """Return the distribution of plain decoding after an output; only the end where nothing else is possible."""

    def next_dist(output: tuple[int, ...]) -> Tensor:
        probs = dist((*prompt, *output)) * torch.tensor(allowed_tokens(regex, output))
        if not probs.sum():
            probs[END] = 1.0
        if greedy:
            return torch.nn.functional.one_hot(probs.argmax(), len(probs)).double()
        return probs / probs.sum()

    return next_dist


def with_regex(params: SamplingParams, regex: str) -> SamplingParams:
    return replace(params, grammar=Grammar.regex(regex))
