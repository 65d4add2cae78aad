"""Settings of a request: `SamplingParams`, and the grammar of its output."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from typing import Literal, TypeGuard, get_args

from secondguess.errors import BadInputError

GrammarKind = Literal["json_schema", "json_object", "regex", "lark"]
MAX_GRAMMAR_LENGTH = 65_536
"""Largest number of characters of a grammar; compiling takes about 10 microseconds for each."""
MAX_DRAFT_LENGTH = 64
"""Largest draft length, in levels. No longer draft is useful, so larger values are refused."""
MIN_TEMPERATURE = 1e-4
"""Smallest temperature above 0."""
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


_OFF_AT_0, _OFF_AT_1 = "use 0 to turn it off", "use 1 to turn it off"
_INTEGERS = {
    "max_tokens": (0, 2**31 - 1, ""),
    "top_k": (0, 2**31 - 1, _OFF_AT_0),
    "n": (1, MAX_SAMPLES, ""),
}
"""Setting -> lowest value, highest value and advice."""
_OPTIONAL_INTEGERS = {
    "seed": (0, 2**64 - 1, "leave it out for a fresh text each time"),
    "logprobs": (0, MAX_LOGPROBS, "leave it out to report none"),
    "prompt_logprobs": (0, MAX_LOGPROBS, "leave it out to report none"),
    "draft_length": (0, MAX_DRAFT_LENGTH, "leave it out to let the controller decide"),
    "max_draft_length": (0, MAX_DRAFT_LENGTH, "leave it out for no limit"),
}
_NUMBERS = {
    "temperature": (0, 100, "0 is greedy decoding, 1 the model's own distribution"),
    "top_p": (0, 1, _OFF_AT_1),
    "min_p": (0, 1, _OFF_AT_0),
    "repetition_penalty": (0.01, 100, _OFF_AT_1),
    "frequency_penalty": (-2, 2, _OFF_AT_0),
    "presence_penalty": (-2, 2, _OFF_AT_0),
}


@dataclass(frozen=True)
class Grammar:
    """Grammar that the output must follow, from its first token to its end.

    Use the constructors `json_schema`, `json_object`, `regex` and `lark`. The request's own
    vocabulary is needed to check a grammar, so it is compiled when its row is made.

    Args:
        kind: notation of `text`.
        text: the grammar; empty for `json_object`.

    Raises:
        BadInputError: a value of the wrong type, a text that is too long, or a JSON schema that is no JSON object.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise BadInputError(
                f"expected a grammar of the kind {', '.join(get_args(GrammarKind))}, got {self.kind!r}"
            )
        if not isinstance(self.text, str):
            raise BadInputError(f"expected the {self.kind} of a grammar as a text, got {self.text!r:.60}")
        if len(self.text) > MAX_GRAMMAR_LENGTH:
            raise BadInputError(
                f"expected a grammar of at most {MAX_GRAMMAR_LENGTH} characters, got {len(self.text)}; shorten it"
            )
        if self.kind == "json_schema":
            _check_schema(self.text)

    @classmethod
    def json_schema(cls, schema: Mapping[str, object] | str) -> Grammar:
        """Return the grammar of JSON values of a schema, written without optional whitespace.

        Properties are written in the order of the schema. The key `x-guidance` of the schema holds
        options of llguidance, such as `{"whitespace_flexible": true}`.

        Raises:
            BadInputError: not a JSON object.
        """
        try:
            text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadInputError(
                f"expected a JSON schema, got a value that JSON cannot hold: {error}"
            ) from None
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Return the grammar of any JSON object, written without optional whitespace."""
        return cls("json_object")

    @classmethod
    def regex(cls, text: str) -> Grammar:
        """Return the grammar of texts that match a regular expression as a whole."""
        return cls("regex", text)

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Return a context-free grammar in llguidance's dialect of Lark."""
        return cls("lark", text)

    @classmethod
    def parse(cls, value: object) -> Grammar:
        """Return a grammar given as an object with one key, such as `{"regex": "[0-9]+"}`.

        `{"json_object": true}` is any JSON object.

        Raises:
            BadInputError: another value.
        """
        if isinstance(value, Grammar):
            return value
        if isinstance(value, Mapping) and len(value) == 1:
            ((kind, content),) = value.items()
            if kind == "json_schema":
                return cls.json_schema(content)
            if kind == "json_object" and content is True:
                return cls.json_object()
            if kind in ("regex", "lark"):
                return cls(kind, content)
        raise BadInputError(
            'expected grammar to be a Grammar, such as Grammar.regex("[0-9]+"), or an object with one of the keys '
            f"json_schema, json_object (true), regex and lark, got {value!r:.60}"
        )


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings of a request, validated on construction.

    Args:
        max_tokens: largest number of output tokens; with 0 the prompt is only scored (`prompt_logprobs`).
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
        include_stop_str_in_output: the text ends with the string of `stop` that ended it.
        stop_token_ids: tokens that end the text, in addition to the model's end tokens.
        ignore_eos: the model's end tokens do not end the text, and `min_tokens` does not ban them;
            for load tests. With a grammar, whose end they show, they still do, and are banned.
        n: samples per prompt, all equal at temperature 0. Where `seed` makes the text
            reproducible, sample i is the same text for any n.
        seed: makes the text reproducible. With verifier `auto` or `coupled` the text is then also
            the same with any drafter, in float32 and float64, and on a CPU in bfloat16.
        logprobs: report each token's log-probability and this many alternatives (0: only its own);
            None reports nothing.
        prompt_logprobs: the same for the tokens of the prompt, from the second on. They are scored as a
            draft is: in passes of `draft_length` + 1 tokens if that is given, else of as many as memory allows.
        grammar: the output must follow this grammar; a `Grammar`, or an object with one key such as
            `{"json_schema": {...}}`. It needs the extra `serve`.
        prediction: a guess of the output, as text or token ids, such as the text that is to be
            edited. It is drafted from, and does not change the output distribution.
        draft_length: draft this many levels per round for this request, in place of the
            controller's choice; 0 is plain decoding. It does not change the output distribution.
        max_draft_length: draft at most this many levels per round for this request.
        draft_with: draft for this request with these parts of the loaded drafter alone, such as
            `suffix` of `suffix+model:PATH`. `ngram` is available with any drafter; with `none`, only
            the prediction and the grammar's forced tokens are drafted.
        history: where recent outputs are shared (`share_history` of `load`), draft from them and
            add this output to them; False for neither.

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
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | Mapping[str, object] | None = None
    prediction: str | Sequence[int] | None = None
    draft_length: int | None = None
    max_draft_length: int | None = None
    draft_with: str | None = None
    history: bool = True

    def __post_init__(self) -> None:
        for name, bounds in _INTEGERS.items():
            self._check_integer(name, *bounds)
        self._check_integer("min_tokens", 0, self.max_tokens, "it may not exceed max_tokens")
        for name, bounds in _OPTIONAL_INTEGERS.items():
            if getattr(self, name) is not None:
                self._check_integer(name, *bounds)
        for name, (low, high, advice) in _NUMBERS.items():
            self._check_number(name, low, high, advice)
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise _invalid("temperature", "0, or a number from 0.0001 to 100", self.temperature, "use 0")
        if self.top_p == 0:
            raise _invalid("top_p", "above 0 and at most 1", self.top_p, "temperature=0 is greedy decoding")
        self._set("logit_bias", _checked_bias(self.logit_bias))
        self._set("stop", _checked_stop(self.stop))
        self._set("stop_token_ids", _checked_tokens("stop_token_ids", self.stop_token_ids))
        if self.grammar is not None:
            self._set("grammar", Grammar.parse(self.grammar))
        if self.draft_with is not None and not isinstance(self.draft_with, str):
            raise _invalid("draft_with", "a name", self.draft_with, "leave it out for the loaded drafter")
        for name in ("include_stop_str_in_output", "ignore_eos", "history"):
            if not isinstance(getattr(self, name), bool):
                raise _invalid(name, "True or False", getattr(self, name))
        if self.prediction is not None and not isinstance(self.prediction, str):
            self._set("prediction", _checked_tokens("prediction", self.prediction))

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Needed for every row in every round: it is the key of the cached setting tensors.
        return hash(tuple([getattr(self, name) for name in self.__dataclass_fields__]))

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone: the hashes of texts differ between processes."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def edits_logits(self) -> bool:
        """True if these settings can change which logit is the largest."""
        penalised = self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0
        return penalised or self.min_tokens > 0 or bool(self.logit_bias) or self.grammar is not None

    def check_vocab(self, vocab_size: int) -> None:
        """Refuse token ids that a model with `vocab_size` tokens does not have.

        Raises:
            BadInputError: `logit_bias`, `stop_token_ids` or `prediction` names a token outside the
                vocabulary.
        """
        predicted = () if self.prediction is None or isinstance(self.prediction, str) else self.prediction
        named = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "prediction": predicted,
        }
        for name, tokens in named.items():
            for token in tokens:
                if token >= vocab_size:
                    raise _invalid(name, f"token ids below {vocab_size}", token, "see the tokenizer")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_integer(self, name: str, lowest: int, highest: int, advice: str) -> None:
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


def _check_schema(text: str) -> None:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"expected a JSON schema, got a text that is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise BadInputError(f"expected a JSON schema that is an object, got {schema!r:.60}")


def _invalid(name: str, expected: str, got: object, advice: str = "") -> BadInputError:
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


def _checked_tokens(name: str, tokens: object) -> tuple[int, ...]:
    advice = "give a list such as [2, 50256]"
    if isinstance(tokens, str) or not isinstance(tokens, Iterable):
        raise _invalid(name, "a list of token ids", tokens, advice)
    tokens = tuple(tokens)
    for token in tokens:
        if not _is_token(token):
            raise _invalid(name, "token ids (whole numbers from 0)", token, advice)
    return tuple(int(token) for token in tokens)


def _is_integer(value: object) -> TypeGuard[int]:
    """Return True for Python and NumPy integers; booleans are not accepted as numbers."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_token(token: object) -> TypeGuard[int]:
    return _is_integer(token) and token >= 0
