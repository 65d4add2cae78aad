"""Output of `export`, checked against each engine's names, types and combinations.

The schemas are ours, written from the engines' documentation and sources (see `docs/tuning.md` for the versions).
"""

from __future__ import annotations

import json
import re
import shlex
from os.path import expanduser

import pytest
import torch
from typer.main import get_command

from secondguess.builtin import builtin_paths, head_path
from secondguess.cli import app
from secondguess.configuration import Configuration, LoadSettings, TuningRecord
from secondguess.drafters.base import Requirements
from secondguess.drafters.spec import PartSpec
from secondguess.drafters.suffix import SuffixDrafter
from secondguess.errors import BadInputError
from secondguess.export import ENGINES, export
from secondguess.export.base import Recommendation, recommend
from secondguess.heads.files import write_head
from secondguess.names import Name
from secondguess.pairing import resolve_drafter

TARGET, DRAFTER = map(str, builtin_paths())
NAMES = {
    "none": "none",
    "model": "model:builtin-draft",
    "ngram": "ngram,max=6,min=3",
    "suffix": "suffix,factor=2,threshold=0.25",
}
LENGTH = 4


def exported(engine, drafter, length=LENGTH, **settings):
    settings = LoadSettings(model="builtin", drafter=NAMES.get(drafter, drafter), **settings)
    return export(recommend(settings, draft_length=None if drafter == "none" else length), engine)


# one schema per engine: each returns what it understood, in our words


def flags(words, known):
    """`--flag value` pairs, each once, with values of the known types."""
    names = words[::2]
    assert len(words) % 2 == 0
    assert len(set(names)) == len(names)
    assert set(names) <= known.keys(), set(names) - known.keys()
    return {name: known[name](value) for name, value in zip(names, words[1::2], strict=True)}


def one_of(*values):
    def check(value):
        assert value in values, value
        return value

    return check


GPU_DTYPES = one_of("auto", "float32", "bfloat16", "float16")


def read_vllm(text):
    (line,) = text.splitlines()
    words = shlex.split(line)
    assert words[:2] == ["vllm", "serve"]
    found = flags(words[3:], {"--dtype": GPU_DTYPES, "--speculative-config": json.loads})
    speculation = found.get("--speculative-config")
    if speculation is None:
        return {"model": words[2], "kind": "none"}
    keys = {
        "draft_model": {"model": str},
        "ngram": {"prompt_lookup_max": int, "prompt_lookup_min": int},
        "suffix": {
            "suffix_decoding_max_tree_depth": int,
            "suffix_decoding_max_cached_requests": int,
            "suffix_decoding_max_spec_factor": float,
            "suffix_decoding_min_token_prob": float,
        },
    }[speculation["method"]] | {"method": str, "num_speculative_tokens": int}
    assert set(speculation) <= set(keys)
    for key, value in speculation.items():
        assert type(value) is keys[key], key
    assert 1 <= speculation["num_speculative_tokens"] <= 32
    if speculation["method"] == "ngram":
        assert 1 <= speculation["prompt_lookup_min"] <= speculation["prompt_lookup_max"]
    return {
        "model": words[2],
        "kind": {"draft_model": "model"}.get(speculation["method"], speculation["method"]),
        "draft_model": speculation.get("model"),
        "length": speculation["num_speculative_tokens"],
        "options": speculation,
    }


