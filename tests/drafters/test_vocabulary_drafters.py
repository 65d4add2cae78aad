"""Draft models with another vocabulary: distributions, text drafts, names, and whole models."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from checkpoints import random_llama
from drafter_cases import GREEDY, OTHER_TOKENS, PROMPTS, VOCAB_SIZE, model_drafter, other_drafter, run
from secondguess import LLM, load
from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.combined import CombinedDrafter
from secondguess.drafters.suffix import SuffixDrafter, SuffixOptions
from secondguess.drafters.vocabulary.drafter import TranslatingDrafter
from secondguess.drafters.vocabulary.pair import VocabularyPair
from secondguess.drafters.vocabulary.tokens import Vocabulary
from secondguess.errors import BadInputError
from secondguess.proof.fakes import NextTokenDist, TableModel, random_probs
from secondguess.runtime.base import ForwardOutput
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import Exactness
from vocabulary_cases import END_TOKENS, byte_level, sentencepiece, tiny_pair, trained, vocabulary

SAMPLED = SamplingParams(max_tokens=40, temperature=1.0)


def always(logits: Tensor, depth: int, *_: object) -> list[bool]:
    return [True] * len(logits)


def propose(drafter: TranslatingDrafter, rows: list[Row], length: int) -> Draft:
    budgets = Budgets([length] * len(rows), always, uses_probs=False)
    drafter.prepare(rows, [0] * len(rows))
    return drafter.propose(rows, budgets, KeyedNoise.from_rows(rows))


def one_after_another(*tokens: int, vocab_size: int) -> NextTokenDist:
    """Return a draft distribution that writes these tokens in turn."""

    def dist(context: tuple[int, ...]) -> Tensor:
        return torch.nn.functional.one_hot(
            torch.tensor(tokens[len(context) % len(tokens)]), vocab_size
        ).double()

    return dist


def test_a_model_with_the_targets_distribution_is_often_accepted() -> None:
    result = run(other_drafter([*OTHER_TOKENS, "a"]), params=SAMPLED)
    rate = sum(stats.num_accepted for stats in result.stats) / sum(
        stats.num_drafted for stats in result.stats
    )
    assert rate > 0.2


def test_drafts_of_text_are_drawn_by_the_race_of_a_coupled_row() -> None:
    """A draft model with the target's distribution draws the target's tokens, under ids of its own."""
    rates = []
    for coupled in (True, False):
        (stats, *_) = run(other_drafter("fedcba"), PROMPTS[:1], SAMPLED, coupled=coupled).stats
        rates.append(stats.num_accepted / stats.num_drafted)
    assert rates[0] == 1
    assert rates[1] < 0.7


def test_drafts_of_text_make_unseeded_rows_coupled() -> None:
    text, samples = other_drafter(), model_drafter(random_probs(VOCAB_SIZE, 1))
    lookup = SuffixDrafter(SuffixOptions())
    assert [
        CombinedDrafter(parts, VOCAB_SIZE).draws_by_race
        for parts in ([text], [lookup, text], [lookup], [samples, text])
    ] == [True, True, False, False]
    for name, coupled in (("auto", True), ("coupled", True), ("rejection", False), ("block", False)):
        assert make_verifier(name).uses_coupling(seeded=False, draws_by_race=True) == coupled


def test_the_draft_model_reads_each_token_about_once() -> None:
    drafter = other_drafter()
    result = run(drafter, PROMPTS[:1], GREEDY)
    assert isinstance(drafter.runtime, TableModel)
    assert drafter.runtime.num_scored_tokens <= 2 * result.stats[0].num_drafted + 14


def test_a_draft_is_the_text_of_the_draft_model() -> None:
    pair = tiny_pair(["a", "b", "c", "ab"], ["c", "b", "a"])
    dist = one_after_another(2, 1, 0, vocab_size=3)
    drafter = TranslatingDrafter(TableModel(3, dist), "model:table", 4, pair)
    draft = propose(drafter, [Row([2, 3, 2], SAMPLED)], 3)  # c, ab, c: four tokens of the draft model
    assert draft.probs is None
    assert draft.tokens.tolist() == [
        [1, 2]
    ]  # of the text "bcab": b, c, and ab, which may become another token


def test_a_last_token_that_may_become_a_longer_one_is_held_back() -> None:
    pair = tiny_pair(["a", "b", "ab"], ["b", "a", "ba"])
    dist = one_after_another(2, 2, vocab_size=3)
    drafter = TranslatingDrafter(TableModel(3, dist), "model:table", 3, pair)
    draft = propose(drafter, [Row([1], SAMPLED)], 2)
    assert draft.tokens.tolist() == [[1, 2]]  # of the text "baba": b, ab, and a, which may become ab


def test_the_end_of_the_text_is_drafted() -> None:
    target, draft = byte_level(end="<|stop|>"), sentencepiece()
    pair = VocabularyPair.from_vocabularies(Vocabulary(target, 0), Vocabulary(draft, 2))
    size = len(pair.draft.tokens)
    dist = one_after_another(2, vocab_size=size)
    drafter = TranslatingDrafter(TableModel(size, dist), "model:table", 320, pair)
    row = Row(target.encode("self").ids, SAMPLED)
    assert propose(drafter, [row], 4).tokens.tolist() == [[0]]


def test_nothing_is_drafted_within_a_character() -> None:
    pair = VocabularyPair.from_vocabularies(vocabulary("byte-level"), vocabulary("sentencepiece"))
    size = len(pair.draft.tokens)
    dist = one_after_another(*trained("sentencepiece").encode("def").ids[1:], vocab_size=size)
    drafter = TranslatingDrafter(TableModel(size, dist), "model:table", 320, pair)
    tokens = trained("byte-level").encode("é").ids
    assert len(tokens) == 2
    row = Row(tokens[:1], SAMPLED)
    assert propose(drafter, [row], 2).num_nodes == 0
    row.tokens.append(tokens[1])
    assert drafter.candidates([row])[0][0].longest > 0
    assert propose(drafter, [row], 2).num_nodes > 0


def test_the_last_token_is_read_again_behind_a_token_without_text() -> None:
    target = byte_level()
    target.add_special_tokens(["<|turn|>"])
    pair = VocabularyPair.from_vocabularies(Vocabulary(target), vocabulary("sentencepiece"))
    runtime = TableModel(len(pair.draft.tokens), random_probs(len(pair.draft.tokens), 1))
    drafter = TranslatingDrafter(runtime, "model:table", 321, pair)
    row = Row(target.encode("self<|turn|>").ids, GREEDY)
    propose(drafter, [row], 1)
    row.tokens.append(row.tokens[-1])
    num_scored = runtime.num_scored_tokens
    propose(drafter, [row], 1)
    assert runtime.num_scored_tokens == num_scored + 1


def test_drafting_stops_where_the_draft_models_context_is_full() -> None:
    class StrictContext(TableModel):
        def score(self, rows: Sequence[Row], draft: Draft) -> ForwardOutput:
            assert all(len(row.tokens) <= self.context_length for row in rows)
            return super().score(rows, draft)

    pair = tiny_pair(["a", "b", "ab"], ["b", "a", "ba"])
    runtime = StrictContext(3, random_probs(3, 1), context_length=9)
    drafter = TranslatingDrafter(runtime, "model:table", 3, pair)
    result = run(drafter, [[0, 1]], SamplingParams(max_tokens=20), dist=random_probs(3, 1), vocab_size=3)
    assert result.stats[0].num_drafted > 0
    assert len(result.outputs[0]) == 20
    assert not runtime.num_live_rows


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a random draft model with a tokenizer of some kind."""

    def write(kind: str) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"other-{kind}"
        if not folder.exists():
            tokenizer = trained(kind)
            sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
            model = random_llama(
                5, vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=256, **sizes
            )
            model.save_pretrained(folder)
            end = tokenizer.id_to_token(END_TOKENS[kind])
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
        return folder

    return write


