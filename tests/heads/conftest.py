"""Fixtures of the tests of heads."""

from collections.abc import Iterator

import pytest
from head_formats import TARGET


@pytest.fixture(autouse=True)
def forget_rows() -> Iterator[None]:
    yield
    TARGET.free()
