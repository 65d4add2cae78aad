"""Fill-in-the-middle prompts."""

import pytest
from fake_engine import FakeEngine, fake_target

from checkpoints import read_tokenizer
from conftest import openai_client, serving
from secondguess.builtin import builtin_paths
from secondguess.server.infill import FORMATS


@pytest.mark.parametrize("tokens", FORMATS)
def test_prefix_and_suffix_stand_between_their_tokens(tokens):
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, openai_client(url) as client:
        client.completions.create(model="coder", prompt="def f(", suffix=" pass")
    first, second, third = tokens
    assert tokenizer.decode(engine.last.prompt) == f"{first}def f({second} pass{third}"