def read_sglang(text):
    (line,) = text.splitlines()
    words = shlex.split(line)
    assert words[:3] == ["python", "-m", "sglang.launch_server"]
    known = {
        "--model-path": str,
        "--dtype": GPU_DTYPES,
        "--speculative-algorithm": one_of("STANDALONE", "NGRAM"),
        "--speculative-draft-model-path": str,
        "--speculative-num-steps": int,
        "--speculative-eagle-topk": int,
        "--speculative-num-draft-tokens": int,
    }
    found = flags(words[3:], known)
    model = found.pop("--model-path")
    found.pop("--dtype", None)
    algorithm = found.pop("--speculative-algorithm", None)
    if algorithm is None:
        assert not found
        return {"model": model, "kind": "none"}
    counted = found.pop("--speculative-num-draft-tokens")
    draft_model = None
    if algorithm == "STANDALONE":
        draft_model = found.pop("--speculative-draft-model-path")
        # With top-k 1 the number of draft tokens is that of steps and the pending token.
        assert found.pop("--speculative-eagle-topk") == 1
        assert found.pop("--speculative-num-steps") == counted - 1
    assert not found
    return {
        "model": model,
        "kind": {"STANDALONE": "model", "NGRAM": "ngram"}[algorithm],
        "draft_model": draft_model,
        "length": counted - 1,
    }


def read_llama_cpp(text):
    *before, line = map(shlex.split, text.splitlines())
    files = {}
    for words in before:
        assert words[:2] == ["python", "convert_hf_to_gguf.py"]
        outtypes = one_of("f32", "f16", "bf16", "q8_0", "auto")
        found = flags(words[3:], {"--outfile": str, "--outtype": outtypes})
        files[found["--outfile"]] = words[2]
    assert line[0] == "llama-server"
    types = one_of(
        "none", "draft-simple", "ngram-cache", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"
    )
    known = {
        "-m": str,
        "-md": str,
        "--spec-type": types,
        "--spec-draft-n-max": int,
        "--spec-ngram-simple-size-n": int,
        "--spec-ngram-simple-size-m": int,
        "--spec-ngram-simple-min-hits": int,
    }  # fmt: skip
    found = flags(line[1:], known)
    model, draft_model = files.pop(found.pop("-m")), files.pop(found.pop("-md", None), None)
    assert not files
    kind = found.pop("--spec-type", "none")
    length = {"draft-simple": "--spec-draft-n-max", "ngram-simple": "--spec-ngram-simple-size-m"}.get(kind)
    assert (draft_model is not None) == (kind == "draft-simple")
    read = {"model": model, "kind": {"draft-simple": "model", "ngram-simple": "ngram"}.get(kind, kind)}
    if length:
        read |= {"draft_model": draft_model, "length": found.pop(length)}
    read["options"] = found
    assert set(found) <= {"--spec-ngram-simple-size-n"}
    return read


READERS = {
    "vllm": read_vllm,
    "sglang": read_sglang,
    "llama.cpp": read_llama_cpp,
}
WITHOUT_SUFFIX = {"sglang", "llama.cpp"}


def test_every_engine_has_a_schema():
    assert READERS.keys() == ENGINES.keys()


@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_output_matches_the_schema_and_the_recommendation(engine, drafter):
    done = exported(engine, drafter)
    read = READERS[engine](done.text)
    expected = "ngram" if drafter == "suffix" and engine in WITHOUT_SUFFIX else drafter
    assert (read["model"], read["kind"]) == (TARGET, expected)
    if drafter != "none":
        assert read["length"] == LENGTH
        assert read["draft_model"] == (DRAFTER if drafter == "model" else None)
    assert all(note.isprintable() and not note.endswith(".") for note in done.notes)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replaced_drafter_is_noted(engine):
    said = any("no suffix drafter" in note for note in exported(engine, "suffix").notes)
    assert said is (engine in WITHOUT_SUFFIX)


@pytest.mark.parametrize("engine", ENGINES)
def test_differences_of_every_engine_are_noted(engine):
    notes = " ".join(exported(engine, "model").notes)
    assert re.search("distribution|lossless|greedy text", notes)
    # Plain decoding is the same everywhere.
    assert exported(engine, "none").notes == ()


@pytest.mark.parametrize(
    ("engine", "switch"), [("vllm", "--generation-config vllm"), ("sglang", "--sampling-defaults openai")]
)
def test_notes_say_that_other_engines_sample_with_the_models_own_settings(engine, switch):
    (note,) = [note for note in exported(engine, "model").notes if "generation_config.json" in note]
    assert switch in note


