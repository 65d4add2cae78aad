"""The tokenizer: lossless for any text, and the same for prompts that end anywhere."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from builtin_pair.tokenizer import (
    END_TOKEN,
    as_transformers,
    end_token_id,
    load_tokenizer,
    train_tokenizer,
)
from secondguess.errors import BadInputError, CheckpointError

TEXT = 'def total(items):\n    """Add them."""\n    for item in items:\n        if item:\n            yield item\n\n\n'


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([TEXT * 20] * 5, 350)


def _any_character(choice: random.Random) -> str:
    point = choice.randrange(0x110000 - 0x800)
    return chr(point if point < 0xD800 else point + 0x800)  # surrogates are not characters


def _awkward_texts() -> list[str]:
    choice = random.Random(3)
    alphabet = ["\r\n", "  ", "__init__", "1234", '"""', " ,", *"\n\t a_é漢😀\u200b'.\x00"]
    mixed = ["".join(choice.choices(alphabet, k=40)) for _ in range(200)]
    anything = ["".join(_any_character(choice) for _ in range(20)) for _ in range(50)]
    return [TEXT, "", " ", "\n", "don 't stop . now ?", END_TOKEN, *mixed, *anything]


def test_decoding_inverts_encoding(tokenizer: Tokenizer) -> None:
    fast = as_transformers(tokenizer, 64)
    for text in _awkward_texts():
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    for text in _awkward_texts():
        assert fast.decode(fast(text)["input_ids"]) == text


def test_a_prompt_ending_with_a_line_is_tokenised_as_inside_a_file(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode(TEXT).ids
    for end in (
        TEXT.index("(items)") + len("(items):"),
        TEXT.index('."""') + len('."""\n'),
        TEXT.index("if item"),
    ):
        prompt = tokenizer.encode(TEXT[:end]).ids
        assert whole[: len(prompt)] == prompt


def test_indentation_is_one_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("\n        if").tokens[1] == "Ġ" * 8


def test_training_the_tokenizer_is_deterministic(tokenizer: Tokenizer) -> None:
    assert train_tokenizer([TEXT * 20] * 5, 350).to_str() == tokenizer.to_str()


def test_a_missing_or_foreign_tokenizer_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    for content in (None, "{", Tokenizer(models.BPE()).to_str()):
        if content is not None:
            path.write_text(content)
        with pytest.raises(CheckpointError, match=r"made by .* in .*tokenizer\.json"):
            load_tokenizer(path)
    assert end_token_id(tokenizer) == 0
    with pytest.raises(BadInputError, match="at least 300"):
        train_tokenizer([TEXT], 100)
