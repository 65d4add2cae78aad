"""The drafter of docs/adding-a-drafter.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import secondguess
from drafter_cases import PROMPTS, greedy_text, run
from secondguess.core import Budgets, Draft, Row
from secondguess.drafters import DRAFTERS
from secondguess.drafters.base import Drafter, DrafterResources
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.names import Name
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-drafter.md"


def shown_code() -> str:
    (code,) = re.findall(
        r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return code


def shown_drafter() -> type[Drafter]:
    namespace: dict[str, object] = {"__name__": "shown"}
    exec(compile(shown_code(), str(PAGE), "exec"), namespace)
    (found,) = [
        value
        for value in namespace.values()
        if isinstance(value, type) and issubclass(value, Drafter) and value.__module__ == "shown"
    ]
    return found


def test_the_documented_drafter_is_short() -> None:
    assert len(shown_code().splitlines()) < 40


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("controller", ["fixed:0", "fixed:4"])
def test_the_documented_drafter_equals_plain_greedy_decoding(batch: int, controller: str) -> None:
    drafter = shown_drafter()()
    result = run(drafter, PROMPTS[:batch], controller=controller)
    assert result.outputs == [greedy_text(prompt, 14) for prompt in PROMPTS[:batch]]
    assert vars(drafter) == vars(shown_drafter()())


def test_drafts_of_the_documented_drafter_are_accepted() -> None:
    """On a text in which every token has one successor it must be right as soon as it has seen each once."""

    def circle(context: tuple[int, ...]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.tensor((context[-1] + 1) % 6), 6).double()

    result = run(shown_drafter()(), [[0, 1]], SamplingParams(max_tokens=30), dist=circle)
    assert result.stats[0].num_accepted > 10


def test_the_documented_drafter_ends_chains_before_tokens_that_the_target_lacks() -> None:
    row = Row([1, 2, 9, 1], SamplingParams())
    for vocab_size, expected in ((10, [2, 9, 1]), (6, [2])):
        drafter = shown_drafter()(vocab_size)
        drafter.begin([row], [])
        budgets = Budgets([3], lambda *_: [True])
        assert drafter.propose([row], budgets, KeyedNoise.from_rows([row])).token_lists == [expected]


class FlatDrafter(SamplingDrafter):
    """Drafter that samples every token with the same probability."""

    @classmethod
    def build(cls, name: Name, resources: DrafterResources) -> FlatDrafter:
        return cls(str(name), resources.target_vocab_size, torch.device("cpu"))

    def chain_logits(self, rows: Sequence[Row], active: list[int]) -> torch.Tensor:
        return torch.zeros(len(rows), self.vocab_size)

    def tree_logits(self, rows: Sequence[Row], active: list[int], tree: Draft) -> torch.Tensor:
        return torch.zeros(len(rows), tree.num_nodes + 1, self.vocab_size)


def test_a_sampling_drafter_without_a_head_is_loaded_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS, "flat", f"{__name__}:FlatDrafter")
    llm = secondguess.load("builtin", drafter="flat", controller="fixed:2", dtype="float32")
    found = llm.generate("def", max_tokens=3)
    assert found.stats.num_drafted > 0
    plain = secondguess.load("builtin", drafter="none", dtype="float32").generate("def", max_tokens=3)
    assert found.token_ids == plain.token_ids
