"""Structured output: grammars that the output must follow, compiled and matched by llguidance.

At each query, the tokens that no text of the grammar can continue with get probability zero. The
output distribution is that of plain decoding with the same mask, for any drafter and verifier. It
is not the model's distribution conditioned on the grammar: a mask looks one token ahead.

The mask depends on llguidance: where the text is forced, it allows the tokenizer's own
segmentation only. Where this is a special token, which the text of a grammar cannot contain, every
segmentation is allowed. The extra `serve` installs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import compress, takewhile
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from secondguess.core import Row
from secondguess.errors import BadInputError
from secondguess.params import Grammar

MAX_CACHED_GRAMMARS = 128
"""Number of compiled grammars kept per tokenizer."""
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
"""Limits of llguidance on work and memory, so that no grammar delays other requests for long."""

Mask = NDArray[numpy.bool_]


class GrammarCompiler:
    """Compiler of grammars for an `llguidance.LLTokenizer`, with a cache.

    The target's logits, `vocab_size` wide, may lack some tokens of the tokenizer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiled = lru_cache(maxsize=MAX_CACHED_GRAMMARS)(self._compile)

    def matcher(self, grammar: Grammar) -> GrammarMatcher:
        """Return a matcher at the beginning of a text; an invalid or too large grammar raises a BadInputError."""
        unforced = partial(self._compiled, grammar, False)
        return GrammarMatcher(self._compiled(grammar), unforced, self._vocab_size)

    def _compile(self, grammar: Grammar, forces_tokens: bool = True) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        try:
            source = _source(grammar) if forces_tokens else _unforced_source(grammar)
        except ValueError as error:
            raise _invalid(grammar, str(error)) from None
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
        if not matcher.is_error():
            matcher.compute_bitmask()  # finds out that a text of the grammar cannot begin
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        matcher.reset()
        return matcher


def _source(grammar: Grammar) -> str:
    """Return a grammar in llguidance's own format."""
    from llguidance import LLMatcher

    source: str
    if grammar.kind == "regex":
        source = LLMatcher.grammar_from_regex(grammar.text)
    elif grammar.kind == "lark":
        source = LLMatcher.grammar_from_lark(grammar.text)
    else:
        schema = grammar.text if grammar.kind == "json_schema" else '{"type": "object"}'
        source = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_flexible": False})
    return source


def _unforced_source(grammar: Grammar) -> str:
    """Return a grammar that allows every segmentation of a forced text, in llguidance's own format."""
    from llguidance import LLMatcher

    text = grammar.text
    if grammar.kind != "lark":
        (described,) = json.loads(_source(grammar))["grammars"]
        text = described["lark_grammar"] or f"start: %json {json.dumps(described['json_schema'])}"
    source: str = LLMatcher.grammar_from_lark(f'%llguidance {{"no_forcing": true}}\n{text}')
    return source


def _invalid(grammar: Grammar, reason: str) -> BadInputError:
    if reason.startswith("NoExtensionBias"):
        reason = "no text of this vocabulary matches it"
    if "coerce_one_of" in reason:
        reason = "oneOf whose alternatives can both match is not supported; write anyOf"
    shown = " ".join(reason.split())[:300]
    return BadInputError(
        f"expected a valid {grammar.kind} as grammar, got one that llguidance refuses: {shown}"
    )


