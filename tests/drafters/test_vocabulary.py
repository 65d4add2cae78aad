"""Vocabularies: bytes of tokens, comparison of two, and the draft model's view of a growing text."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, normalizers, pre_tokenizers

from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.drafters.vocabulary.tokens import Vocabulary
from secondguess.drafters.vocabulary.view import MAX_TAIL_CHARACTERS, DraftView
from secondguess.errors import CheckpointError
from vocabulary_cases import (
    LOSSLESS,
    TOKENIZERS,
    WORDS,
    byte_level,
    sentencepiece,
    tiny_pair,
    trained,
    vocabulary,
)

few = settings(max_examples=20, deadline=None)
every_tokenizer = pytest.mark.parametrize("kind", TOKENIZERS)
PHRASES = st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)


def view_of(target: str, draft: str) -> DraftView:
    pair = VocabularyPair.from_vocabularies(vocabulary(target), vocabulary(draft))
    return DraftView(pair)


def in_commits(tokens: list[int], cuts: list[int]) -> list[list[int]]:
    """Return the tokens at the ends of the commits, the last of which completes them."""
    ends = sorted({min(cut, len(tokens)) for cut in cuts} | {len(tokens)})
    return [tokens[:end] for end in ends]


@pytest.mark.parametrize(
    ("kind", "token", "data"),
    [
        ("byte-level", "Ġself", b" self"),
        ("byte-level", "Ċ", b"\n"),
        ("byte-level", "Ã", b"\xc3"),  # the first half of é
        ("byte-level", "<|end|>", None),
        ("sentencepiece", "▁self", b" self"),
        ("sentencepiece", "<0xC3>", b"\xc3"),
        ("sentencepiece", "<s>", None),
        ("unigram", "▁self", b" self"),
        ("unigram", "<unk>", None),
        ("wordpiece", "self", b" self"),
        ("wordpiece", "##s", b"s"),
        ("wordpiece", ",", b","),
        ("wordpiece", "[UNK]", None),
    ],
)
def test_a_token_has_the_bytes_that_it_adds_to_a_text(kind: str, token: str, data: bytes | None) -> None:
    index = trained(kind).token_to_id(token)
    assert index is not None
    assert vocabulary(kind).bytes_of(index) == data


@every_tokenizer
@few
@given(text=st.text() | PHRASES)
def test_the_bytes_of_a_texts_tokens_are_the_text(kind: str, text: str) -> None:
    tokens = trained(kind).encode(text, add_special_tokens=False).ids
    known = vocabulary(kind)
    written = [token for token in tokens if known.bytes_of(token) is not None]
    data = [known.bytes_of(token, begins=not place) or b"" for place, token in enumerate(written)]
    assert b"".join(data).decode() == trained(kind).decode(tokens)


def test_ids_beyond_the_tokenizer_have_no_bytes() -> None:
    assert vocabulary("byte-level").bytes_of(10_000) is None


def test_added_tokens_are_text_unless_they_are_special() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("    ", normalized=False), AddedToken("<|user|>", special=True)])
    known = Vocabulary(tokenizer)
    assert known.bytes_of(320) == b"    "
    assert known.bytes_of(321) is None
    assert known.encode("a    <|user|>").ids[1] == 320
    assert 321 not in known.encode("a    <|user|>").ids


def without_decoder() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = None
    return tokenizer


def with_end_of_word_suffixes() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


@pytest.mark.parametrize(
    ("make", "found"), [(without_decoder, "decoder none"), (with_end_of_word_suffixes, "BPEDecoder")]
)
def test_a_tokenizer_whose_tokens_have_no_bytes_is_refused(make, found) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(CheckpointError, match=rf"{found} for some/model; choose"):
        Vocabulary(make(), name="some/model")


def test_a_tokenizer_without_tokenizer_json_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"SimpleNamespace without tokenizer\.json for some/model"):
        Vocabulary.from_tokenizer(SimpleNamespace(is_fast=False), "some/model")


@pytest.mark.parametrize("draft", LOSSLESS)
@pytest.mark.parametrize("target", LOSSLESS)
@few
@given(text=st.text() | PHRASES | st.text("语言模型 🙂é\n", max_size=40), cuts=st.lists(st.integers(0, 60)))
def test_the_view_decodes_to_the_text_of_the_row(target: str, draft: str, text: str, cuts: list[int]) -> None:
    """The row is committed in any pieces, which may end within a character."""
    tokens = trained(target).encode(text).ids
    view = view_of(target, draft)
    for committed in in_commits(tokens, cuts):
        before = list(view.tokens)
        num_unchanged = view.follow(committed)
        assert view.tokens[:num_unchanged] == before[:num_unchanged]
    assert view.num_read == len(tokens)
    assert view.is_complete
    assert trained(draft).decode(view.tokens) == trained(target).decode(tokens)


@every_tokenizer
@few
@given(text=PHRASES, cuts=st.lists(st.integers(0, 60)))
def test_the_view_has_the_tokens_of_the_whole_text(kind: str, text: str, cuts: list[int]) -> None:
    """Also for tokenizers that normalise text, or write words only."""
    tokens = trained("byte-level").encode(text).ids
    view = view_of("byte-level", kind)
    for committed in in_commits(tokens, cuts):
        view.follow(committed)
    expected = trained(kind).encode(text, add_special_tokens=False).ids
    assert trained(kind).decode(view.tokens) == trained(kind).decode(expected)
    if kind in ("byte-level", "wordpiece"):  # others may write a long word in another way, part by part
        assert view.tokens == [*vocabulary(kind).prefix, *expected]


def test_half_a_character_is_held_back() -> None:
    tokens = trained("byte-level").encode("a🙂b").ids
    view = view_of("byte-level", "sentencepiece")
    complete = []
    for end in range(1, len(tokens) + 1):
        view.follow(tokens[:end])
        complete.append(view.is_complete)
    assert complete == [True, False, False, False, True, True]
    assert trained("sentencepiece").decode(view.tokens) == "a🙂b"


def test_bytes_that_form_no_character_are_replaced_in_the_view() -> None:
    tokenizer = trained("byte-level")
    broken = [tokenizer.token_to_id(token) for token in ("a", "Ã", "b")]
    view = view_of("byte-level", "sentencepiece")
    view.follow(broken)
    assert trained("sentencepiece").decode(view.tokens) == tokenizer.decode(broken) == "a\ufffdb"


def chat_tokenizer(tokenizer: Tokenizer, special: list[str]) -> Tokenizer:
    tokenizer.add_special_tokens(special)
    return tokenizer


def test_special_tokens_are_translated_by_content_or_left_out() -> None:
    """A chat in the target's template; the draft model has `<|turn|>` and another end of text."""
    target = chat_tokenizer(byte_level(end="<|stop|>"), ["<|turn|>", "<|user|>"])
    draft = chat_tokenizer(sentencepiece(), ["<|turn|>"])
    pair = VocabularyPair.from_vocabularies(Vocabulary(target, end_token=0), Vocabulary(draft, end_token=2))
    view = DraftView(pair)
    view.follow(target.encode("<|user|>\nself<|turn|>items<|stop|>").ids)
    pieces = [draft.id_to_token(token) for token in view.tokens]
    assert pieces[0] == "<s>"
    assert pieces[-1] == "</s>"
    assert pieces.count("<|turn|>") == 1
    assert draft.decode(view.tokens) == "\nselfitems"


