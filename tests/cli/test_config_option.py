"""`--config FILE`: its keys are used, options override them, and a file of another model is refused."""

from __future__ import annotations

import shutil

import pytest

from secondguess.configuration import Configuration, LoadSettings, TuningRecord

KEYS = {
    "drafter": "ngram",
    "verifier": "block",
    "controller": "fixed:3",
    "dtype": "float32",
    "device": "cpu",
    "quantize": "int8",
    "drafter_quantize": "int8",
    "runtime": "fused",
    "share_history": True,
}
OPTIONS = {
    "drafter": "suffix",
    "verifier": "auto",
    "controller": "cost",
    "dtype": "auto",
    "device": "auto",
    "quantize": "int8",
    "drafter_quantize": "int8",
    "runtime": "auto",
}
"""Options on the command line; some have the value of the option's default."""
LOADING = [["generate", "x"], ["verify"]]
COMMANDS = [*LOADING, ["inspect"], ["export", "--to", "vllm"]]


@pytest.fixture
def write(tmp_path):
    """Writes a file and gives its path; arguments are those of `LoadSettings`, and `tuned`."""

    def write_file(model, tuned=None, **settings):
        path = tmp_path / "secondguess.toml"
        configuration = Configuration(LoadSettings(model=str(model), **settings), tuned or TuningRecord())
        path.write_text(configuration.to_toml())
        return path

    return write_file


@pytest.mark.parametrize("command", LOADING, ids=lambda command: command[0])
def test_every_key_reaches_load(loaded, write, command):
    assert loaded(*command, "--config", write("somewhere", **KEYS)) == {"model": "somewhere", **KEYS}


def test_a_missing_key_keeps_the_default(loaded, write, tiny_checkpoint):
    with_file = loaded("generate", "x", "--config", write(tiny_checkpoint, dtype="float32"))
    without = loaded("generate", "x", "--model", tiny_checkpoint, "--dtype", "float32")
    assert with_file == without


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_overrides_the_file(loaded, write, name):
    option = f"--{name.replace('_', '-')}"
    path = write("somewhere", **KEYS | {name: "of-the-file"})
    assert loaded("generate", "x", "--config", path, option, OPTIONS[name])[name] == OPTIONS[name]


@pytest.mark.parametrize("of_file", [False, None])
def test_the_flag_overrides_the_file(loaded, write, of_file):
    path = write("somewhere", share_history=of_file)
    assert loaded("generate", "x", "--config", path, "--share-history")["share_history"] is True
    assert loaded("generate", "x", "--config", path)["share_history"] is False


def test_inspect_checks_the_drafter_of_a_shared_history(secondguess_command, write, tiny_checkpoint):
    path = write(tiny_checkpoint, drafter="suffix", share_history=True)
    assert secondguess_command("inspect", "--config", path).code == 0
    path = write(tiny_checkpoint, drafter="ngram", share_history=True)
    assert "for share_history, got ngram" in secondguess_command("inspect", "--config", path).err


def test_settings_chosen_for_the_drafter_are_dropped_with_it(secondguess_command, loaded, write):
    path = write("somewhere", **KEYS)
    settings = loaded("generate", "x", "--config", path, "--drafter", "suffix")
    assert settings.keys() == {"model", *KEYS} - {"controller", "drafter_quantize"}
    assert settings["share_history"] is False
    same = loaded("generate", "x", "--config", path, "--drafter", "ngram")
    assert same == {"model": "somewhere", **KEYS}
    own = loaded("generate", "x", "--config", path, "--drafter", "suffix", "--controller", "fixed:9")
    assert own["controller"] == "fixed:9"
    assert "drafter_quantize" not in own


def test_settings_dropped_with_the_drafter_are_reported(secondguess_command, write, tiny_checkpoint):
    path = write(tiny_checkpoint, drafter="ngram", controller="fixed:3")
    done = secondguess_command("generate", "x", "--max-tokens", 2, "--config", path, "--drafter", "none")
    assert done.code == 0
    assert "not using its controller, chosen for ngram, with none" in done.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_file_of_another_model_is_refused(secondguess_command, write, command, tiny_checkpoint):
    model = [tiny_checkpoint] if command == ["inspect"] else ["--model", tiny_checkpoint]
    done = secondguess_command(*command, *model, "--config", write("org/one"))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    for words in ("org/one", str(tiny_checkpoint), "give no --model", "tune"):
        assert words in done.err


def test_the_model_of_the_file_may_be_named_again(loaded, write, tiny_checkpoint):
    path = write(tiny_checkpoint)
    assert loaded("generate", "x", "--config", path, "--model", f"{tiny_checkpoint}/")["model"]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_file_of_other_weights_is_refused(secondguess_command, write, command, tiny_checkpoint, tmp_path):
    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    done = secondguess_command(*command, "--config", write(model, TuningRecord(model_sha256="0" * 64)))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    for words in (str(model), "weights", "tune again"):
        assert words in done.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("content", [None, b"\xff", b"schema = ", b"schema = 1\n[load]\nmodle = 'x'"])
def test_an_invalid_file_is_reported_in_one_line(secondguess_command, tmp_path, command, content):
    path = tmp_path / "tuned.toml"
    if content is not None:
        path.write_bytes(content)
    done = secondguess_command(*command, "--config", path)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("secondguess: error: ")
    assert "tuned.toml" in done.err


def test_verify_certifies_the_model_of_the_file(secondguess_command, write, tiny_checkpoint):
    path = write(tiny_checkpoint, drafter="ngram", dtype="float32")
    options = ["--samples", 1000, "--max-tokens", 2, "--limit", 0.9, "--prompt", "x", "--json"]
    (record,) = secondguess_command("verify", "--config", path, *options).records
    assert record["model"] == str(tiny_checkpoint)
    assert record["drafter"].startswith("ngram")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafter": "ngram", "controller": "entropy"}, "reads no draft distributions"),
        ({"drafter": "none", "controller": "cost"}, "which never drafts"),
        ({"drafter": "jacobi", "verifier": "block"}, "samples at every node"),
        ({"drafter": "model:builtin-draft,tree=2x1", "verifier": "block"}, "supports trees"),
    ],
)
def test_a_drafter_is_refused_with_a_controller_or_verifier_before_weights_are_read(
    secondguess_command, write, monkeypatch, settings, words
):
    monkeypatch.setattr("secondguess.api.load_model", lambda checkpoint: pytest.fail("weights are read"))
    path = write("builtin", **settings)
    for command in (["inspect"], ["generate", "x"]):
        done = secondguess_command(*command, "--config", path)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
        assert words in done.err