class GrammarMatcher:
    """Position of one row's output in its grammar.

    It follows the committed tokens (`push`) and answers for drafted paths below them (`allowed`)
    without being changed by them. `start` is llguidance's matcher at the beginning of the text, and
    `unforced` returns one that allows every segmentation of a forced text.
    """

    def __init__(self, start: Any, unforced: Callable[[], Any], vocab_size: int) -> None:
        self._start = start
        self._unforced = unforced
        self._vocab_size = vocab_size
        self._matcher = start.deep_copy()
        self._committed: list[int] = []
        self._path: tuple[int, ...] = ()  # drafted tokens that the matcher has consumed
        self._masks: dict[tuple[int, ...], Mask | None] = {}
        # Paths without a mask, because of a limit or for lack of tokens.
        self._dead_ends: set[tuple[int, ...]] = set()
        self.has_failed = False

    def push(self, token: int) -> bool:
        """Add the next output token; return True if the text is complete and nothing can follow."""
        self._move_to(())
        self._masks.clear()
        self._committed.append(token)
        self.has_failed = () in self._dead_ends or not self._matcher.consume_token(token)
        self._dead_ends = {path[1:] for path in self._dead_ends if path[:1] == (token,)}
        return bool(not self.has_failed and self._matcher.is_stopped())

    def allowed(self, path: tuple[int, ...]) -> Mask | None:
        """Return the tokens `[vocab]` that may follow the committed tokens and a drafted path.

        None where nothing is masked: below a token that is not allowed or that completes the text,
        where the row cannot get to.
        """
        if path not in self._masks:
            self._masks[path] = self._mask_after(path)
        return self._masks[path]

    def forced(self) -> list[int]:
        """Return the tokens that must follow the committed ones; empty if there is a choice."""
        self._move_to(())
        forced: list[int] = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        known = list(takewhile(lambda token: token < self._vocab_size, forced))
        return known[: self._matcher.validate_tokens(known)]

    def _mask_after(self, path: tuple[int, ...]) -> Mask | None:
        if path:
            above = self.allowed(path[:-1])
            if above is None or path[-1] >= len(above) or not above[path[-1]]:
                return None
        for _ in range(2):
            self._move_to(path)
            matcher = self._matcher
            if path and matcher.is_stopped() and not matcher.is_error():
                return None
            mask = self._mask_of(matcher)
            if mask is not None and self._lacks_token(matcher, mask):
                matcher = self._unforced().deep_copy()
                matcher.consume_tokens([*self._committed, *path])
                mask = self._mask_of(matcher)
                if mask is not None and not mask.any():
                    break
            if mask is not None:
                return mask
            # A limit was reached, perhaps on drafted paths, on which the text must not depend: try once
            # more with a matcher that has read this text alone.
            self._restart()
        self._dead_ends.add(path)
        return numpy.zeros(self._vocab_size, numpy.bool_)  # no token is known to be right: the text ends

    @staticmethod
    def _lacks_token(matcher: Any, mask: Mask) -> bool:
        """Return whether the forced token is one that the target lacks, or one that the grammar does not take."""
        num_allowed = numpy.count_nonzero(mask)
        return not num_allowed or (num_allowed == 1 and not matcher.validate_tokens([mask.argmax()]))

    def _mask_of(self, matcher: Any) -> Mask | None:
        """Return the tokens that a matcher allows; None if it has reached a limit."""
        bits = numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8)
        if matcher.is_error():
            return None
        return numpy.unpackbits(bits, count=self._vocab_size, bitorder="little").view(numpy.bool_)

    def _move_to(self, path: tuple[int, ...]) -> None:
        """Consume the tokens of a drafted path, which are allowed, in place of those of the last one."""
        common = 0
        while common < min(len(path), len(self._path)) and path[common] == self._path[common]:
            common += 1
        if common < len(self._path):
            self._matcher.rollback(len(self._path) - common)
        if common < len(path):
            self._matcher.consume_tokens(list(path[common:]))
        self._path = path

    def _restart(self) -> None:
        """Replace the matcher, as it does not recover from an error."""
        self._matcher, self._path = self._start.deep_copy(), ()
        self._matcher.consume_tokens(self._committed)


def mask_by_grammar_(logits: Tensor, rows: Sequence[Row], nodes: Tensor, visible: Tensor) -> None:
    """Mask, in place, the tokens that the rows' grammars do not allow.

    Where no token is left, as when `logit_bias` bans what the grammar requires, the row's end tokens are allowed.
    Arguments as in `LogitProcessors.apply`.
    """
    for index, row in enumerate(rows):
        if row.params.grammar is None:
            continue
        if row.grammar is None:
            raise BadInputError(
                "cannot apply the grammar: the row has no matcher for it. Make the row with make_row."
            )
        own, width = logits[index], logits.shape[-1]
        tokens = nodes[index].tolist()
        masks = [row.grammar.allowed(tuple(compress(tokens, seen))) for seen in visible[index].tolist()]
        banned = numpy.zeros((len(masks), width), numpy.bool_)
        for query_bans, mask in zip(banned, masks, strict=True):
            if mask is not None:
                query_bans[: len(mask)] = ~mask[:width]
                query_bans[len(mask) :] = True
        own.masked_fill_(torch.from_numpy(banned).to(own.device), -math.inf)
        for query, largest in enumerate(own.amax(-1).tolist()):
            if largest == -math.inf and masks[query] is not None:
                own[query, [token for token in row.end_tokens if token < width]] = 0.0


_COMPILERS: WeakKeyDictionary[Any, GrammarCompiler] = WeakKeyDictionary()
_LOCK = Lock()


def compiler_for(tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]) -> GrammarCompiler:
    """Return the compiler for a fast tokenizer, always used with the same other arguments.

    The first call takes up to half a second. End tokens are allowed where the text may end, and nowhere else.
    """
    with _LOCK:
        found = _COMPILERS.get(tokenizer)
        if found is None:
            found = _COMPILERS[tokenizer] = _make_compiler(tokenizer, vocab_size, end_tokens)
        return found


def _make_compiler(tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]) -> GrammarCompiler:
    try:
        from llguidance.hf import from_tokenizer
    except ImportError:
        raise BadInputError(
            "cannot apply a grammar: llguidance is not installed. Run `pip install secondguess[serve]`."
        ) from None
    try:
        # llguidance needs a place for every token of the tokenizer, also where the model has fewer.
        num_tokens = max(vocab_size, len(tokenizer))
        found = from_tokenizer(tokenizer, num_tokens, sorted(end_tokens) or None)
        return GrammarCompiler(found, vocab_size)
    except ValueError as error:
        raise BadInputError(
            f"cannot apply a grammar: llguidance does not support the tokenizer: {error}"
        ) from None