def test_options_of_an_engine_are_exported():
    vllm = read_vllm(exported("vllm", "ngram").text)["options"]
    assert (vllm["prompt_lookup_max"], vllm["prompt_lookup_min"]) == (6, 3)
    vllm = read_vllm(exported("vllm", "suffix").text)["options"]
    assert (vllm["suffix_decoding_max_spec_factor"], vllm["suffix_decoding_min_token_prob"]) == (2.0, 0.25)
    assert read_llama_cpp(exported("llama.cpp", "ngram").text)["options"] == {"--spec-ngram-simple-size-n": 6}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_options_without_a_counterpart_are_noted(engine, drafter):
    done = exported(engine, drafter)
    (part,) = resolve_drafter(NAMES[drafter]).parts
    given = part.name.options
    named = {key for key in given if any(f"{key}={given[key]}" in note for note in done.notes)}
    known = {("vllm", "ngram"): {"max", "min"}, ("vllm", "suffix"): {"factor", "threshold"}}
    some = {"max"} if drafter == "ngram" and engine != "sglang" else set()
    assert set(given) - named == known.get((engine, drafter), some)


@pytest.mark.parametrize("engine", ENGINES)
def test_dtype_and_quantization_are_exported_or_noted(engine):
    plain = exported(engine, "model")
    done = exported(engine, "model", dtype="float16", quantize="int8", drafter_quantize="int8")
    READERS[engine](done.text)
    assert done.text != plain.text
    left_out = [note for note in done.notes if note.startswith("int8 of the ")]
    if engine == "llama.cpp":
        assert done.text.count("q8_0") == 2
    else:
        assert [note.split(" is ")[0] for note in left_out] == [
            "int8 of the target",
            "int8 of the draft model",
        ]
    with pytest.raises(BadInputError, match=r"dtype that .* float8; choose"):
        exported(engine, "model", dtype="float8")


def test_a_hub_model_is_downloaded_before_conversion():
    settings = LoadSettings(model="org/model", drafter="none")
    fetch, convert, serve = export(recommend(settings), "llama.cpp").text.splitlines()
    assert fetch == "hf download org/model --local-dir target"
    assert convert.startswith("python convert_hf_to_gguf.py target --outfile target.gguf")
    assert serve == "llama-server -m target.gguf"
    settings = LoadSettings(model="org/model", drafter="none", quantize="int4", dtype="bfloat16")
    _, convert, quantize, serve = export(recommend(settings), "llama.cpp").text.splitlines()
    assert convert.endswith("--outfile unquantised-target.gguf --outtype bf16")
    assert quantize == "llama-quantize unquantised-target.gguf target.gguf iq4_nl"


def test_a_file_in_gguf_is_served_as_it_is():
    settings = LoadSettings(model="models/a b.gguf", drafter="model:small.GGUF")
    (serve,) = export(recommend(settings, draft_length=2), "llama.cpp").text.splitlines()
    assert shlex.split(serve)[:5] == ["llama-server", "-m", "models/a b.gguf", "-md", "small.GGUF"]
    for more in ({"dtype": "float32"}, {"quantize": "int8"}, {"drafter_quantize": "int4"}):
        changed = settings.model_copy(update=more)
        with pytest.raises(
            BadInputError, match=r"no dtype and no quantisation for .*as they are stored; leave"
        ):
            export(recommend(changed), "llama.cpp")


def test_a_file_in_gguf_on_the_hub_is_found_in_the_cache_or_downloaded(tmp_path, monkeypatch):
    settings = LoadSettings(model="org/x/f.gguf", drafter="none")
    fetch, serve = export(recommend(settings), "llama.cpp").text.splitlines()
    assert fetch == "hf download org/x f.gguf --local-dir target"
    assert serve == "llama-server -m target/f.gguf"
    monkeypatch.setattr("secondguess.export.engines.find_in_cache", lambda *names: tmp_path.joinpath(*names))
    (serve,) = export(recommend(settings), "llama.cpp").text.splitlines()
    assert shlex.split(serve) == ["llama-server", "-m", str(tmp_path / "org/x/f.gguf")]


