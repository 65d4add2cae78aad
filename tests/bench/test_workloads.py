"""Prompts: which ones, and what is refused."""

import json

import pytest

from secondguess.bench.workloads import HUMANEVAL, load_workload, spread
from secondguess.errors import BadInputError


def test_a_file_gives_its_prompts(prompt_file):
    workload = load_workload(str(prompt_file), 40)
    assert [prompt[:3] for prompt in workload.prompts] == ["def", "cla", "pri"]
    assert workload.name == "prompts.jsonl"


def test_a_sample_is_spread_over_the_file_and_always_the_same(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"prompt {index}"}) for index in range(164)))
    workload = load_workload(str(path), 40)
    numbers = [int(prompt.split()[1]) for prompt in workload.prompts]
    assert numbers[:3] == [0, 4, 8]
    assert numbers[-1] == 159
    assert workload == load_workload(str(path), 40)
    assert len(set(numbers)) == 40


def test_different_prompts_have_different_hashes():
    assert load_workload("builtin", 2).sha256 != load_workload("builtin", 3).sha256


def test_our_own_prompts_are_a_workload():
    workload = load_workload("builtin", 100)
    assert workload.name == "builtin"
    assert len(set(workload.prompts)) == len(workload.prompts) >= 10


def test_a_sample_of_everything_is_everything():
    assert spread(("a", "b"), 2) == spread(("a", "b"), 3) == ("a", "b")


def test_humaneval_is_the_default_where_it_is_present(tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    monkeypatch.chdir(checkout)
    file = checkout / HUMANEVAL
    file.parent.mkdir(parents=True)
    file.write_text('{"prompt": "def f():"}\n')
    workload = load_workload()
    assert (workload.name, workload.prompts, workload.note) == ("humaneval.jsonl", ("def f():",), "")


def test_without_humaneval_the_default_is_our_own_prompts_with_a_note(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    workload = load_workload(num_prompts=3)
    assert workload.prompts == load_workload("builtin", 3).prompts
    assert HUMANEVAL in workload.note
    assert load_workload("builtin", 3).note == ""
    for given in (HUMANEVAL, ""):
        with pytest.raises(BadInputError, match="--prompts FILE"):
            load_workload(given)


def test_an_absent_file_says_what_to_give():
    with pytest.raises(BadInputError, match="--prompts FILE"):
        load_workload("no-such-file.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got an empty file"),
        (b'{"prompt": "x"}\nnonsense\n', "line 2"),
        (b'{"prompt": ""}\n', "line 1"),
        (b'{"text": "x"}\n', "line 1"),
        (b'["x"]\n', "line 1"),
        (b'{"prompt": "\xff"}\n', "UTF-8"),
    ],
)
def test_a_file_without_prompts_is_refused_with_the_place(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        load_workload(str(path))
