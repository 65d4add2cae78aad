"""Grammars: what is refused, what is masked, and what is forced."""

import json
import sys
import time

import pytest
import torch

from checkpoints import read_tokenizer
from grammar_cases import END, ENDS, REGEXES, allowed_tokens, tiny_compiler, with_regex
from secondguess.builtin import builtin_paths
from secondguess.core import Draft, Row
from secondguess.errors import BadInputError
from secondguess.sampling import Grammar, SamplingParams
from secondguess.sampling import grammar as module
from secondguess.sampling.grammar import compiler_for
from secondguess.sampling.probs import compute_draft_probs, compute_target_probs

SAMPLED = SamplingParams(temperature=1.0, max_tokens=20)


def matcher_of(regex, vocab_size=4):
    return tiny_compiler(vocab_size).matcher(Grammar.regex(regex))


def outputs_of(regex, length):
    """Every output of up to that many tokens that the grammar allows and does not end."""
    found = [()]
    for output in found:
        if len(output) < length:
            allowed = allowed_tokens(regex, output)[:END]
            found += [(*output, token) for token, each in enumerate(allowed) if each]
    return found


@pytest.mark.parametrize("regex", REGEXES)
def test_masks_are_those_of_trying_all_texts(regex):
    for output in outputs_of(REGEXES[regex], 5):
        matcher = matcher_of(REGEXES[regex])
        done = [matcher.push(token) for token in output]
        expected = allowed_tokens(REGEXES[regex], output)
        assert not any(done[:-1])
        assert (done[-1:] == [True]) == (expected == (False, False, False, True))
        assert tuple(matcher.allowed(()).tolist()) == expected


def test_tokens_that_the_target_lacks_are_replaced_by_others():
    """The tokenizer has pairs of letters after the 26 letters; the target does not."""
    matcher = tiny_compiler(31, 26).matcher(Grammar.regex("abca"))
    for token in (0, 1, 2, 0):
        assert all(each < 26 for each in matcher.forced())
        mask = matcher.allowed(())
        assert (len(mask), mask.nonzero()[0].tolist()) == (26, [token])
        matcher.push(token)
    assert not matcher.has_failed


def test_a_text_that_the_target_cannot_write_ends():
    matcher = tiny_compiler(31, 1).matcher(Grammar.regex("ab"))
    matcher.push(0)
    assert not matcher.allowed(()).any()
    matcher.push(0)
    assert matcher.has_failed


@pytest.mark.parametrize("regex", REGEXES)
def test_a_drafted_path_has_the_mask_of_the_same_text(regex):
    """In any order of the paths, and the committed state stays as it is."""
    outputs = outputs_of(REGEXES[regex], 4)
    for committed in outputs_of(REGEXES[regex], 2):
        matcher = matcher_of(REGEXES[regex])
        complete = [matcher.push(token) for token in committed]
        if any(complete):
            continue
        paths = [output[len(committed) :] for output in outputs if output[: len(committed)] == committed]
        for path in (*paths, *reversed(paths)):
            expected = allowed_tokens(REGEXES[regex], (*committed, *path))
            found = matcher.allowed(path)
            if found is None:  # the path completes the text
                assert expected == (False, False, False, True)
            else:
                assert tuple(found.tolist()) == expected
        assert tuple(matcher.allowed(()).tolist()) == allowed_tokens(REGEXES[regex], committed)


def test_below_a_token_that_is_not_allowed_nothing_is_masked():
    matcher = matcher_of("ab*")
    assert matcher.allowed((1,)) is None
    assert matcher.allowed((1, 0, 0)) is None
    assert matcher.allowed((END, 0)) is None
    assert matcher.allowed((0, 99)) is None
    assert matcher.allowed((0,)).tolist() == [False, True, False, True]


def test_a_tree_is_masked_along_its_paths():
    row = Row([0], with_regex(SAMPLED, "a(b|ca)*"), end_tokens=ENDS, grammar=matcher_of("a(b|ca)*"))
    tree = Draft(torch.tensor([[0, 1, 1, 2, 0]]), torch.tensor([[-1, -1, 0, 0, 3]]), torch.tensor([5]))
    probs = compute_target_probs(torch.zeros(1, 6, 4, dtype=torch.float64), [row], tree)[0]
    expected = [(), (0,), None, (0, 1), (0, 2), (0, 2, 0)]
    for query, path in enumerate(expected):
        mask = (True,) * 4 if path is None else allowed_tokens("a(b|ca)*", path)
        assert tuple((probs[query] > 0).tolist()) == mask


