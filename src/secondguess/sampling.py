"""Sampling settings, and the conversion of logits to probabilities.

All distributions in the package, the target's and the drafters', are computed here, in this order:

    logit bias, repetition penalty, frequency and presence penalty, ban of end tokens
    (`min_tokens`), temperature, top-k, top-p, min-p

Each query of a draft gets the distribution that plain decoding has after the same prefix:
penalties and `min_tokens` count a node's drafted ancestors as if they were committed. Speculation
would not be lossless otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from numbers import Integral, Real
from typing import TypeGuard

import torch
from torch import Tensor

from secondguess.core import MAX_DRAFT_LENGTH, Commit, Draft, Row, TokenLogprob
from secondguess.errors import BadInputError, SecondGuessError
from secondguess.penalties import LogitProcessors
from secondguess.truncation import RowRules

MAX_LOGPROBS = 20
MAX_SAMPLES = 16384


class TokenBias(Mapping[int, float]):
    """Immutable, hashable map from token id to the value added to its logit (-inf: ban)."""

    def __init__(self, values: Mapping[int, float] | None = None) -> None:
        self._values = dict(sorted((values or {}).items()))

    def __getitem__(self, token: int) -> float:
        return self._values[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(tuple(self._values.items()))

    def __repr__(self) -> str:
        return repr(self._values)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request, validated on construction.

    Args:
        max_tokens: largest number of output tokens; 1 or more.
        min_tokens: before this many output tokens, end tokens and `stop_token_ids` cannot be
            sampled, and `stop` does not end the text.
        temperature: 0 is greedy, 1 is the model's own distribution; 0, or from 0.0001 to 100.
        top_k: keep the k most probable tokens, and those tied with the last one; 0 disables it.
        top_p: keep the smallest set of most probable tokens (lower ids first among equals) whose
            total probability reaches this value; 1 disables it.
        min_p: keep tokens with at least this fraction of the top token's probability; 0 disables
            it.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that
            occur in prompt or output; 1 disables it.
        frequency_penalty: subtracted from a token's logit once per occurrence in the output; from
            -2 to 2.
        presence_penalty: subtracted from a token's logit if it occurs in the output; from -2 to 2.
        logit_bias: value added to the logit, by token id; from -100 to 100, or -inf for a ban.
        stop: the text ends before the first of these strings; a single string is accepted.
        stop_token_ids: tokens that end the text, in addition to the model's end tokens.
        n: samples per prompt. More than 1 needs a temperature above 0. Where `seed` makes the text
            reproducible, sample i is the same text for any n.
        seed: makes the text reproducible. With verifier `auto` or `coupled` the text is then also
            the same with any drafter, in float32 and float64, and on a CPU in bfloat16.
        logprobs: report each token's log-probability and this many alternatives (0: only its own);
            None reports nothing.
        draft_length: draft this many levels per round for this request, in place of the
            controller's choice; 0 is plain decoding. It does not change the output distribution.

    Raises:
        BadInputError: a value of the wrong type or out of range.
    """

    max_tokens: int = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=TokenBias)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    draft_length: int | None = None

    def __post_init__(self) -> None:
        self._check_integer("max_tokens", 1, 2**31 - 1)
        self._check_integer("min_tokens", 0, self.max_tokens, "it may not exceed max_tokens")
        self._check_number("temperature", 0, 100, "0 is greedy decoding, 1 the model's own distribution")
        if 0 < self.temperature < 1e-4:
            raise _invalid("temperature", "0, or a number from 0.0001 to 100", self.temperature, "use 0")
        self._check_integer("top_k", 0, 2**31 - 1, "use 0 to turn it off")
        self._check_number("top_p", 0, 1, "use 1 to turn it off")
        if self.top_p == 0:
            raise _invalid("top_p", "above 0 and at most 1", self.top_p, "temperature=0 is greedy decoding")
        self._check_number("min_p", 0, 1, "use 0 to turn it off")
        self._check_number("repetition_penalty", 0.01, 100, "use 1 to turn it off")
        self._check_number("frequency_penalty", -2, 2, "use 0 to turn it off")
        self._check_number("presence_penalty", -2, 2, "use 0 to turn it off")
        self._set("logit_bias", _checked_bias(self.logit_bias))
        self._set("stop", _checked_stop(self.stop))
        self._set("stop_token_ids", _checked_tokens(self.stop_token_ids))
        self._check_integer("n", 1, MAX_SAMPLES)
        if self.n > 1 and self.temperature == 0:
            raise _invalid(
                "n", "1 at temperature 0, where all samples are equal", self.n, "set a temperature above 0"
            )
        if self.seed is not None:
            self._check_integer("seed", 0, 2**64 - 1, "leave it out for a fresh text each time")
        if self.logprobs is not None:
            self._check_integer("logprobs", 0, MAX_LOGPROBS, "leave it out to report none")
        if self.draft_length is not None:
            advice = "leave it out to let the controller decide"
            self._check_integer("draft_length", 0, MAX_DRAFT_LENGTH, advice)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Needed for every row in every round: it is the key of the cached setting tensors.
        return hash(tuple([getattr(self, name) for name in self.__dataclass_fields__]))

    @cached_property
    def edits_logits(self) -> bool:
        """True if these settings can change which logit is the largest."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalised or self.min_tokens > 0 or bool(self.logit_bias)

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that a model with `vocab_size` tokens does not have.

        Raises:
            BadInputError: `logit_bias` or `stop_token_ids` names a token outside the vocabulary.
        """
        for name, tokens in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token in tokens:
                if token >= vocab_size:
                    raise _invalid(name, f"token ids below {vocab_size}", token, "see the tokenizer")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_integer(self, name: str, lowest: int, highest: int, advice: str = "") -> None:
        value = getattr(self, name)
        if not _is_integer(value) or not lowest <= value <= highest:
            raise _invalid(name, f"a whole number from {lowest} to {highest}", value, advice)
        self._set(name, int(value))

    def _check_number(self, name: str, lowest: float, highest: float, advice: str) -> None:
        value = getattr(self, name)
        # NaN fails every comparison, so it is refused here too.
        if not _is_number(value) or not lowest <= value <= highest:
            raise _invalid(name, f"a number from {lowest} to {highest}", value, advice)
        self._set(name, float(value))