def test_a_beginning_of_text_token_is_not_written_twice() -> None:
    view = view_of("sentencepiece", "sentencepiece")
    view.follow(trained("sentencepiece").encode("self").ids)
    assert view.tokens == trained("sentencepiece").encode("self").ids


@every_tokenizer
@pytest.mark.parametrize("text", ["return self " * 500, "selfitems" * 400], ids=["words", "no-spaces"])
def test_the_cost_of_a_commit_does_not_depend_on_the_length_of_the_text(
    kind: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    encode = Vocabulary.encode

    def recorded(self: Vocabulary, text: str, begins: bool = False):  # type: ignore[no-untyped-def]
        lengths.append(len(text))
        return encode(self, text, begins)

    view = view_of("byte-level", kind)
    monkeypatch.setattr(Vocabulary, "encode", recorded)
    tokens = trained("byte-level").encode(text).ids
    for start, end in pairwise(range(0, len(tokens), 7)):
        assert view.follow(tokens[:end]) >= len(view.tokens) - MAX_TAIL_CHARACTERS
        assert start == 0 or lengths[-1] <= MAX_TAIL_CHARACTERS + 7 * 12
    assert len(lengths) > 100


def test_normalisers_do_not_strip_the_text_at_a_commit() -> None:
    draft = sentencepiece()
    draft.normalizer = normalizers.Sequence([normalizers.Strip(), draft.normalizer])
    view = DraftView(VocabularyPair.from_vocabularies(vocabulary("byte-level"), Vocabulary(draft)))
    tokens = trained("byte-level").encode("return self").ids
    for end in range(1, len(tokens) + 1):
        view.follow(tokens[:end])
    assert draft.decode(view.tokens) == "return self"


def test_a_prefix_space_is_written_only_where_the_text_begins() -> None:
    draft = byte_level()
    draft.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    known = Vocabulary(draft)
    assert draft.decode(known.encode("self", begins=True).ids) == " self"
    assert draft.decode(known.encode("self").ids) == "self"


@pytest.mark.parametrize(
    ("draft", "shares"),
    [
        (["c", "a", "b", "d"], (1.0, 1.0)),  # the same tokens with other ids
        (["a", "b", "c", "x", "y"], (0.75, 0.6)),
        (["x", "y", "xy"], (0.0, 0.0)),
    ],
)
def test_shares_are_those_of_tokens_with_the_same_bytes(draft, shares) -> None:  # type: ignore[no-untyped-def]
    pair = tiny_pair(["a", "b", "c", "d"], draft)
    assert (pair.target_share, pair.draft_share) == shares


def test_of_two_tokens_with_the_same_bytes_the_usual_one_is_shared() -> None:
    """SentencePiece has `a` and its byte token `<0x61>`, which no text is encoded to."""
    pair = VocabularyPair.from_vocabularies(vocabulary("sentencepiece"), vocabulary("byte-level"))
    letter, byte = (trained("sentencepiece").token_to_id(token) for token in ("a", "<0x61>"))
    assert pair.shared[letter] == trained("byte-level").token_to_id("a")
    assert byte not in pair.shared
    assert len(set(pair.shared.values())) == len(pair.shared)


def test_spaces_and_continued_words_are_the_same_in_all_kinds() -> None:
    wanted = {"byte-level": "Ġself", "sentencepiece": "▁self", "unigram": "▁self", "wordpiece": "self"}
    ids = {kind: trained(kind).token_to_id(token) for kind, token in wanted.items()}
    for kind in list(wanted)[1:]:
        pair = VocabularyPair.from_vocabularies(vocabulary("byte-level"), vocabulary(kind))
        assert pair.shared[ids["byte-level"]] == ids[kind]
