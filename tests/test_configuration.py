"""`secondguess.toml`: written files are read back, and invalid ones are refused in one line."""

from __future__ import annotations

import re
import shutil
import tomllib
from inspect import signature
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from secondguess import load
from secondguess.configuration import (
    Configuration,
    LoadSettings,
    TuningRecord,
    read_configuration,
    require_same_model,
    require_same_weights,
    same_model,
)
from secondguess.errors import BadInputError

REPOSITORY = Path(__file__).parents[1]
FULL = """\
schema = 1

[load]
model = "builtin"
drafter = "model:builtin-draft"
verifier = "auto"
controller = "fixed:5"
dtype = "bfloat16"
device = "cpu"
quantize = "int8"
drafter_quantize = "int8"
runtime = "auto"
share_history = true

[tuned]
date = "2026-11-21"
processor = "some processor"
num_threads = 2
workload = "humaneval"
workload_sha256 = "HASH"
model_sha256 = "HASH"
acceptance_rate = 0.7
acceptance_by_position = [0.8, 0.6, 1]
draft_length = 5
cost_ratio = 0.23
speedup = { "1" = 2.3, "4" = 1.8, "16" = 1 }
""".replace("HASH", "0f" * 32)

texts = st.text(min_size=1)
rates = st.floats(0, 1)
hashes = st.text("0123456789abcdef", min_size=64, max_size=64)


def optional(**strategies):
    return {name: st.none() | strategy for name, strategy in strategies.items()}


names = {name: texts for name in LoadSettings.model_fields if name != "model"} | {
    "share_history": st.booleans()
}
configurations = st.builds(
    Configuration,
    st.builds(LoadSettings, model=texts, **optional(**names)),
    st.builds(
        TuningRecord,
        **optional(
            date=texts,
            processor=texts,
            num_threads=st.integers(1, 65_536),
            workload=texts,
            workload_sha256=hashes,
            model_sha256=hashes,
            acceptance_rate=rates,
            acceptance_by_position=st.lists(rates).map(tuple),
            draft_length=st.integers(0, 64),
            cost_ratio=st.floats(0, allow_infinity=False),
            speedup=st.dictionaries(st.integers(1, 999_999), st.floats(0, allow_infinity=False)),
        ),
    ),
)


@given(configurations)
def test_a_written_configuration_is_read_back(tmp_path_factory, configuration):
    path = tmp_path_factory.getbasetemp() / "secondguess.toml"
    path.write_bytes(configuration.to_toml().encode())
    assert read_configuration(path) == configuration


@given(st.text())
def test_strings_are_escaped_as_toml(text):
    written = Configuration(LoadSettings(model="m" + text)).to_toml()
    assert tomllib.loads(written)["load"] == {"model": "m" + text}
    assert len(written.split("\n")) == 6


def test_every_key_of_the_format_is_read(tmp_path):
    path = tmp_path / "secondguess.toml"
    path.write_text(FULL)
    found = read_configuration(str(path))
    assert None not in found.load.model_dump().values()
    assert None not in found.tuned.model_dump().values()
    assert found.tuned.speedup == {1: 2.3, 4: 1.8, 16: 1.0}
    assert found.tuned.acceptance_by_position == (0.8, 0.6, 1.0)