def _invalid(name: str, expected: str, got: object, advice: str) -> BadInputError:
    return BadInputError(f"expected {name} to be {expected}, got {got!r}" + (f"; {advice}" if advice else ""))


def _checked_bias(bias: object) -> TokenBias:
    advice = "give a map such as {198: -5.0}; -inf bans a token"
    if not isinstance(bias, Mapping):
        raise _invalid("logit_bias", "a map from token id to a number", bias, advice)
    for token, value in bias.items():
        if not _is_token(token):
            raise _invalid("logit_bias", "a map from token ids (whole numbers from 0)", token, advice)
        if not _is_number(value) or not (-100 <= value <= 100 or value == -math.inf):
            raise _invalid(f"logit_bias[{token}]", "a number from -100 to 100, or -inf", value, advice)
    return TokenBias({int(token): float(value) for token, value in bias.items()})


def _checked_stop(stop: object) -> tuple[str, ...]:
    advice = 'give a string or a list of strings, such as ["\\n\\n"]'
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, Iterable):
        raise _invalid("stop", "a string or a list of strings", stop, advice)
    strings = tuple(strings)
    for string in strings:
        if not isinstance(string, str) or not string:
            raise _invalid("stop", "strings of at least one character", string, advice)
    return strings


def _checked_tokens(tokens: object) -> tuple[int, ...]:
    advice = "give a list such as [2, 50256]"
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise _invalid("stop_token_ids", "a list of token ids", tokens, advice)
    tokens = tuple(tokens)
    for token in tokens:
        if not _is_token(token):
            raise _invalid("stop_token_ids", "token ids (whole numbers from 0)", token, advice)
    return tuple(int(token) for token in tokens)