@pytest.mark.parametrize("path", ["/missing/model", "~/model", "../model", "/missing/f.gguf"])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_missing_path_is_not_downloaded(path, drafts):
    names = {"model": TARGET, "drafter": f"model:{path}"} if drafts else {"model": path, "drafter": "none"}
    shown = expanduser(path) if drafts else path
    with pytest.raises(BadInputError, match=f"got '{shown}', which does not exist; check the path"):
        export(recommend(LoadSettings(**names)), "llama.cpp")


def test_what_vllm_needs_for_gguf_is_noted():
    for model, noted in (("f.gguf", True), ("org/model", False)):
        notes = export(recommend(LoadSettings(model=model, drafter="none")), "vllm").notes
        assert any("vllm-gguf-plugin" in note for note in notes) is noted


@pytest.mark.parametrize(
    ("drafter", "engine", "kind"),
    [
        ("self:int4+suffix", "vllm", "suffix"),
        ("suffix+eagle:head", "vllm", "eagle3"),
        ("suffix+eagle:head", "llama.cpp", "ngram-simple"),
        ("suffix+model:small", "sglang", "STANDALONE"),
    ],
)
def test_of_joined_drafters_the_preferred_one_that_the_engine_has_is_exported(drafter, engine, kind):
    result = export(recommend(LoadSettings(model="org/model", drafter=drafter)), engine)
    assert kind in result.text
    (note,) = [note for note in result.notes if "combines drafters" in note]
    assert f"as {drafter} does" in note
    with pytest.raises(BadInputError, match=r"expected a drafter that .* has"):
        export(recommend(LoadSettings(model="org/model", drafter="self:int4+early-exit:2")), engine)


AWKWARD = 'a model\'s "name" with $spaces; # and ünïcode'


@pytest.mark.parametrize("engine", ENGINES)
def test_awkward_paths_are_quoted(engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / AWKWARD).mkdir()
    settings = LoadSettings(model=AWKWARD, drafter=f"model:{AWKWARD}")
    read = READERS[engine](export(recommend(settings, draft_length=2), engine).text)
    assert (read["model"], read["draft_model"]) == (AWKWARD, AWKWARD)


def test_a_path_with_line_breaks_is_refused():
    with pytest.raises(BadInputError, match="printable"):
        recommend(LoadSettings(model="a\nspeculative_config: {}"))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_drafter_without_a_counterpart_is_refused(engine):
    with pytest.raises(BadInputError, match=r"drafter that .* has \(none, model.*, got oracle:3; choose"):
        export(
            Recommendation("m", PartSpec(Name("oracle", "3", {}), SuffixDrafter, Requirements()), 3), engine
        )


def test_an_unknown_engine_is_refused():
    with pytest.raises(BadInputError, match=r"vllm, sglang, llama\.cpp.*'triton'"):
        export(recommend(LoadSettings(model="m", drafter="none")), "triton")


# where the draft length comes from


@pytest.mark.parametrize(
    ("settings", "tuned", "asked", "length"),
    [
        ({}, {}, None, 5),
        ({}, {"draft_length": 7}, None, 7),
        ({"controller": "cost"}, {"draft_length": 7}, None, 7),
        ({"controller": "fixed:3"}, {"draft_length": 7}, None, 3),
        ({"controller": "fixed"}, {"draft_length": 7}, None, 5),
        ({"controller": "fixed:3"}, {"draft_length": 7}, 2, 2),
        ({"drafter": "none"}, {"draft_length": 7}, None, 0),
    ],
)
def test_the_draft_length_is_given_fixed_measured_or_default(settings, tuned, asked, length):
    done = recommend(LoadSettings(model="m", **{"drafter": "ngram"} | settings), TuningRecord(**tuned), asked)
    assert done.draft_length == length