def test_rows_beside_a_grammar_are_not_masked():
    rows = [
        Row([0], SAMPLED),
        Row([0], with_regex(SAMPLED, "a"), end_tokens=ENDS, grammar=matcher_of("a")),
        Row([0], SAMPLED),
    ]
    logits = torch.randn(3, 3, 4, dtype=torch.float64)
    probs = compute_target_probs(logits, rows, Draft.chains([[1, 2]] * 3))
    torch.testing.assert_close(probs[[0, 2]], logits[[0, 2]].softmax(-1))
    assert probs[1, 0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize("width", [2, 4, 7])
def test_a_drafter_of_another_vocabulary_has_the_same_mask(width):
    row = Row([0], with_regex(SAMPLED, "a(b|ca)*"), end_tokens=ENDS, grammar=matcher_of("a(b|ca)*"))
    probs = compute_draft_probs(torch.zeros(1, width), [row], torch.tensor([[0]]))[0][0]
    expected = [*allowed_tokens("a(b|ca)*", (0,)), False, False, False][:width]
    assert (probs > 0).tolist() == expected


def test_what_the_grammar_requires_may_be_banned_and_then_the_text_ends():
    params = with_regex(SamplingParams(logit_bias={1: -float("inf")}), "ab")
    row = Row([0], params, end_tokens=ENDS, grammar=matcher_of("ab"))
    row.grammar.push(0)
    probs = compute_target_probs(torch.zeros(1, 1, 4), [row], Draft.empty(1))[0, 0]
    assert probs.tolist() == [0, 0, 0, 1]
    row.end_tokens = frozenset()
    with pytest.raises(BadInputError, match="grammar"):
        compute_target_probs(torch.zeros(1, 1, 4), [row], Draft.empty(1))


class Failing:
    """A matcher of llguidance that reaches a limit."""

    def __init__(self, original):
        self.original, self.failed = original, False

    def compute_bitmask(self):
        self.failed = True
        return self.original.compute_bitmask()

    def is_error(self):
        return self.failed

    def __getattr__(self, name):
        return getattr(self.original, name)


def test_a_limit_that_drafted_paths_have_reached_does_not_end_the_text():
    matcher = matcher_of("[abc]*")
    matcher.push(0)
    matcher._matcher = Failing(matcher._matcher)
    assert matcher.allowed((1,)).tolist() == [True] * 4
    assert not matcher.has_failed


def test_a_limit_during_decoding_ends_the_text_with_its_own_reason(monkeypatch):
    """A rule that derives a text in many ways needs more items with each token."""
    monkeypatch.setitem(module.LIMITS, "step_max_items", 40)
    grammar = Grammar.lark('start: many\nmany: "a" | many many')
    matcher = tiny_compiler.__wrapped__(4).matcher(grammar)
    params = SamplingParams(max_tokens=100, grammar=grammar)
    row = Row([0], params, end_tokens=ENDS, grammar=matcher)
    tokens = 0
    while not row.finished:
        mask = matcher.allowed(())
        tokens += 1
        assert tokens < 50
        row.commit([], 0 if mask[0] else END)
    assert row.finish_reason == "grammar"
    assert row.num_output > 2


def test_forced_tokens_are_those_without_a_choice():
    matcher = matcher_of("abc(a|b)cc")
    assert matcher.forced() == [0, 1, 2]
    for token in (0, 1, 2):
        matcher.push(token)
    assert matcher.forced() == []
    matcher.push(1)
    assert matcher.forced() == [2, 2]
    assert [matcher.push(2), matcher.push(2)] == [False, True]
    assert matcher.forced() == []


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (Grammar.regex(r"see <\|endoftext\|>, a/b"), "see <|endoftext|>, a/b"),
        (Grammar.json_schema({"enum": ["see <|endoftext|>"]}), '"see <|endoftext|>"'),
        (Grammar.lark('%llguidance {}\nstart: "see " END\nEND: "<|endoftext|>"'), "see <|endoftext|>"),
    ],
    ids=["regex", "json_schema", "lark"],
)
def test_a_forced_text_may_contain_that_of_a_special_token(grammar, text):
    """llguidance segments it as the tokenizer does, and then refuses the special token."""
    tokenizer = read_tokenizer(str(builtin_paths().target))
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    compiler = compiler_for(tokenizer, len(tokenizer), frozenset({end}))
    drafted, committed = compiler.matcher(grammar), compiler.matcher(grammar)
    path = ()
    while (mask := committed.allowed(())).sum() > mask[end]:
        assert (drafted.allowed(path) == mask).all()
        forced = committed.forced()
        assert end not in forced or forced.index(end) == len(forced) - 1
        path += (int(mask.argmax() or mask[1:].argmax() + 1),)
        if committed.push(path[-1]):
            break
    assert not committed.has_failed
    assert tokenizer.decode(path) == text


def test_the_end_tokens_of_the_model_end_a_text():
    tokenizer = read_tokenizer(str(builtin_paths().target))
    matcher = compiler_for(tokenizer, len(tokenizer), frozenset({5, 7})).matcher(Grammar.regex(""))
    assert matcher.allowed(()).nonzero()[0].tolist() == [5, 7]


def test_a_row_stops_where_the_grammar_is_complete():
    row = Row([0], with_regex(SAMPLED, "ab"), grammar=matcher_of("ab"))
    commit = row.commit([0, 1, 2], 2)
    assert (row.output, row.finish_reason, commit.num_accepted) == ([0, 1], "stop", 2)


