"""Tokenizer of a GGUF file, built by the library `tokenizers` from its vocabulary, merges, scores and types.

A file names the tokenizer's model (`tokenizer.ggml.model`) and, for byte-level BPE, how text is split before it
(`tokenizer.ggml.pre`). Splits and normalisation are those of the publishers' `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE, Unigram
from transformers import TokenizersBackend

from secondguess.checkpoint.gguf.file import GgufFile
from secondguess.errors import UnsupportedModelError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
SPACE = "▁"
NAMED = ("bos", "eos", "unknown", "padding", "seperator", "mask")
"""Named tokens of a file, in ggml's spelling."""
ARGUMENTS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "mask_token")
"""Their names in Transformers."""

ENGLISH = r"'s|'t|'re|'ve|'m|'ll|'d"
ENGLISH_IN_ANY_CASE = rf"(?i:{ENGLISH})"
GPT2 = rf"{ENGLISH}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
"""Words that begin with capital letters, and what may follow them."""
CJK = r"[一-龥\u0800-一가-\ud7ff]+"


class Split(NamedTuple):
    """Splits of text before byte-level BPE."""

    patterns: tuple[str, ...]  # applied in turn; what they match becomes a part
    ignores_merges: bool = False  # a part that is a token is not merged from its bytes
    adds_bos: bool = False  # a text begins with the first token where the file does not say so
    composes: bool = False  # characters are composed first (Unicode NFC)