def _is_integer(value: object) -> TypeGuard[int]:
    """Return True for Python and NumPy integers; booleans are not accepted as numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_token(token: object) -> TypeGuard[int]:
    return _is_integer(token) and token >= 0


def compute_target_probs(logits: Tensor, rows: Sequence[Row], draft: Draft) -> Tensor:
    """Return the target's probabilities after sampling settings, each query with its own prefix.

    Args:
        logits: `[row, node + 1, vocab]`; not modified.
        rows: their settings apply, and penalties count their tokens.
        draft: nodes whose queries are 1 and up.

    Returns:
        Probabilities `[row, node + 1, vocab]` in the logits' dtype (float32 for half precision).

    Raises:
        BadInputError: the settings ban every token.
        SecondGuessError: the model's logits are not finite.
    """
    edits, rules = _settings(rows, logits)
    scores = _at_least_float32(logits)
    if edits.change_logits(rows):
        # Query 0 follows `pending`: no drafted node precedes it.
        visible = torch.nn.functional.pad(draft.ancestors(), (0, 0, 1, 0))
        scores = edits.apply(scores, rows, draft.tokens, visible)
    return _check_finite(rules.dists(scores), logits)


def compute_draft_probs(logits: Tensor, rows: Sequence[Row], drafted: Tensor) -> Tensor:
    """Return the probabilities from which a chain drafter draws its next node, per row.

    Args:
        logits: `[row, vocab]` after the rows' tokens and `drafted`; not modified. The vocabulary
            can be larger or smaller than the target's; settings for missing tokens do not apply.
        rows: their settings apply, and penalties count their tokens.
        drafted: `[row, i]` nodes drawn so far in this round.

    Returns:
        Probabilities `[row, vocab]` in the logits' dtype (float32 for half precision).

    Raises:
        BadInputError: the settings ban every token.
        SecondGuessError: the model's logits are not finite.
    """
    edits, rules = _settings(rows, logits)
    scores = _at_least_float32(logits)[:, None]
    if edits.change_logits(rows):
        visible = torch.ones(len(rows), 1, drafted.shape[1], dtype=torch.bool, device=logits.device)
        scores = edits.apply(scores, rows, drafted, visible)
    return _check_finite(rules.dists(scores), logits)[:, 0]


def commit_logprobs(commit: Commit, logits: Tensor, path: Sequence[int]) -> Commit:
    """Add log-probabilities to a commit if its request asks for them.

    Args:
        commit: tokens that the row gained.
        logits: `[node + 1, vocab]` of this row. Their log-softmax is reported, before any sampling
            setting.
        path: accepted nodes. Token 0 of the commit follows query 0, token i follows node
            `path[i - 1]`.

    Returns:
        The commit itself if the request asks for no log-probabilities, else a copy with them.
    """
    num_alternatives = commit.row.params.logprobs
    if num_alternatives is None:
        return commit
    queries = [0, *(node + 1 for node in path)][: len(commit.tokens)]
    logprobs = _at_least_float32(logits[queries]).log_softmax(-1)
    tokens = torch.tensor(commit.tokens, device=logits.device)
    own = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
    top = logprobs.topk(min(num_alternatives, logprobs.shape[-1]))
    alternatives = [
        {token: value for token, value in zip(ids, values, strict=True) if value > -math.inf}
        for ids, values in zip(top.indices.tolist(), top.values.tolist(), strict=True)
    ]
    reports = zip(commit.tokens, own, alternatives, strict=True)
    return replace(commit, logprobs=[TokenLogprob(*report) for report in reports])


def _settings(rows: Sequence[Row], logits: Tensor) -> tuple[LogitProcessors, RowRules]:
    """Return the batch's settings as tensors."""
    return _setting_tensors(tuple([row.params for row in rows]), logits.shape[-1], logits.device)


@lru_cache(maxsize=256)
def _setting_tensors(
    params: tuple[SamplingParams, ...], vocab_size: int, device: torch.device
) -> tuple[LogitProcessors, RowRules]:
    """Convert settings to tensors; cached while the same requests decode together."""
    return LogitProcessors.of(params, vocab_size, device), RowRules.of(params, device)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype in (torch.float32, torch.float64) else logits.float()


def _check_finite(dists: Tensor, logits: Tensor) -> Tensor:
    # An undefined distribution is NaN in every entry, and one NaN makes the sum below NaN.
    first = dists[..., 0]
    if math.isnan(first.item() if first.numel() == 1 else first.sum().item()):
        if bool(logits.isnan().any()) or bool((logits == math.inf).any()):
            raise SecondGuessError(
                "expected finite logits from the model, got NaN or infinity; its weights are broken, or "
                "overflow in this precision: try another dtype"
            )
        raise BadInputError(
            "expected at least one possible token, got settings that ban every token; "
            "relax logit_bias or min_tokens"
        )
    return dists
