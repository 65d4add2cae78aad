"""Incremental text: whole characters, equal to decoding at once, cut before a stop string."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from secondguess.core import Row
from secondguess.sampling import SamplingParams
from secondguess.sampling.text import (
    MAX_WINDOW_TOKENS,
    IncrementalDecoder,
    StreamingDetokenizer,
    text_of_token,
)

CORPUS = [
    "def naïve(items): return [item for item in items if item]\n",
    "Hello world, hello text. The quick brown fox; the lazy dog.\n",
    "print('ok')\n\nclass Stack:\n    pass\n",
    "return\nreturn\nreturn\nreturn\n",
]
TEXTS = [
    "def f(items):\n    return [x for x in items]\n",
    "naïve café — 日本語 🙂👩‍👩‍👧 done",
    "€€€🙂🙂日本",
    "a  b   c\n\n\n",
    "",
]


def byte_level() -> PreTrainedTokenizerFast:
    """Like GPT-2: any byte is a token, characters outside the corpus are spread over several."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


def sentence_piece() -> PreTrainedTokenizerFast:
    """Like Llama 2: words begin with a mark that is a space except in front, bytes are the last resort."""
    words = ["▁Hello", "▁world", "▁", "▁the", "a", "b", "c", "é", ",", "\n"]
    pieces = ["<|end|>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    model = models.BPE(
        {piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>")


TOKENIZERS = {"byte-level": byte_level(), "sentence-piece": sentence_piece()}
BYTES = TOKENIZERS["byte-level"]
PIECES = TOKENIZERS["sentence-piece"]


def spell(text: str) -> list[int]:
    """Tokens of a sentence-piece text, space by space and byte by byte where no word fits."""
    ids = []
    for word in text.replace(" ", "\x00▁").split("\x00"):
        whole = PIECES.convert_tokens_to_ids(word)
        if word in PIECES.get_vocab():
            ids.append(whole)
            continue
        for character in word:
            if character in PIECES.get_vocab():
                ids.append(PIECES.convert_tokens_to_ids(character))
            else:
                ids += [PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in character.encode()]
    return ids


def encode(name: str, text: str) -> list[int]:
    return BYTES.encode(text) if name == "byte-level" else spell(text)


def single_bytes(text: str) -> list[int]:
    """One byte-level token per byte, as a model may choose to write what has a longer token."""
    parts = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [BYTES.convert_tokens_to_ids(character) for part, _ in parts for character in part]


def pieces_of(stream: StreamingDetokenizer, row: Row, commits: list[list[int]]) -> list[str]:
    """Commit runs of tokens (all but the last of each drafted) and take a piece after each."""
    pieces = []
    for tokens in commits:
        pieces.append(stream.take(row.commit(tokens[:-1], tokens[-1])).text)
        if row.finished:
            break
    return pieces


def watched_row(stop=(), tokenizer=BYTES, prompt="p", **settings) -> tuple[StreamingDetokenizer, Row]:
    prompt_ids = encode("byte-level" if tokenizer is BYTES else "sentence-piece", prompt)
    include = settings.get("include_stop_str_in_output", False)
    stream = StreamingDetokenizer(tokenizer, prompt_ids, stop, settings.get("min_tokens", 0), include)
    ends = frozenset({tokenizer.eos_token_id})
    return stream, Row(
        prompt_ids, SamplingParams(**settings), end_tokens=ends, stop_checker=stream.stop_checker
    )


def in_runs(tokens: list[int], seed: int) -> list[list[int]]:
    chooser, runs = random.Random(seed), []
    while tokens:
        size = chooser.randint(1, 4)
        runs.append(tokens[:size])
        tokens = tokens[size:]
    return runs


class TestIncrementalDecoder:
    @pytest.mark.parametrize("name", TOKENIZERS)
    @pytest.mark.parametrize("prompt", TEXTS[:4])
    @pytest.mark.parametrize("text", TEXTS)
    def test_joined_pieces_equal_the_text_decoded_at_once(self, name, prompt, text):
        tokenizer = TOKENIZERS[name]
        before, ids = encode(name, prompt), encode(name, text)
        decoder = IncrementalDecoder(tokenizer, before)
        pieces = [decoder.push(token) for token in ids]
        assert not any("\ufffd" in piece for piece in pieces)
        whole = tokenizer.decode([*before, *ids])
        assert whole == tokenizer.decode(before) + "".join(pieces)
        assert decoder.flush() == ""

    @pytest.mark.parametrize("text", TEXTS)
    def test_characters_of_several_tokens_are_emitted_whole(self, text):
        decoder = IncrementalDecoder(BYTES, encode("byte-level", "p"))
        pieces = [decoder.push(token) for token in single_bytes(text)]
        assert [piece for piece in pieces if piece] == list(text)

    @pytest.mark.parametrize("name", TOKENIZERS)
    def test_text_does_not_depend_on_how_many_tokens_are_pushed_together(self, name):
        tokenizer, chooser = TOKENIZERS[name], random.Random(0)
        special = set(tokenizer.all_special_ids)
        # Random tokens are often invalid UTF-8; those of one byte or a rare character even more so.
        bytes_alone = [token for token in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([token])]
        anything = [token for token in range(len(tokenizer)) if token not in special]
        for _ in range(200):
            ids = [chooser.choice(bytes_alone if chooser.random() < 0.6 else anything) for _ in range(24)]
            one, many = (IncrementalDecoder(tokenizer, encode(name, "a b")) for _ in range(2))
            expected = "".join([one.push(token) for token in ids]) + one.flush()
            runs = in_runs(ids, seed=chooser.random())
            assert "".join([many.push(*run) for run in runs]) + many.flush() == expected

    def test_an_open_character_is_read_on_token_by_token(self):
        """A real replacement character, an ideographic space and a letter, in two groupings."""
        ids = [
            *(PIECES.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "\ufffd\u3000".encode()),
            *spell("é"),
        ]
        texts = []
        for runs in ([[each] for each in ids], [*([each] for each in ids[:4]), ids[4:]]):
            decoder = IncrementalDecoder(PIECES, spell("a"))
            texts.append("".join([decoder.push(*run) for run in runs]) + decoder.flush())
        assert texts[0] == texts[1]

    @pytest.mark.parametrize("end", [" \ufffd", "\ufffd\ufffd"])
    def test_a_merged_replacement_character_of_the_prompt_is_not_repeated(self, end):
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(["q \ufffd q\ufffd\ufffd"] * 50, trainer)
        fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
        prompt, output = fast.encode(f"q{end}"), fast.encode("hello")
        assert len(prompt) < len(f"q{end}".encode())
        assert IncrementalDecoder(fast, prompt).push(*output) == "hello"

    @pytest.mark.parametrize("end", ["\ufffd", "\ufffd\ufffd\ufffd"])
    def test_a_replacement_character_of_the_prompt_is_not_repeated(self, end):
        decoder = IncrementalDecoder(BYTES, single_bytes(f"a{end}"))
        assert "".join([decoder.push(token) for token in single_bytes("b€")]) + decoder.flush() == "b€"
        at_its_end = IncrementalDecoder(BYTES, single_bytes(f"a{end}"))
        assert at_its_end.flush() == ""

    def test_spaces_are_not_cleaned_up(self):
        """A clean-up would remove the space before a comma, which has been returned."""
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer(
                models.WordPiece({"[UNK]": 0, "a": 1, ",": 2, "b": 3, "'": 4, "s": 5}, unk_token="[UNK]")
            ),
            clean_up_tokenization_spaces=True,
        )
        tokenizer.backend_tokenizer.decoder = decoders.WordPiece(cleanup=False)
        ids = [1, 2, 3, 4, 5, 1]
        one, whole = (IncrementalDecoder(tokenizer, [1]) for _ in range(2))
        assert "".join([one.push(token) for token in ids]) == whole.push(*ids) == " a , b ' s a"

    def test_a_leading_space_is_dropped_only_at_the_start(self):
        hello = PIECES.convert_tokens_to_ids("▁Hello")
        assert IncrementalDecoder(PIECES, spell("a,b")).push(hello) == " Hello"
        assert IncrementalDecoder(PIECES, [PIECES.eos_token_id]).push(hello) == "Hello"

    def test_a_prompt_that_ends_in_special_tokens_is_context_all_the_same(self):
        prompt = [*spell("Hello world"), *[PIECES.eos_token_id] * 20]
        assert IncrementalDecoder(PIECES, prompt).push(PIECES.convert_tokens_to_ids("▁the")) == " the"

    def test_special_tokens_in_the_output_do_not_push_the_context_out(self):
        decoder = IncrementalDecoder(PIECES, spell("Hello world"))
        ids = [*spell("a,b"), *[PIECES.eos_token_id] * 40, PIECES.convert_tokens_to_ids("▁the")]
        assert "".join(decoder.push(token) for token in ids) == "a,b the"

    def test_special_tokens_have_no_text(self):
        decoder = IncrementalDecoder(BYTES, encode("byte-level", "p"))
        ids = [*encode("byte-level", "a"), BYTES.eos_token_id, *encode("byte-level", "b")]
        assert [decoder.push(token) for token in ids] == ["a", "", "b"]

    def test_the_output_may_complete_a_character_of_the_prompt(self):
        ids = single_bytes("a€b")
        decoder = IncrementalDecoder(BYTES, ids[:2])
        assert [decoder.push(token) for token in ids[2:]] == ["", "€", "b"]

    def test_an_incomplete_end_is_shown_when_nothing_follows(self):
        decoder = IncrementalDecoder(BYTES, encode("byte-level", "p"))
        assert [decoder.push(token) for token in single_bytes("a🙂")[:4]] == ["a", "", "", ""]
        assert decoder.flush() == "\ufffd"

    def test_invalid_bytes_do_not_block_the_following_text(self):
        lone = single_bytes("€")[1]
        ids = [lone] * 300 + single_bytes("🙂x")
        decoder = IncrementalDecoder(BYTES, encode("byte-level", "p"))
        pieces = [decoder.push(token) for token in ids]
        assert "".join(pieces) == "\ufffd" * 300 + "🙂x"
        assert any(pieces[:10])

    @pytest.mark.parametrize(
        "ids",
        [single_bytes("word " * 300), single_bytes("🙂" * 300), single_bytes("€")[1:2] * 999],
        ids=["words", "characters", "no text"],
    )
    def test_each_step_decodes_a_bounded_number_of_tokens(self, ids):
        sizes = []

        class Counting:
            def decode(self, token_ids, **options):
                sizes.append(len(token_ids))
                return BYTES.decode(token_ids, **options)

        decoder = IncrementalDecoder(Counting(), encode("byte-level", "p" * 1000))
        for token in ids:
            decoder.push(token)
        assert max(sizes) <= MAX_WINDOW_TOKENS + 1
        assert len(sizes) <= 2 * len(ids)


class TestPieces:
    @pytest.mark.parametrize("seed", range(4))
    @pytest.mark.parametrize("text", TEXTS[:4])
    def test_joined_segments_equal_the_text(self, text, seed):
        stream, row = watched_row(stop=["\n\n\n\n", "done!"])
        for run in in_runs([*single_bytes(text), BYTES.eos_token_id], seed):
            commit = row.commit(run[:-1], run[-1])
            piece = stream.take(commit)
            assert "".join(text for text, _ in piece.segments) == piece.text
            assert (piece.tokens, piece.drafted) == (commit.tokens, commit.drafted)
            assert "\ufffd" not in piece.text
            text = text.removeprefix(piece.text) if text.startswith(piece.text) else pytest.fail(piece.text)
        assert row.finish_reason == "stop"
        assert text == ""

    def test_a_character_belongs_to_the_token_that_completed_it(self):
        stream, row = watched_row()
        tokens = single_bytes("ab€c")
        assert stream.take(row.commit(tokens[:3], tokens[3])).segments == [("ab", True)]
        assert stream.take(row.commit(tokens[4:5], tokens[5])).segments == [("€", True), ("c", False)]

    def test_held_text_keeps_its_origin(self):
        stream, row = watched_row(stop=["xyz"])
        tokens = single_bytes("axyb")
        assert stream.take(row.commit(tokens[:1], tokens[1])).segments == [("a", True)]
        later = stream.take(row.commit(tokens[2:3], tokens[3]))
        assert later.segments == [("x", False), ("y", True), ("b", False)]

    def test_a_token_of_which_a_part_is_held_is_in_two_pieces(self):
        stream, row = watched_row(stop=["nx"])
        (token,) = BYTES.encode("return")
        assert stream.take(row.commit([], token)).segments == [("retur", False)]
        later = stream.take(row.commit(single_bytes("a"), single_bytes("b")[0]))
        assert later.segments == [("n", False), ("a", True), ("b", False)]

    def test_an_incomplete_character_at_the_end_belongs_to_the_last_token(self):
        stream, row = watched_row(max_tokens=2)
        accepted, last = single_bytes("a"), single_bytes("€")[0]
        assert stream.take(row.commit(accepted, last)).segments == [("a", True), ("\ufffd", False)]

    def test_the_end_emits_all_held_text(self):
        stream, row = watched_row(stop=["xyz"], max_tokens=4)
        tokens = single_bytes("axy🙂")
        assert pieces_of(stream, row, [tokens[:3], tokens[3:4]]) == ["a", "xy\ufffd"]
        assert row.finish_reason == "length"

    def test_an_interruption_emits_all_complete_characters(self):
        stream, row = watched_row(stop=["xyz"])
        tokens = single_bytes("axy🙂")
        assert pieces_of(stream, row, [tokens[:4]]) == ["a"]
        assert stream.flush(row.output).text == "xy"
        assert stream.flush(row.output).text == ""

    def test_an_interruption_between_commit_and_piece_loses_no_text(self):
        stream, row = watched_row()
        tokens = single_bytes("ab")
        stream.take(row.commit([], tokens[0]))
        row.commit([], tokens[1])
        assert stream.flush(row.output).text == "b"


class TestStopStrings:
    @pytest.mark.parametrize("stop", [["stop"], ["never", "stop", "op"], ["p st", "stop"], ["st"]])
    @pytest.mark.parametrize("seed", range(6))
    def test_the_text_ends_before_the_first_stop_string_for_any_tokenisation(self, stop, seed):
        text = "so st sto it stopp stop"
        expected = min((text.split(each)[0] for each in stop), key=len)
        for ids in (single_bytes(text), encode("byte-level", text)):
            stream, row = watched_row(stop)
            pieces = pieces_of(stream, row, in_runs(ids, seed))
            assert "".join(pieces) == expected
            assert row.finish_reason == "stop"

    def test_a_stop_string_inside_one_token_cuts_within_it(self):
        (token,) = BYTES.encode("return")
        stream, row = watched_row(["tur"])
        assert pieces_of(stream, row, [[token]]) == ["re"]

    def test_the_first_of_several_completed_stop_strings_counts(self):
        (token,) = BYTES.encode("return")
        stream, row = watched_row(["urn", "etu", "turn"])
        assert pieces_of(stream, row, [[token]]) == ["r"]

    @pytest.mark.parametrize("seed", range(4))
    def test_the_text_can_end_with_the_stop_string(self, seed):
        for tokens in (single_bytes("so stopped"), BYTES.encode("so stopped")):
            stream, row = watched_row(["pp", "never"], include_stop_str_in_output=True)
            assert "".join(pieces_of(stream, row, in_runs(tokens, seed))) == "so stopp"
            assert row.finish_reason == "stop"

    def test_only_a_possible_beginning_of_a_stop_string_is_held(self):
        stream, row = watched_row(["abac"])
        assert pieces_of(stream, row, [[token] for token in single_bytes("xababax")]) == [
            "x", "", "", "", "ab", "", "abax",
        ]  # fmt: skip

    def test_the_tokens_of_a_stop_string_stay_in_the_token_ids(self):
        stream, row = watched_row(["cd"])
        tokens = single_bytes("abcdef")
        assert pieces_of(stream, row, [tokens]) == ["ab"]
        assert row.output == tokens[:4]

    def test_unicode_stop_strings_match_split_characters(self):
        stream, row = watched_row(["🙂"])
        assert "".join(pieces_of(stream, row, in_runs(single_bytes("a€🙂b"), 0))) == "a€"
        assert row.finish_reason == "stop"

    def test_a_stop_string_is_searched_only_in_the_output(self):
        stream, row = watched_row(["pq"], prompt="p")
        pieces = pieces_of(stream, row, [[token] for token in single_bytes("qpq")])
        assert pieces == ["q", "", ""]
        assert row.finish_reason == "stop"

    def test_a_stop_string_before_min_tokens_stays_in_the_text(self):
        stream, row = watched_row(["ab"], min_tokens=4)
        pieces = pieces_of(stream, row, [[token] for token in single_bytes("xabyabz")])
        assert "".join(pieces) == "xaby"
        assert row.finish_reason == "stop"

    def test_a_stop_string_before_min_tokens_stays_in_a_text_that_ends_otherwise(self):
        stream, row = watched_row(["b"], min_tokens=4, max_tokens=9)
        stream.push(*single_bytes("a"))
        assert not stream.push(*single_bytes("b"))
        row.tokens += single_bytes("ab")
        assert stream.flush(row.output, "stop").text == "ab"

    def test_a_stop_string_completed_after_min_tokens_counts(self):
        stream, row = watched_row(["abc"], min_tokens=3)
        assert "".join(pieces_of(stream, row, [[token] for token in single_bytes("abcd")])) == ""
        assert row.num_output == 3

    def test_characters_of_a_skipped_stop_string_do_not_begin_the_next(self):
        stream, row = watched_row(["aa"], min_tokens=3)
        pieces = pieces_of(stream, row, [[token] for token in single_bytes("aaaab")])
        assert pieces == ["", "aa", "", ""]
        assert row.num_output == 4

    def test_a_second_stop_string_within_a_skipped_token_is_skipped(self):
        (token,) = BYTES.encode("return")
        stream, row = watched_row(["r"], min_tokens=2)
        assert pieces_of(stream, row, [[token, *single_bytes("x")]]) == ["returnx"]
        assert not row.finished

    def test_a_skipped_stop_string_is_not_cut_at_the_end_of_the_context(self):
        stream, row = watched_row(["ab"], min_tokens=9)
        row.context_length = len(row.tokens) + 3
        assert "".join(pieces_of(stream, row, [[token] for token in single_bytes("xab")])) == "xab"
        assert row.finish_reason == "context"

    def test_without_stop_strings_nothing_is_held(self):
        stream, row = watched_row()
        assert pieces_of(stream, row, [[token] for token in single_bytes("abc")]) == ["a", "b", "c"]


class TestTextOfToken:
    @pytest.mark.parametrize(
        ("piece", "text"),
        [("▁the", " the"), ("▁", " "), ("a", "a"), ("<|end|>", "<|end|>"), ("<0xE2>", "\ufffd")],
    )
    def test_the_leading_space_of_a_sentencepiece_token_is_kept(self, piece, text):
        assert text_of_token(PIECES, PIECES.convert_tokens_to_ids(piece)) == text

    @pytest.mark.parametrize("text", ["<|end|>", " ", "\n", "a", "\t"])
    def test_a_byte_level_token_is_its_text(self, text):
        assert text_of_token(BYTES, BYTES.encode(text)[0]) == text

    def test_a_padding_id_of_the_vocabulary_has_no_text(self):
        assert text_of_token(PIECES, len(PIECES) + 5) == ""
