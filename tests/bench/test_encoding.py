"""Truncation of prompts that do not fit into the context."""

from types import SimpleNamespace

import pytest

from secondguess.bench.encoding import encode_workload, truncate_left
from secondguess.errors import BadInputError
from secondguess.workloads.loading import Workload


def target(context_length, first=None):
    """A model that reads a character as a token."""
    return SimpleNamespace(
        encode=lambda text: [*([] if first is None else [first]), *map(ord, text)],
        tokenizer=SimpleNamespace(bos_token_id=first),
        num_input_tokens=256,
        runtime=SimpleNamespace(context_length=context_length),
    )


def workload(*texts):
    return Workload("mine", texts, ("task",) * len(texts))


def test_a_long_prompt_is_truncated_on_the_left():
    encoded = encode_workload(target(40), workload("short", "x" * 30 + "the end"), num_tokens=8)
    assert encoded.prompts[0] == list(map(ord, "short"))
    assert encoded.prompts[1] == list(map(ord, ("x" * 30 + "the end")[-32:]))
    assert encoded.num_truncated == 1
    assert encoded.notes == [
        "1 of 2 prompts were cut from the left to the 32 tokens that the target's context leaves for them"
    ]


def test_without_truncation_there_is_no_note():
    encoded = encode_workload(target(40), workload("x" * 32), num_tokens=8)
    assert (encoded.num_truncated, encoded.notes) == (0, [])


def test_the_bos_token_is_kept():
    encoded = encode_workload(target(40, first=1), workload("x" * 50 + "end"), num_tokens=8)
    assert len(encoded.prompts[0]) == 32
    assert encoded.prompts[0][0] == 1
    assert encoded.prompts[0][-3:] == list(map(ord, "end"))
    assert truncate_left([1, 2, 3], 2, first=7) == [2, 3]


def test_a_prompt_truncated_to_too_few_tokens_is_refused():
    with pytest.raises(BadInputError, match="take other prompts or fewer tokens"):
        encode_workload(target(40), workload("x" * 30), num_tokens=30)
    assert encode_workload(target(40), workload("short"), num_tokens=30).num_truncated == 0
