"""Names of drafters: accepted options, and refusals that list the valid ones."""

from __future__ import annotations

import re

import pytest
import typer

from secondguess.cli import app, options
from secondguess.controllers import make_controller
from secondguess.drafters import (
    DRAFTERS,
    draft_model_paths,
    drafter_class,
    parse_drafter_name,
)
from secondguess.drafters.base import Drafter
from secondguess.drafters.spec import make_drafter
from secondguess.errors import BadInputError
from secondguess.names import Name
from secondguess.proof.fakes import TableModel, random_probs
from secondguess.runtime.base import Runtime


def make(text: str) -> Drafter:
    def load_draft_model(path: str) -> Runtime:
        assert path == "some/dir"
        return TableModel(4, random_probs(4, seed=1))

    return make_drafter(text, target_vocab_size=4, load_draft_model=load_draft_model)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("none", "none"),
        ("model:some/dir", "model:some/dir"),
        ("ngram", "ngram"),
        ("ngram,max=6", "ngram,max=6"),
        (" ngram, min = 3 ", "ngram,min=3"),
        ("suffix", "suffix"),
        ("suffix,min=1,threshold=0.2", "suffix,threshold=0.2"),
        ("suffix,factor=2.5,offset=1,threshold=0,min=2", "suffix,min=2,factor=2.5,offset=1,threshold=0"),
    ],
)
def test_the_name_of_a_drafter_contains_its_options_that_are_not_defaults(text: str, name: str) -> None:
    made = make(text)
    assert made.name == name
    assert make(made.name).name == name


@pytest.mark.parametrize("kind", DRAFTERS)
def test_the_default_controller_of_every_drafter_exists(kind: str) -> None:
    assert make_controller(drafter_class(kind).default_controller).name


@pytest.mark.parametrize(
    ("text", "branches"),
    [
        ("suffix", False),
        ("model:some/dir", False),
        ("model:some/dir,tree=2x2", True),
        ("suffix+model:some/dir", False),
        ("suffix+model:some/dir,tree=2x2", True),
    ],
)
def test_can_draft_trees_is_true_for_drafters_of_trees(text: str, branches: bool) -> None:
    assert make(text).can_draft_trees == branches


def test_the_drafter_none_gets_no_budget() -> None:
    assert make_controller(make("none").default_controller).name == "fixed:0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("magic", "none, model, .*suffix.*, got 'magic'"),
        ("", "none, model, .*suffix"),
        ("ngram,speed=3", "one of the options max, min .* got the option 'speed'"),
        ("suffix,minimum=3", "min, factor, offset, threshold"),
        ("none,max=3", "no options"),
        ("model:some/dir,max=3", "one of the options tree"),
        ("model:some/dir,nodes=12", "with tree=dynamic, got nodes with tree=nothing"),
        ("model:some/dir,tree=2x2,width=3", "got width with tree=2x2"),
        ("model:some/dir,tree=optimal", "got 'optimal'"),
        ("model:some/dir,tree=16x16", "at most 128 nodes, got 272"),
        ("ngram,max", "key=value"),
        ("ngram,max=", "key=value"),
        ("ngram,max=3,max=4", "each once"),
        ("ngram,max=four", "a whole number for max .* got 'four'"),
        ("ngram,max=2.5", "a whole number"),
        ("suffix,threshold=high", "a number for threshold"),
        ("suffix,threshold=nan", "between 0 and 1"),
        ("ngram,max=-1", "between 1 and 32, got -1"),
        ("ngram:4", "no argument"),
        ("none:some/dir", "no argument"),
        ("model", "path"),
        ("model:", "path"),
        ("suffix+suffix,min=3", "different drafters .* suffix\\+suffix"),
        ("none+suffix", "no `none` among joined drafters"),
        ("suffix+model:a+model:b", "different drafters"),
        ("suffix,oops=1+ngram", "the option 'oops'"),
    ],
)
def test_invalid_names_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        make(text)


def test_a_path_may_contain_colons() -> None:
    assert parse_drafter_name("model:C:/dir/x,a=1") == [Name("model", "C:/dir/x", {"a": "1"})]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("suffix+model:tiny", [("suffix", None), ("model", "tiny")]),
        ("suffix,min=4+ngram,max=3", [("suffix", None), ("ngram", None)]),
        ("model:a+b/c", [("model", "a+b/c")]),  # a plus sign in a path joins nothing
        ("model:C++/models", [("model", "C++/models")]),
        ("ngram+model:x+suffix", [("ngram", None), ("model", "x"), ("suffix", None)]),
    ],
)
def test_drafters_are_joined_by_a_plus_sign(text: str, parts: list[tuple[str, str | None]]) -> None:
    assert [(name.kind, name.argument) for name in parse_drafter_name(text)] == parts


def test_draft_models_are_found_at_any_position() -> None:
    assert draft_model_paths("suffix+model:tiny") == ["tiny"]
    assert draft_model_paths("model:tiny") == ["tiny"]
    assert draft_model_paths("suffix") == []


def test_every_part_is_checked_before_a_draft_model_is_loaded() -> None:
    def refuse(path: str) -> Runtime:
        raise AssertionError(f"{path} was loaded")

    with pytest.raises(BadInputError, match="the option 'oops'"):
        make_drafter("model:some/dir+ngram,oops=1", target_vocab_size=4, load_draft_model=refuse)


def kinds_in(words: str) -> set[str]:
    return {re.split(r"[:\[]", name)[0] for name in re.split(", | or ", words)}


def test_the_help_names_every_drafter() -> None:
    assert kinds_in(options.DRAFTER_NAMES) == set(DRAFTERS)


@pytest.mark.parametrize("command", ["generate", "verify", "inspect", "export", "bench", "tune"])
def test_commands_share_the_help_text_of_drafters(command: str) -> None:
    group = typer.main.get_command(app)
    (option,) = [each for each in group.commands[command].params if "--drafter" in each.opts]
    assert options.DRAFTER_NAMES in option.help


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model:~/x,tree=2x2", [Name("model", "/home/me/x", {"tree": "2x2"})]),
        ("suffix+eagle:~/x", [Name("suffix", None, {}), Name("eagle", "/home/me/x", {})]),
        ("model:a~/x", [Name("model", "a~/x", {})]),
    ],
)
def test_a_path_may_begin_with_the_home_folder(
    monkeypatch: pytest.MonkeyPatch, text: str, parts: list[Name]
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_drafter_name(text) == parts