def test_a_row_made_by_hand_without_a_matcher_is_refused():
    row = Row([0], with_regex(SAMPLED, "ab"))
    with pytest.raises(BadInputError, match="make_row"):
        compute_target_probs(torch.zeros(1, 1, 4), [row], Draft.empty(1))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"regex": 3}, "as a text"),
        ({"grammar": "a"}, "one of the keys"),
        ({"regex": "a", "lark": "b"}, "one of the keys"),
        ({"json_object": False}, "one of the keys"),
        ("[0-9]", "one of the keys"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "3"}, "an object"),
        ({"json_schema": {"a": {1, 2}}}, "JSON cannot hold"),
        ({"regex": "a" * 100_000}, "at most"),
    ],
)
def test_values_that_are_no_grammar_are_refused(value, message):
    with pytest.raises(BadInputError, match=message):
        SamplingParams(grammar=value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"regex": "a+"}, Grammar.regex("a+")),
        ({"lark": "start: /a/"}, Grammar.lark("start: /a/")),
        ({"json_object": True}, Grammar.json_object()),
        ({"json_schema": {"type": "integer"}}, Grammar.json_schema('{"type": "integer"}')),
    ],
)
def test_a_grammar_may_be_given_as_an_object(given, expected):
    assert SamplingParams(grammar=given).grammar == expected
    assert hash(SamplingParams(grammar=given)) == hash(SamplingParams(grammar=expected))


INVALID = {
    "regex": (Grammar.regex("(a"), "unclosed group"),
    "unmatched by the vocabulary": (Grammar.regex("d"), "vocabulary"),
    "lark": (Grammar.lark("start: missing"), "missing"),
    "schema": (Grammar.json_schema({"type": "strung"}), "strung"),
    "unsupported": (Grammar.json_schema({"propertyNames": {"pattern": "a"}}), "propertyNames"),
    "cycle": (
        Grammar.json_schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
        "vocabulary",
    ),
    "deep": (Grammar.json_schema('{"items":' * 200 + "{}" + "}" * 200), "recursion"),
}


@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_grammar_is_refused_at_once_with_the_reason(name):
    grammar, reason = INVALID[name]
    tiny_compiler(4)
    start = time.perf_counter()
    with pytest.raises(BadInputError, match=reason):
        tiny_compiler(4).matcher(grammar)
    assert time.perf_counter() - start < 1.0  # a few milliseconds; wide, for busy machines


def test_a_grammar_is_compiled_once_per_tokenizer(monkeypatch):
    calls = []
    original = module._source
    monkeypatch.setattr(module, "_source", lambda grammar: calls.append(grammar) or original(grammar))
    for _ in range(3):
        tiny_compiler(4).matcher(Grammar.regex("abcabc"))
    assert len(calls) == 1


def test_matchers_of_one_grammar_are_independent():
    one, other = matcher_of("ab"), matcher_of("ab")
    one.push(0)
    assert other.allowed(()).tolist() == [True, False, False, False]
    assert one.allowed(()).tolist() == [False, True, False, False]


def test_without_llguidance_the_request_is_refused(monkeypatch):
    class Tokenizer:
        def __len__(self):
            return 4

    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    with pytest.raises(BadInputError, match=r"pip install secondguess\[serve\]"):
        compiler_for(Tokenizer(), 4, ENDS)


def test_a_slow_tokenizer_is_refused():
    class Tokenizer:
        def __len__(self):
            return 4

    with pytest.raises(BadInputError, match="fast"):
        compiler_for(Tokenizer(), 4, ENDS)


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer"},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string", "maxLength": 12}, "country": {"enum": ["NO", "PE"]}},
            "required": ["street", "country"],
            "additionalProperties": False,
        },
        "subscribed": {"type": "boolean"},
    },
    "required": ["name", "age", "address", "subscribed"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def plain_llm():
    from secondguess import load

    return load(drafter="none")


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_forced_tokens_save_passes_without_a_drafter(plain_llm, settings):
    grammar = Grammar.json_schema(SCHEMA)
    plain = plain_llm.generate(
        "A customer as JSON:\n", grammar=grammar, max_tokens=150, draft_length=0, **settings
    )
    forced = plain_llm.generate("A customer as JSON:\n", grammar=grammar, max_tokens=150, **settings)
    assert forced.text == plain.text
    assert forced.finish_reason == "stop"
    assert set(json.loads(forced.text)) == set(SCHEMA["required"])
    assert forced.stats.num_rounds * 1.3 <= plain.stats.num_rounds
    assert forced.stats.acceptance_rate == 1
    assert plain.stats.num_drafted == 0


def test_log_probabilities_are_not_masked(plain_llm):
    """They are the target's own, before the mask."""
    output = plain_llm.generate("x = ", grammar=Grammar.regex("zq"), logprobs=3, max_tokens=5)
    assert output.text == "zq"
    first = output.logprobs[0]
    assert first.logprob < max(first.alternatives.values())
