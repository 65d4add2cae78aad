"""Prompts of tools/training_prompts.py."""

from __future__ import annotations

from collections import Counter

from training_prompts import LONGEST, records


def test_prompts_are_mixed_and_the_same_each_time() -> None:
    found = records()
    assert found == records()
    kinds = Counter(kind for record in found for kind in record)
    assert kinds["prompt"] > 1000
    assert kinds["messages"] > 4500
    texts = [record["messages"][0]["content"] for record in found if "messages" in record]
    assert max(map(len, texts)) <= LONGEST