LLAMA_3 = Split((rf"{ENGLISH_IN_ANY_CASE}|{WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}",))
QWEN_2 = Split((rf"{ENGLISH_IN_ANY_CASE}|{WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{END}",))
STARCODER = Split((r"\p{N}", GPT2))
TEKKEN = Split(
    (rf"{CASED % ('', '')}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}",), ignores_merges=True, adds_bos=True
)
GPT_4O = Split(
    (
        rf"{CASED % (f'{ENGLISH_IN_ANY_CASE}?', f'{ENGLISH_IN_ANY_CASE}?')}"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{END}",
    )
)
DEEPSEEK_3 = Split(
    (
        r"\p{N}{1,3}",
        r"[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{END}",
    )
)
DEFAULT = "default"
"""Name of the split of a file without one."""
SPLITS: dict[str, Split] = {
    "gpt-2": Split((GPT2,)),
    "llama-bpe": LLAMA_3._replace(ignores_merges=True, adds_bos=True),
    "dbrx": LLAMA_3,
    "chatglm-bpe": LLAMA_3,
    "qwen2": QWEN_2._replace(composes=True),
    "stablelm2": QWEN_2,
    "qwen35": Split(
        (
            rf"{ENGLISH_IN_ANY_CASE}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{END}",
        ),
        composes=True,
    ),
    "smollm": STARCODER,
    "tekken": TEKKEN,
    "gpt-4o": GPT_4O,
    "deepseek-v3": DEEPSEEK_3,
    "deepseek-coder": Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, r"\p{N}")),
    DEFAULT: Split((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "falcon": Split((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
}
SAME_SPLITS = {
    "gpt-2": (
        "mpt",
        "olmo",
        "phi-2",
        "jais",
        "exaone4",
        "granite-docling",
        "gigachat",
        "mellum",
        "a.x-4.0",
        "trillion",
    ),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "dbrx": ("smaug-bpe",),
    "chatglm-bpe": ("glm4",),
    "qwen2": ("deepseek-r1-qwen", "kormo", "megrez", "grok-2"),
    "stablelm2": ("hunyuan", "solar-open"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "gpt-4o": ("llama4", "kanana2", "minimax-m2"),
    "deepseek-v3": ("hunyuan-dense", "joyai-llm"),
}
"""Other names of splits."""
SPLITS |= {name: SPLITS[kind] for kind, names in SAME_SPLITS.items() for name in names}


def read_tokenizer(file: GgufFile) -> Any:
    """Return the tokenizer of a GGUF file, as one of Transformers.

    An unknown model or split raises an UnsupportedModelError, missing or contradictory fields a ValueError.
    """
    fields = {
        name.removeprefix("tokenizer."): value
        for name, value in file.fields.items()
        if name.startswith("tokenizer.")
    }
    kind = fields.get("ggml.model")
    if kind not in MODELS:
        raise _unknown(file, f"tokenizer.ggml.model {kind!r:.40}", MODELS)
    if not isinstance(fields.get("ggml.tokens"), list):
        raise ValueError("no tokenizer.ggml.tokens")
    tokenizer, adds_bos = MODELS[str(kind)](file, fields)
    _add_tokens(tokenizer, fields)
    names = _named_tokens(fields)
    _add_ends(tokenizer, fields, names, adds_bos)
    found = GgufTokenizer(tokenizer, clean_up_tokenization_spaces=False, **names)
    found.chat_template = _chat_template(fields)
    return found


class GgufTokenizer(TokenizersBackend):  # type: ignore[misc]
    """Tokenizer of Transformers around one of `tokenizers`, which it takes as it is; its base class would copy it."""

    def __init__(self, tokenizer: Tokenizer, **arguments: Any) -> None:
        self._tokenizer = tokenizer
        super().__init__(**arguments)


def _byte_level(file: GgufFile, fields: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    name = fields.get("ggml.pre", DEFAULT)
    if name not in SPLITS:
        raise _unknown(file, f"tokenizer.ggml.pre {name!r:.40}", SPLITS)
    split = SPLITS[str(name)]
    merges = [_halves(merge) for merge in fields.get("ggml.merges") or ()]
    tokenizer = Tokenizer(BPE(_vocabulary(fields), merges, ignore_merges=split.ignores_merges))
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if split.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.adds_bos


def _halves(merge: str) -> tuple[str, str]:
    """Split a merge at its space; the first half may begin with one."""
    place = merge.find(" ", 1)
    if place < 0:
        raise ValueError(f"tokenizer.ggml.merges with {merge!r:.40}")
    return merge[:place], merge[place + 1 :]


def _sentence_piece(file: GgufFile, fields: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    """Return a tokenizer of SentencePiece's BPE, which merges the pair that makes the token with the highest score."""
    vocabulary = _vocabulary(fields)
    merges = list(_merges_of_scores(vocabulary, _column(fields, "scores")))
    unknown = _named_tokens(fields).get("unk_token")
    tokenizer = Tokenizer(BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    _set_spaces(tokenizer, fields.get("ggml.add_space_prefix", True))
    return tokenizer, True


def _merges_of_scores(vocabulary: Mapping[str, int], scores: list[float]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens whose concatenation is a token, those with the highest score first."""
    ranked = sorted(vocabulary, key=lambda token: -scores[vocabulary[token]])
    for token in ranked:
        pairs = [
            (left, right)
            for place in range(1, len(token))
            if (left := token[:place]) in vocabulary and (right := token[place:]) in vocabulary
        ]
        if len(pairs) > 1:
            pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        yield from pairs


def _unigram(file: GgufFile, fields: Mapping[str, Any]) -> tuple[Tokenizer, bool]:
    tokens, scores = fields["ggml.tokens"], _column(fields, "scores")
    unknown = fields.get("ggml.unknown_token_id")
    pieces = list(zip(tokens, scores, strict=True))
    tokenizer = Tokenizer(Unigram(pieces, unknown, byte_fallback=BYTE in _types(fields)))
    _set_spaces(tokenizer, fields.get("ggml.add_space_prefix", True))
    if table := fields.get("ggml.precompiled_charsmap"):
        table = normalizers.Precompiled(bytes(number % 256 for number in table))
        tokenizer.normalizer = normalizers.Sequence([table, tokenizer.normalizer])
    return tokenizer, False


MODELS = {"gpt2": _byte_level, "llama": _sentence_piece, "t5": _unigram}
"""Functions that make tokenizers, by `tokenizer.ggml.model`; they return whether texts begin with the first token by default."""


def _set_spaces(tokenizer: Tokenizer, has_prefix: bool) -> None:
    """Write spaces as SentencePiece does, with one before a text if `has_prefix`."""
    marks: list[Any] = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*marks, normalizers.Replace(" ", SPACE)])
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if has_prefix else [])])


def _types(fields: Mapping[str, Any]) -> list[int]:
    return (
        _column(fields, "token_type")
        if "ggml.token_type" in fields
        else [NORMAL] * len(fields["ggml.tokens"])
    )


def _column(fields: Mapping[str, Any], name: str) -> list[Any]:
    """Return a field with a value for each token."""
    values = fields.get(f"ggml.{name}")
    if not isinstance(values, list) or len(values) != len(fields["ggml.tokens"]):
        raise ValueError(
            f"tokenizer.ggml.{name} that does not have a value for each of {len(fields['ggml.tokens']):,} tokens"
        )
    return values


def _vocabulary(fields: Mapping[str, Any]) -> dict[str, int]:
    """Return the ids of tokens; unused ones have no text."""
    pairs = enumerate(zip(fields["ggml.tokens"], _types(fields), strict=True))
    return {token: index for index, (token, kind) in pairs if kind != UNUSED}


def _add_tokens(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> None:
    """Recognise control tokens and those that were added by their publisher, before text is split."""
    for kinds, is_special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        tokens = [
            AddedToken(token, special=is_special, normalized=False)
            for token, kind in zip(fields["ggml.tokens"], _types(fields), strict=True)
            if kind in kinds
        ]
        (tokenizer.add_special_tokens if is_special else tokenizer.add_tokens)(tokens)


def _named_tokens(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the arguments of Transformers for the named tokens."""
    tokens = fields["ggml.tokens"]
    ids = {
        argument: fields.get(f"ggml.{name}_token_id") for name, argument in zip(NAMED, ARGUMENTS, strict=True)
    }
    return {
        argument: tokens[index]
        for argument, index in ids.items()
        if index is not None and 0 <= index < len(tokens)
    }


def _add_ends(
    tokenizer: Tokenizer, fields: Mapping[str, Any], names: Mapping[str, str], adds_bos: bool
) -> None:
    """Add the first and the last token to texts, where the file or its kind says so."""
    first = (
        [names["bos_token"]] if fields.get("ggml.add_bos_token", adds_bos) and "bos_token" in names else []
    )
    last = [names["eos_token"]] if fields.get("ggml.add_eos_token", False) and "eos_token" in names else []
    if first or last:
        ids = [(token, tokenizer.token_to_id(token)) for token in (*first, *last)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last], pair=[*first, "$A", *last, *first, "$B", *last], special_tokens=ids
        )


def _chat_template(fields: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the template of chats, or templates by their names if there are several; None without one."""
    named = {
        name.removeprefix("chat_template."): value
        for name, value in fields.items()
        if name.startswith("chat_template.") and isinstance(value, str)
    }
    default = fields.get("chat_template")
    return {"default": default, **named} if named and default else default


def _unknown(file: GgufFile, found: str, known: Mapping[str, object]) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"expected a GGUF file with a known tokenizer ({', '.join(known)}), got {found} in {file.path}; "
        "use the safetensors checkpoint of the model"
    )