PROMPT = "def quicksort(items):\n    # naïve 🙂\n"


SETTINGS = ({"temperature": 0.0}, {"temperature": 1.0, "seed": 7})


def texts_and_num_drafted(model: LLM) -> tuple[list[str], int]:
    """Return greedy and seeded texts of a batch, and the number of nodes that were drafted for them."""
    prompts = [PROMPT, "class Stack:"]
    outputs = [
        output for settings in SETTINGS for output in model.generate(prompts, max_tokens=16, **settings)
    ]
    return [output.text for output in outputs], sum(output.stats.num_drafted for output in outputs)


@pytest.fixture(scope="module")
def plain_texts(tiny_checkpoint: Path) -> list[str]:
    return texts_and_num_drafted(load(tiny_checkpoint, "none", dtype="float32"))[0]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "unigram", "wordpiece"])
def test_texts_of_a_target_are_the_same_with_drafters_of_other_tokenizers(
    tiny_checkpoint: Path,
    other_model: Callable[[str], Path],
    plain_texts: list[str],
    kind: str,
) -> None:
    name = f"model:{other_model(kind)}"
    drafting = load(tiny_checkpoint, name, dtype="float32", controller="fixed:3")
    texts, num_drafted = texts_and_num_drafted(drafting)
    assert texts == plain_texts
    assert num_drafted > 0