def test_the_documented_file_is_valid(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", (REPOSITORY / "docs/tuning.md").read_text(), re.DOTALL)
    path = tmp_path / "secondguess.toml"
    path.write_text(text)
    found = read_configuration(path)
    assert None not in found.load.model_dump().values()
    missing = {name for name, value in found.tuned.model_dump().items() if value is None}
    assert missing == {"workload_sha256", "model_sha256"}


def test_the_keys_of_load_are_the_arguments_of_load():
    assert list(LoadSettings.model_fields) == list(signature(load).parameters)


def test_a_comment_explains_every_key(tmp_path):
    path = tmp_path / "secondguess.toml"
    path.write_text(FULL)
    for line in read_configuration(path).to_toml().splitlines():
        if " = " in line and not line.startswith(("#", "schema")):
            assert re.search(r"  # \w", line), line


def test_only_present_keys_are_given():
    assert LoadSettings(model="m", dtype="float32").given() == {"model": "m", "dtype": "float32"}
    assert TuningRecord().given() == {}
    assert "[tuned]" not in Configuration(LoadSettings(model="m")).to_toml()


def change(key, line):
    assert re.search(f"^{key} = .*$", FULL, re.MULTILINE)
    return re.sub(f"^{key} = .*$", line, FULL, count=1, flags=re.MULTILINE).encode()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["schema = 1", "none", "tune again", "or write it there"]),
        (b"\xff\xfe\x00", ["TOML", "UTF-8"]),
        (b"\x00\x01\x02", ["TOML"]),
        (b"{}", ["TOML"]),
        (b"[" * 5000, ["TOML"]),
        (b"schema = 1\n", ["model", "[load]", "none"]),
        (b"schema = 1\nload = 3\n", ["load", "a valid dictionary", "3"]),
        (b"schema = 1\n[[tuned]]\n", ["tuned", "a valid dictionary", "[{}]"]),
        (change("schema", "schema = 2"), ["schema = 1", "2"]),
        (change("schema", "schema = true"), ["schema = 1", "True"]),
        (change("schema", 'schema = "1"'), ["schema = 1", "'1'"]),
        (change("schema", "schema = 1\ncolour = 1"), ["colour", "known: load, tuned"]),
        (change("model", ""), ["model", "[load]"]),
        (change("model", "model = 3"), ["[load]", "model", "string", "3"]),
        (change("model", 'model = ""'), ["[load]", "model", "at least 1 character", "''"]),
        (change("drafter", "drafer = 'ngram'"), ["drafer", "'drafter'"]),
        (change("dtype", "dtype = true"), ["dtype", "string", "True"]),
        (change("verifier", "verifier = [1]"), ["verifier", "string", "[1]"]),
        (change("date", "date = 2026-11-21"), ["date", "string"]),
        (change("num_threads", "num_threads = 0"), ["[tuned]", "num_threads", "greater than or equal to 1", "0"]),
        (change("num_threads", "num_threads = true"), ["num_threads", "True"]),
        (change("num_threads", "num_threads = 2.0"), ["num_threads", "2.0"]),
        (change("model_sha256", 'model_sha256 = "abc"'), ["model_sha256", "64", "abc"]),
        (change("acceptance_rate", "acceptance_rate = 1.5"), ["acceptance_rate", "less than or equal to 1", "1.5"]),
        (change("acceptance_rate", "acceptance_rate = nan"), ["acceptance_rate", "nan"]),
        (change("acceptance_by_position", "acceptance_by_position = [0.5, 2]"), ["acceptance_by_position", "2"]),
        (change("acceptance_by_position", "acceptance_by_position = 0.5"), ["acceptance_by_position", "a valid tuple", "0.5"]),
        (change("draft_length", "draft_length = -1"), ["draft_length", "-1"]),
        (change("draft_length", "draft_length = 65"), ["draft_length", "64"]),
        (change("cost_ratio", "cost_ratio = inf"), ["cost_ratio", "inf"]),
        (change("cost_ratio", "cost_ratio = " + "9" * 400), ["cost_ratio", "number"]),
        (change("speedup", "speedup = 2.3"), ["speedup", "a valid dictionary", "2.3"]),
        (change("speedup", 'speedup = { "one" = 2.3 }'), ["speedup", "one"]),
        (change("speedup", 'speedup = { "1" = -2 }'), ["speedup", "-2"]),
        (change("speedup", 'speedups = { "1" = 2 }'), ["speedups", "'speedup'"]),
    ],
)  # fmt: skip
def test_unknown_keys_and_values_are_refused(tmp_path, content, words):
    path = tmp_path / "tuned.toml"
    path.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        read_configuration(path)
    for word in ["tuned.toml", "expected", *words]:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 500


def test_unreadable_files_are_reported(tmp_path):
    with pytest.raises(BadInputError, match=r"nothing\.toml: No such file.*secondguess tune"):
        read_configuration(tmp_path / "nothing.toml")
    with pytest.raises(BadInputError, match="Is a directory"):
        read_configuration(tmp_path)


@pytest.mark.parametrize("value", [3, "", "\ud800", b"m", None])
def test_a_model_that_is_not_a_string_is_refused(value):
    with pytest.raises(BadInputError, match="expected model to "):
        LoadSettings(model=value)


def test_a_model_is_identified_by_name_or_directory(tmp_path, monkeypatch):
    from secondguess.builtin import builtin_paths

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "link").symlink_to("a")
    monkeypatch.chdir(tmp_path)
    assert same_model("org/model", "org/model")
    assert same_model("a", "./a/")
    assert same_model("link", str(tmp_path / "a"))
    assert same_model("builtin", str(builtin_paths().target))
    assert not same_model("builtin", str(builtin_paths().drafter))
    assert not same_model("a", "b")
    assert not same_model("a", "nowhere")
    assert not same_model("nowhere", "elsewhere")


def test_a_configuration_of_another_model_is_refused(tmp_path):
    configuration = Configuration(LoadSettings(model="org/model"))
    source = tmp_path / "secondguess.toml"
    require_same_model(configuration, "org/model", source)
    with pytest.raises(BadInputError, match=r"other, got .*secondguess\.toml.* of org/model.*no --model"):
        require_same_model(configuration, "other", source)


def test_a_configuration_of_other_weights_is_refused(tmp_path, tiny_checkpoint):
    from secondguess.checkpoint.weight_files import hash_weights

    model = shutil.copytree(tiny_checkpoint, tmp_path / "model")
    settings = LoadSettings(model=str(model))
    configuration = Configuration(settings, TuningRecord(model_sha256=hash_weights(model)))
    require_same_weights(configuration, tmp_path / "secondguess.toml")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    with pytest.raises(BadInputError, match=r"weights of .*tune again"):
        require_same_weights(configuration, tmp_path / "secondguess.toml")
    require_same_weights(Configuration(settings), tmp_path / "secondguess.toml")