def test_the_source_of_the_draft_length_is_noted():
    (default,) = recommend(LoadSettings(model="m")).notes
    assert "nothing was measured" in default
    (measured,) = recommend(LoadSettings(model="m"), TuningRecord(draft_length=7, processor="Some CPU")).notes
    assert "best" in measured
    assert "Some CPU" in measured
    assert recommend(LoadSettings(model="m"), draft_length=3).notes == ()


def test_plain_decoding_is_exported_for_a_draft_length_of_zero():
    for settings, tuned in (({}, {"draft_length": 0}), ({"controller": "fixed:0"}, {})):
        done = recommend(LoadSettings(model="m", drafter="model:d", **settings), TuningRecord(**tuned))
        assert done.drafter.kind == "none"
        assert "plain decoding" in done.notes[0]


def test_settings_that_are_not_exported_are_noted():
    settings = LoadSettings(
        model="m", verifier="block", controller="cost", device="cpu", runtime="native", share_history=True
    )
    notes = recommend(settings, TuningRecord(draft_length=2)).notes
    assert "verifier block, controller cost, device cpu, runtime native, share_history True" in notes[-1]
    quiet = LoadSettings(model="m", verifier="auto", controller="fixed:2", device="auto", share_history=False)
    assert recommend(quiet).notes == ()


@pytest.mark.parametrize(
    ("settings", "asked", "words"),
    [
        ({"drafter": "oracle"}, None, "drafter among"),
        ({"drafter": "model"}, None, "path of a draft model"),
        ({"drafter": "ngram,max=99"}, None, "between 1 and 32"),
        ({"drafter": "none"}, 3, "from 0 to 0 for the drafter none, got 3"),
        ({"drafter": "ngram"}, -1, "from 1 to 64 .* got -1"),
        ({"drafter": "ngram"}, 65, "from 1 to 64 .* got 65"),
        ({"drafter": "ngram", "controller": "fixed:99"}, None, "draft length"),
        ({"drafter": "ngram", "drafter_quantize": "int8"}, None, "drafter with a model"),
    ],
)
def test_invalid_recommendations_are_refused(settings, asked, words):
    with pytest.raises(BadInputError, match=words):
        recommend(LoadSettings(model="m", **settings), draft_length=asked)


def test_a_draft_length_beyond_the_engines_limit_is_refused():
    with pytest.raises(BadInputError, match="at most 32 for vLLM, got 40"):
        exported("vllm", "ngram", length=40)
    assert read_sglang(exported("sglang", "ngram", length=40).text)["length"] == 40


# the command line


def test_the_command_prints_the_configuration_and_notes_beside_it(secondguess_command, tmp_path):
    path = tmp_path / "secondguess.toml"
    settings = LoadSettings(
        model="builtin", drafter="model:builtin-draft", dtype="bfloat16", controller="cost"
    )
    path.write_text(Configuration(settings, TuningRecord(draft_length=6)).to_toml())
    done = secondguess_command("export", "--to", "vllm", "--config", path)
    assert done.code == 0
    read = read_vllm(done.out)
    assert (read["kind"], read["length"]) == ("model", 6)
    assert "--dtype bfloat16" in done.out
    assert all(line.startswith("note: ") for line in done.err.splitlines())
    assert "controller cost" in done.err

    (record,) = secondguess_command("export", "--to", "vllm", "--config", path, "--json").records
    assert record["engine"] == "vllm"
    assert record["text"] == done.out
    assert [f"note: {note}" for note in record["notes"]] == done.err.splitlines()

    other = secondguess_command("export", "--to", "vllm", "--config", path, "--drafter", "ngram")
    assert read_vllm(other.out)["length"] == 5  # what was measured was measured with the other drafter
    assert "not using its controller, measurements" in other.err


