"""Write the table of published formats of drafters: what reads them, the reference, and the largest difference.

    python -m drafter_oracles.table docs/drafter-formats.md

It runs the tests that compare a format's logits with its reference, and replaces the table on the page. A format whose
test fails, or is skipped, gets no row.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

TESTS = Path(__file__).parents[2] / "tests" / "heads"
ORACLES = {
    "test_eagle_dialects.py::test_a_dialect_has_the_logits_of_its_publisher": ("eagle", "equations in plain torch"),
    "test_block_formats.py::test_the_logits_are_those_of_the_publishers_code": ("dspark", "the publisher's code"),
    "test_mtp.py::test_a_published_module_has_the_logits_of_its_paper": ("mtp", "equations in plain torch"),
    "test_mtp.py::test_a_published_module_has_the_logits_of_its_layer_in_transformers": ("mtp", "layers of Transformers"),
    "test_mtp_chain.py::test_a_chain_has_the_logits_of_transformers": ("mtp", "Transformers' MTP"),
    "test_gemma_assistant.py::test_an_assistant_has_the_logits_of_transformers": (
        "gemma4-assistant",
        "Transformers' assistant",
    ),
    "test_medusa.py::test_every_published_format_drafts_as_in_the_paper": ("medusa", "equations in plain torch"),
}  # fmt: skip
"""Test -> drafter that reads the format, and the reference."""
NAMES = {
    "test_a_chain_has_the_logits_of_transformers": "chain of several modules, DeepSeek",
    "gemma4": "Gemma 4 assistant",
    "unified": "Gemma 4 unified assistant",
}
START, END = "<!-- table -->\n", "<!-- end of the table -->\n"


class Differences:
    """Plugin that collects the largest difference of each test that passes."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._largest = 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        self._largest = 0.0
        module = item.getparent(pytest.Module)
        assert module is not None
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.testing, "assert_close", self._watching_tensors(torch.testing.assert_close))
            if hasattr(module.obj, "largest_difference"):
                patched.setattr(
                    module.obj, "largest_difference", self._watching(module.obj.largest_difference)
                )
            yield
        self.found[item.nodeid] = self._largest

    def _watching_tensors(self, compare: Callable[..., None]) -> Callable[..., None]:
        def assert_close(found: torch.Tensor, expected: torch.Tensor, **options: Any) -> None:
            compare(found, expected, **options)
            finite = expected.isfinite()
            self._largest = max(self._largest, float((found - expected)[finite].abs().max()))

        return assert_close

    def _watching(self, measure: Callable[..., float]) -> Callable[..., float]:
        def largest_difference(*arguments: Any) -> float:
            difference = measure(*arguments)
            self._largest = max(self._largest, difference)
            return difference

        return largest_difference


def rows(found: dict[str, float]) -> list[str]:
    """Return the lines of the table; tests of one format in several settings are one line."""
    largest: dict[tuple[str, str, str], float] = {}
    for node, difference in found.items():
        test, _, case = node.rpartition("/")[2].partition("[")
        drafter, reference = ORACLES[test]
        name = re.sub(r"^\d+-", "", case.removesuffix("]"))
        name = NAMES.get(test.partition("::")[2], NAMES.get(name, name))
        key = (drafter, name, reference)
        largest[key] = max(largest.get(key, 0.0), difference)
    return [
        f"| {name} | `{drafter}` | {reference} | {difference:.1e} |"
        for (drafter, name, reference), difference in largest.items()
    ]


def main() -> None:
    page = Path(sys.argv[1])
    plugin = Differences()
    status = pytest.main(
        ["-q", "-p", "no:randomly", *(str(TESTS / test) for test in ORACLES)], plugins=[plugin]
    )
    if status:
        raise SystemExit(int(status))
    table = [
        "| layout | drafter | reference | largest difference |",
        "|---|---|---|---|",
        *rows(plugin.found),
    ]
    before, _, rest = page.read_text().partition(START)
    page.write_text(before + START + "\n".join(table) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
