"""The model of the tests of the drop-in."""

import pytest

from drop_in_cases import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model()