@pytest.mark.parametrize(
    ("model", "drafter"), [("builtin", "suffix+model:builtin-draft"), ("some/model", "suffix")]
)
def test_the_help_names_the_drafter_that_is_exported_by_default(secondguess_command, model, drafter):
    (option,) = [each for each in get_command(app).commands["export"].params if each.name == "drafter"]
    assert option.show_default == "suffix+model:builtin-draft for builtin; else suffix"
    default, named = (
        secondguess_command("export", "--to", "vllm", "--model", model, *asked).out
        for asked in ((), ("--drafter", drafter))
    )
    assert default == named


def test_the_help_names_every_engine(secondguess_command):
    said = secondguess_command("export", "--help").out
    assert [engine for engine in ENGINES if engine not in said] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--to"]),
        (["--to", "triton"], ["vllm", "llama.cpp", "triton"]),
        (["--to", "vllm", "--drafter", "oracle"], ["oracle"]),
        (["--to", "vllm", "--draft-length", "0x"], ["--draft-length"]),
        (["--to", "vllm", "--draft-length", "99"], ["64", "99"]),
        (["--to", "vllm", "--config", "nowhere.toml"], ["nowhere.toml"]),
        (["--to", "llama.cpp", "--dtype", "float64"], ["llama.cpp", "float64"]),
    ],
)
def test_bad_options_of_export_are_refused(secondguess_command, arguments, words):
    done = secondguess_command("export", *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("drafter", "method"),
    [
        ("eagle", "eagle3"),
        ("mtp", "mtp"),
        ("medusa", "medusa"),
        ("dspark", "dspark"),
        ("gemma4-assistant", "mtp"),
    ],
)
def test_trained_drafters_are_exported_to_vllm(drafter, method):
    words = shlex.split(exported("vllm", f"{drafter}:some/folder").text)
    said = json.loads(words[words.index("--speculative-config") + 1])
    assert said == {"method": method, "model": "some/folder", "num_speculative_tokens": LENGTH}


@pytest.mark.parametrize(
    ("config", "layer", "version"),
    [
        ({}, "layers.0.mlp.up_proj.weight", ""),
        ({}, "midlayer.hidden_norm.weight", "3"),
        ({"draft_vocab_size": 5}, "layers.0.mlp.up_proj.weight", "3"),
        ({"speculators_model_type": "eagle3"}, "layers.0.hidden_norm.weight", "3"),
    ],
)
def test_an_eagle_head_is_exported_as_the_version_that_its_folder_holds(config, layer, version, tmp_path):
    write_head(tmp_path, config, {layer: torch.zeros(1)})
    assert f'"method": "eagle{version}"' in exported("vllm", f"eagle:{tmp_path}").text
    assert f"--speculative-algorithm EAGLE{version} " in exported("sglang", f"eagle:{tmp_path}").text


@pytest.mark.parametrize(("drafter", "most"), [("medusa", 2), ("dspark", 7)])
def test_a_draft_is_no_longer_than_a_head_drafts(drafter, most):
    for length in (1, most, most + 1):
        found = exported("vllm", f"{drafter}:{head_path(drafter)}", length)
        assert f'"num_speculative_tokens": {min(length, most)}' in found.text
        assert any(f"draft length {most}, because" in note for note in found.notes) == (length > most)


def test_modules_of_the_target_itself_need_no_folder():
    words = shlex.split(exported("vllm", "mtp").text)
    assert json.loads(words[-1]) == {"method": "mtp", "num_speculative_tokens": LENGTH}
    with pytest.raises(BadInputError, match="eagle:PATH"):
        exported("vllm", "eagle")


def test_an_eagle_head_is_exported_to_sglang():
    words = shlex.split(exported("sglang", "eagle:some/folder").text)
    at = words.index("--speculative-draft-model-path")
    assert words[at - 1 : at + 2] == ["EAGLE3", "--speculative-draft-model-path", "some/folder"]
    assert words[-1] == str(LENGTH + 1)
    with pytest.raises(BadInputError, match="eagle:PATH"):
        exported("sglang", "eagle")
