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


def test_the_suffix_is_first_for_codestral():
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"additional_special_tokens": ["[SUFFIX]", "[PREFIX]"], "bos_token": "<s>"})
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, openai_client(url) as client:
        client.completions.create(model="coder", prompt="def f(", suffix=" pass")
    assert tokenizer.decode(engine.last.prompt) == "<s>[SUFFIX] pass[PREFIX]def f("


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_the_middle_ends_at_the_tokens_of_another_file(ignore_eos):
    tokenizer = read_tokenizer(str(builtin_paths().target))
    tokenizer.add_special_tokens({"additional_special_tokens": [*FORMATS[0], "<|file_sep|>", "<|fim_pad|>"]})
    ends = set(tokenizer.convert_tokens_to_ids(["<|file_sep|>", "<|fim_pad|>"]))
    engine = FakeEngine(fake_target(tokenizer, "coder"))
    with serving(engine) as url, openai_client(url) as client:
        more = {"stop_token_ids": [5], "ignore_eos": ignore_eos}
        client.completions.create(model="coder", prompt="def f(", suffix=" pass", extra_body=more)
        found = set(engine.last.params.stop_token_ids)
        assert 5 in found
        assert (ends <= found) is not ignore_eos
        client.completions.create(model="coder", prompt="def f(")
        assert not engine.last.params.stop_token_ids