def test_requests_without_a_seed_are_coupled_for_drafts_of_text(
    tiny_checkpoint: Path, other_model: Callable[[str], Path]
) -> None:
    drafting = load(tiny_checkpoint, f"model:{other_model('byte-level')}", dtype="float32")
    output = drafting.generate("ab", max_tokens=4, temperature=1.0)
    assert output.exactness == Exactness.DRAFTER_INVARIANT  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def builtin_texts() -> list[str]:
    return texts_and_num_drafted(load("builtin", "none"))[0]


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "wordpiece"])
def test_texts_of_the_builtin_target_are_the_same_with_drafters_of_other_tokenizers(
    other_model: Callable[[str], Path], builtin_texts: list[str], kind: str
) -> None:
    drafting = load("builtin", f"model:{other_model(kind)}", controller="fixed:3")
    texts, num_drafted = texts_and_num_drafted(drafting)
    assert texts == builtin_texts
    assert num_drafted > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (",vocab=string", "tree"),
        (",tree=2x1", "leave out the tree"),
    ],
)
def test_options_without_effect_are_refused(
    tiny_checkpoint: Path, other_model: Callable[[str], Path], options: str, message: str
) -> None:
    with pytest.raises(BadInputError, match=message):
        load(tiny_checkpoint, f"model:{other_model('wordpiece')}{options}", dtype="float32")


def test_inspect_gives_the_verdict(
    secondguess_command: Callable[..., object],
    tiny_checkpoint: Path,
    tiny_draft_checkpoint: Path,
    other_model: Callable[[str], Path],
) -> None:
    def record(draft_model: Path, *options: str) -> dict[str, object]:
        done = secondguess_command("inspect", tiny_checkpoint, "--drafter", f"model:{draft_model}", *options)
        assert done.code == 0, done.err  # type: ignore[attr-defined]
        return done.out  # type: ignore[attr-defined, no-any-return]

    same = json.loads(record(tiny_draft_checkpoint, "--json"))["drafter"]["vocabulary"]
    assert same == {"method": "same"}
    other = json.loads(record(other_model("wordpiece"), "--json"))["drafter"]["vocabulary"]
    assert other["method"] == "string"
    assert 0 < other["target_share"] < other["draft_share"] < 1
    assert "another tokenizer: drafts are text (shared are" in record(other_model("wordpiece"))  # type: ignore[operator]
