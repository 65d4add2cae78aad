"""Bad input ends with exit code 2 and one line on standard error: expected, got, what to do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import write_llama
from secondguess import LLM, load
from secondguess.builtin import head_path
from secondguess.checkpoint import memory
from secondguess.checkpoint.plan import Checkpoint
from secondguess.configuration import LoadSettings
from secondguess.engine import models
from secondguess.errors import BadInputError, OutOfMemoryError

REFUSED = "secondguess: error: "
LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"


def assert_refused(done, *words):
    """Exit code 2, nothing on standard output, one line that holds every word."""
    assert (done.code, done.out) == (2, ""), done
    assert done.err.startswith(REFUSED)
    assert done.err.count("\n") == 1
    for word in words:
        assert word in done.err


@pytest.fixture
def ask(secondguess_command, tiny_checkpoint):
    """Generate with the tiny target and no drafter; more options may follow, and win."""

    def run(*arguments, stdin=b""):
        return secondguess_command(
            "generate", "--model", tiny_checkpoint, "--drafter", "none", *arguments, stdin=stdin
        )

    return run


@pytest.fixture
def copied(tiny_checkpoint, tmp_path):
    """A copy of the tiny checkpoint, to be broken."""
    return shutil.copytree(tiny_checkpoint, tmp_path / "copy")


def change_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# usage


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--colour", "red"], ["--colour"]),
        (["generate", "x", "y"], ["y"]),
        (["guess"], ["guess"]),
        (["generate", "x", "--max-tokens", "many"], ["--max-tokens", "integer"]),
        (["generate", "x", "--temperature", "warm"], ["--temperature", "number"]),
        (["generate", "x", "--seed"], ["--seed"]),
        (["inspect"], ["MODEL", "Missing"]),
        (["train", "everything"], ["everything"]),
        (["generate"], ["PROMPT", "neither"]),
        (["generate", "x", "--prompt-file", "y"], ["PROMPT", "both"]),
        (["generate", "x", "--batch-size", "2"], ["--batch-size", "--prompt-file"]),
        (["generate", "x", "--logprobs", "2"], ["--logprobs", "--json"]),
        (["generate", "x", "--drafter", ""], ["drafter", "''"]),
        (["generate", "x", "--controller", ""], ["controller", "''"]),
        (["verify", "--drafter", ""], ["drafter", "''"]),
        (["verify", "--controller", ""], ["controller", "''"]),
        (["generate", "x", "--max-tokens", "1e9"], ["--max-tokens", "got '1e9'"]),
        (["generate", "x", "--max-tokens=1e9"], ["--max-tokens", "got '1e9'"]),
        (["verify", "--drafter", "eagle"], ["eagle", "--model builtin"]),
        (["train", "draft", "--steps", "0", "--out", "somewhere"], ["--steps above 0", "got 0"]),
        (["train", "draft", "--minutes", "0", "--out", "somewhere"], ["--minutes above 0", "got 0"]),
        (["verify", "--drafter", "none", "--controller", "fixed:2"], ["none", "fixed:2"]),
        (["verify", "--drafter", "ngram", "--controller", "confidence"], ["ngram", "confidence"]),
        (
            ["verify", "--drafter", "model:perturbed-copy,tree=2x2", "--verifier", "block"],
            ["tree=2x2", "'block'", "auto"],
        ),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_refused(secondguess_command, arguments, words):
    assert_refused(secondguess_command(*arguments), *words)


@pytest.mark.parametrize("verifier", ["block", "rejection"])
@pytest.mark.parametrize("drafter", ["model:{},tree=2x2", "suffix+model:{},tree=2x2"])
def test_a_drafter_of_trees_with_a_verifier_of_chains_is_refused(
    secondguess_command, tiny_checkpoint, tiny_draft_checkpoint, drafter, verifier
):
    components = ("--drafter", drafter.format(tiny_draft_checkpoint), "--verifier", verifier)
    done = secondguess_command("generate", "x", "--model", tiny_checkpoint, *components, "--temperature", "1")
    assert_refused(done, "tree=2x2", f"'{verifier}'", "traversal", "chains")


def test_a_missing_path_is_not_taken_for_a_name(ask):
    for path in ("/nope", "./nope", "a/b/nope"):
        done = ask("x", "--model", path)
        assert_refused(done, path, "check the path")
        assert "hf download" not in done.err
    assert_refused(ask("x", "--model", "org/nope"), "hf download org/nope")


def test_a_folder_that_cannot_be_created_is_refused(secondguess_command, tiny_checkpoint, tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    done = secondguess_command("train", "draft", "--model", tiny_checkpoint, "--steps", 1, "--out", out)
    assert_refused(done, "expected a folder for --out", str(tmp_path / "file"), "name another")
    assert "Errno" not in done.err


def test_a_permission_error_is_reported_in_one_line(secondguess_command, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "/some/file")

    monkeypatch.setattr("secondguess.checkpoint.description.describe", refuse)
    done = secondguess_command("inspect", "builtin")
    assert_refused(done, "expected a usable path, got /some/file: Permission denied", "choose another")
    assert "Errno" not in done.err


def test_settings_for_only_some_prompts_are_refused(tiny_checkpoint):
    llm = load(tiny_checkpoint, "none", dtype="float32")
    with pytest.raises(BadInputError, match="each of 2 prompts, got 1"):
        llm.generate(["x", "y"], [llm.sampling(max_tokens=1)])


def test_a_head_of_another_kind_is_refused(secondguess_command):
    folder = head_path("medusa")
    done = secondguess_command("generate", "x", "--drafter", f"eagle:{folder}", "--dtype", "float32")
    assert_refused(done, str(folder), "eagle", f"write medusa:{folder}")


@pytest.mark.filterwarnings("default")
def test_a_head_for_another_target_is_refused_without_a_warning(secondguess_command, tiny_checkpoint):
    components = ("--model", tiny_checkpoint, "--drafter", f"eagle:{head_path('eagle')}")
    assert_refused(secondguess_command("generate", "x", *components), "trained for")


# numbers

WHOLE_NUMBERS = {
    "--max-tokens": ["-1", "1e3", "nan", "99999999999999999999"],
    "--min-tokens": ["-1", "200", "1.5", "nan"],
    "--top-k": ["-1", "0.5", "nan", "99999999999999999999"],
    "--stop-token-id": ["-1", "300", "nan", "99999999999999999999"],
    "--seed": ["-1", "1.5", "nan", "99999999999999999999"],
    "--logprobs": ["-1", "21", "nan"],
    "--batch-size": ["-1", "0", "nan"],
    "--n": ["-1", "0", "1.5", "nan", "99999999999999999999"],
}
NUMBERS = {
    "--temperature": ["-1", "nan", "inf", "1e9", "1e-9"],
    "--top-p": ["-0.1", "0", "1.1", "nan", "inf"],
    "--min-p": ["-0.1", "1.1", "nan"],
    "--repetition-penalty": ["-1", "0", "nan", "inf"],
    "--frequency-penalty": ["-3", "3", "nan", "-inf"],
    "--presence-penalty": ["-3", "3", "nan", "inf"],
    "--logit-bias": ["5", "5=", "=5", "five=1", "5=nan", "5=inf", "5=1e9", "-1=2", "300=1"],
}
ABSURD = [(option, value) for option, values in (WHOLE_NUMBERS | NUMBERS).items() for value in values]


@pytest.mark.parametrize(("option", "value"), ABSURD)
def test_invalid_numbers_are_refused(ask, option, value):
    done = ask("x", "--json", f"{option}={value}")
    assert_refused(done)
    # The message names the option, or the setting of the same name, and what was expected.
    setting = option.removeprefix("--").removesuffix("-id").replace("-", "_")
    assert option in done.err or setting in done.err
    assert "expected" in done.err or "should be a valid" in done.err


# prompts


@pytest.mark.parametrize(
    ("prompt", "stdin", "words"),
    [
        ("", b"", ["empty"]),
        ("-", b"", ["standard input", "nothing"]),
        ("-", b"caf\xe9", ["UTF-8", "0xe9 at byte 3"]),
        (os.fsdecode(b"caf\xe9"), b"", ["UTF-8"]),
        ("-", b"z9" * 200, ["255", "256", "400", "shorten"]),
    ],
)
def test_invalid_prompts_are_refused(ask, prompt, stdin, words):
    assert_refused(ask(prompt, stdin=stdin), *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["at least one line"]),
        (b"\n\n", ["at least one line"]),
        (b'{"prompt": "caf\xe9"}', ["UTF-8"]),
        (b'{"prompt": "x"}\n{"prompt": ', ["line 2", "not JSON"]),
        (b"[" * 100_000, ["line 1", "not JSON"]),
        (b'["x"]', ["line 1", '{"prompt": "..."}']),
        (b'{"text": "x"}', ["line 1", "prompt"]),
        (b'{"prompt": ""}', ["line 1", "prompt"]),
        (b'{"prompt": 5}', ["line 1", "prompt", "5"]),
        (b'{"prompt": "\\ud800"}', ["line 1", "surrogate"]),
        (b'{"prompt": "x", "max_new_tokens": 5}', ["line 1", "'max_new_tokens'", "max_tokens"]),
        (b'{"prompt": "x", "temperature": "hot"}', ["line 1", "temperature", "hot"]),
        (b'{"prompt": "x", "top_p": NaN}', ["line 1", "top_p", "nan"]),
        (b'{"prompt": "x", "logit_bias": {"a": 1}}', ["line 1", "logit_bias", "'a'"]),
        (
            b'{"prompt": "x"}\n{"prompt": "y", "task_id": 3}',
            ["line 2", "'task_id'", "prompt, messages, metadata", "max_tokens", "under metadata"],
        ),
        (b'{"prompt": "x", "test": "y", "entry_point": "z"}', ["line 1", "'test'", "under metadata"]),
        (b'{"prompt": "x", "max_token": 3}', ["line 1", "'max_token'", "max_tokens"]),
        (b'{"prompt": "x"}\n{"prompt": "y", "logprobs": 2}', ["line 2", "--json", "logprobs"]),
        *[
            (b'{"prompt": "x", "%s": "y"}' % name.encode(), ["line 1", name, f"--{name.replace('_', '-')}"])
            for name in LoadSettings.model_fields
        ],
    ],
)
def test_invalid_prompt_files_are_refused(ask, tmp_path, content, words):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    assert_refused(ask("--prompt-file", file), "prompts.jsonl", *words)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": "z9" * 200}, ["400"]),
        ({"prompt": "y", "temperature": 0.5}, ["greedy", "temperature", "0.5"]),
        ({"prompt": "y", "draft_with": "nosuch"}, ["expected draft_with"]),
    ],
)
def test_all_lines_are_checked_before_any_generation(ask, tmp_path, line, words):
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps(line))
    assert_refused(ask("--prompt-file", file, "--verifier", "greedy"), "prompts.jsonl line 2: ", *words)


def test_an_unreadable_prompt_file_is_refused(ask, tmp_path):
    assert_refused(ask("--prompt-file", tmp_path / "nothing.jsonl"), "nothing.jsonl", "No such file")
    assert_refused(ask("--prompt-file", tmp_path), "Is a directory")


# names


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--drafter", "oracle", ["drafter", "none, model, ", "suffix", "oracle"]),
        ("--drafter", "none:x", ["none", ":x"]),
        ("--drafter", "model", ["model"]),
        ("--drafter", "ngram,size=3", ["size"]),
        ("--drafter", "suffix,=", ["suffix"]),
        ("--verifier", "judge", ["verifier", "greedy", "judge"]),
        ("--controller", "chance", ["controller", "fixed", "chance"]),
        ("--controller", "fixed:-1", ["fixed", "-1"]),
        ("--controller", "fixed:nan", ["fixed", "nan"]),
        ("--controller", "fixed:1000000000000", ["fixed", "64"]),
        ("--controller", "confidence:4,threshold=2", ["threshold", "2"]),
        ("--dtype", "float8", ["dtype", "float8"]),
        ("--device", "abacus", ["device", "abacus"]),
        ("--device", "cuda:99", ["cuda:99"]),
        ("--quantize", "int1", ["quantize", "int1"]),
    ],
)
def test_unknown_names_are_refused(ask, option, value, words):
    assert_refused(ask("x", option, value), *words)


def test_an_option_without_effect_is_refused(ask):
    assert_refused(ask("x", "--drafter-quantize", "int8"), "drafter_quantize", "none")


@pytest.mark.parametrize(
    ("drafter", "controller"),
    [
        ("none", "fixed:3"),
        ("none", "confidence:4"),
        ("ngram", "confidence"),
        ("suffix", "confidence:4,threshold=0.5"),
    ],
)
def test_a_controller_without_effect_on_the_drafter_is_refused(ask, drafter, controller):
    assert_refused(ask("x", "--drafter", drafter, "--controller", controller), drafter, controller)


@pytest.mark.parametrize(
    ("drafter", "controller"), [("none", "fixed:0"), ("ngram", "fixed:0"), ("suffix", "fixed:3")]
)
def test_a_controller_with_effect_on_the_drafter_is_accepted(ask, drafter, controller):
    done = ask("x", "--max-tokens", "2", "--json", "--drafter", drafter, "--controller", controller)
    assert (done.code, done.records[0]["controller"]) == (0, controller)


# checkpoints


def test_a_missing_checkpoint_is_refused(ask, tmp_path):
    assert_refused(ask("x", "--model", tmp_path / "nowhere"), "nowhere")
    assert_refused(ask("x", "--drafter", f"model:{tmp_path / 'nowhere'}"), "nowhere")


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        (
            "config.json",
            b'{"model_type": "no_such_model"}',
            ["no_such_model", "; update Transformers, or use another model"],
        ),
        ("model.safetensors", b"cut", []),
        ("tokenizer.json", b"{", []),
        ("model.safetensors", LFS_POINTER, ["git lfs pull"]),
        ("tokenizer.json", LFS_POINTER, ["tokenizer.json, a pointer of Git LFS", "git lfs pull"]),
        ("generation_config.json", b"{", ["a generation configuration"]),
    ],
)
def test_a_broken_checkpoint_is_refused(ask, copied, file, content, words):
    """In one line; `checkpoint/test_checkpoint.py` has more ways to break each file."""
    (copied / file).write_bytes(content)
    assert_refused(ask("x", "--model", copied), str(copied), *words)


def test_a_pickle_of_which_git_lfs_has_left_a_pointer_is_named(ask, copied):
    (copied / "model.safetensors").unlink()
    (copied / "pytorch_model.bin").write_bytes(LFS_POINTER)
    assert_refused(ask("x", "--model", copied), str(copied), "pytorch_model.bin, a pointer", "git lfs pull")


def test_a_gguf_file_of_which_git_lfs_has_left_a_pointer_is_named(ask, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(LFS_POINTER)
    assert_refused(ask("x", "--model", tmp_path / "model.gguf"), "model.gguf", "a pointer", "git lfs pull")


@pytest.mark.parametrize("option", ["--model", "--drafter"])
def test_weights_that_give_no_numbers_are_refused(ask, copied, option):
    weights = load_file(copied / "model.safetensors")
    weights["model.norm.weight"][:] = float("nan")
    save_file(weights, copied / "model.safetensors", {"format": "pt"})
    value = copied if option == "--model" else f"model:{copied}"
    assert_refused(ask("x", option, value), str(copied), "got NaN")


def test_weights_of_another_model_are_refused(ask, copied):
    change_config(copied, num_hidden_layers=3)
    assert_refused(ask("x", "--model", copied), str(copied), "layers.2")


def save(model, directory, tokenizer_of):
    model.save_pretrained(directory)
    for file in tokenizer_of.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


def not_supported(kind, sizes):
    import transformers

    return getattr(transformers, kind)(getattr(transformers, f"{kind.partition('For')[0]}Config")(**sizes))


@pytest.mark.parametrize(
    ("kind", "sizes", "words"),
    [
        (
            "BertForMaskedLM",
            {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
            "causal",
        ),
        (
            "T5ForConditionalGeneration",
            {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
            "encoder-decoder",
        ),
        ("RwkvForCausalLM", {"hidden_size": 16, "num_hidden_layers": 2}, "takes no KV cache"),
    ],
)
def test_a_model_of_another_kind_is_refused(
    ask, secondguess_command, tiny_checkpoint, tmp_path, kind, sizes, words
):
    model = save(not_supported(kind, {"vocab_size": 300, **sizes}), tmp_path / "model", tiny_checkpoint)
    assert_refused(ask("x", "--model", model), words)
    assert_refused(secondguess_command("inspect", model), words)


# Python


@pytest.fixture(scope="module")
def llm(tiny_checkpoint):
    return load(tiny_checkpoint, "none", dtype="float32")


BAD_PROMPTS = [
    (None, "NoneType"),
    ([None], "None at place 0"),
    (3, "int"),
    ({"prompt": "x"}, "dict"),
    ({5, 6}, "set"),
    (iter([5, 6]), "iterator"),
    (b"def f", "bytes"),
    (bytearray(b"def f"), "bytes"),
    ([b"def f"], "bytes"),
    ("x\ud800", "lone surrogate '\\\\ud800' at character 1"),
    (["x", "\udfff"], "lone surrogate"),
    ([True, False], "True at place 0"),
    ([5, True], "True at place 1"),
    ([[5, 6.5]], "6.5 at place 1"),
    ([6.5, 5], "6.5 at place 0"),
    ([5, "x"], "'x' at place 1"),
    (["x", 5], "int"),
    ("", "empty"),
    ([[]], "empty"),
    (numpy.array([], dtype=int), "empty"),
    (numpy.array([5.0]), "5.0 at place 0"),
    (numpy.array([True]), "True at place 0"),
    (torch.tensor([5.0]), "5.0 at place 0"),
    (torch.tensor([True]), "True at place 0"),
    (torch.tensor(5), r"shape \[\]"),
    (numpy.array([[5, 6], [7, 8]]), r"shape \[2, 2\]"),
    (torch.tensor([[[5, 6]]]), r"shape \[1, 1, 2\]"),
    ([5, 300], "0 to 299"),
    ([-1], "0 to 299"),
    ([5] * 256, "255"),
]


@pytest.mark.parametrize(("prompt", "words"), BAD_PROMPTS, ids=lambda value: ascii(value)[:20])
def test_values_that_are_not_prompts_are_refused(llm, prompt, words):
    with pytest.raises(BadInputError, match=f"expected .*{words}"):
        llm.generate(prompt, max_tokens=2)


@pytest.mark.parametrize(
    "ids",
    [
        (5, 6, 7),
        range(5, 8),
        numpy.array([5, 6, 7], dtype=numpy.int32),
        list(numpy.array([5, 6, 7])),
        torch.tensor([5, 6, 7]),
        torch.tensor([[5, 6, 7]]),
    ],
    ids=["tuple", "range", "array", "numpy integers", "tensor", "batch of one"],
)
def test_token_ids_are_accepted_in_any_usual_form(llm, ids):
    expected = llm.generate([5, 6, 7], max_tokens=3).token_ids
    assert llm.generate(ids, max_tokens=3).token_ids == expected
    (first, second) = llm.generate([ids, "x"], max_tokens=3)
    assert first.token_ids == expected
    assert second.token_ids == llm.generate("x", max_tokens=3).token_ids


def test_params_of_another_type_are_refused(llm):
    for generate in (llm.generate, llm.stream):
        with pytest.raises(
            BadInputError, match=r"expected params to be SamplingParams, got dict.*max_tokens="
        ):
            generate("x", params={"max_tokens": 2})


@pytest.mark.parametrize(
    ("prompt", "settings"), [("", {}), ("x", {"temperature": -3}), ("x", {"nonsense": 1}), (b"x", {})]
)
def test_a_stream_is_refused_by_the_call_itself(llm, prompt, settings):
    with pytest.raises(BadInputError):
        llm.stream(prompt, **settings)


@pytest.mark.parametrize("name", LoadSettings.model_fields)
def test_options_of_load_of_another_type_are_refused(tiny_checkpoint, name):
    kind = "True or False" if name == "share_history" else "a text"
    with pytest.raises(BadInputError, match=f"expected {name} to be {kind}, got 3"):
        load(**{"model": str(tiny_checkpoint), name: 3})


def test_habits_from_other_libraries_get_advice(tiny_checkpoint, llm, tmp_path):
    with pytest.raises(BadInputError, match=r"load a model by secondguess\.load"):
        LLM("builtin")
    with pytest.raises(BadInputError, match=r"got a loaded Linear; give the path .*custom_generate"):
        load(torch.nn.Linear(1, 1))
    for name in (str(tmp_path), f"suffix+{tmp_path}"):
        with pytest.raises(BadInputError, match=f"did you mean 'model:{tmp_path}'"):
            load(str(tiny_checkpoint), name)
    with pytest.raises(BadInputError, match="expected a drafter among"):
        load(str(tiny_checkpoint), "x" * 300)
    for setting, advice in (
        ("temprature", "did you mean 'temperature'"),
        ("max_new_tokens", "did you mean 'max_tokens'"),
        ("sampling_params", "as params"),
    ):
        with pytest.raises(BadInputError, match=advice):
            llm.generate("x", **{setting: 1})
    assert load(str(tiny_checkpoint), "none", dtype=torch.float32).target.dtype == "float32"


def test_an_empty_option_is_not_the_default(tiny_checkpoint):
    for name in ("drafter", "controller", "quantize", "drafter_quantize"):
        with pytest.raises(BadInputError, match="''"):
            load(str(tiny_checkpoint), **{"drafter": "suffix", name: ""})


# memory


@pytest.mark.parametrize(
    ("fail", "words"),
    [
        (lambda *_, **__: torch.empty(2**60, dtype=torch.uint8), ["allocate", str(2**60)]),
        (lambda *_, **__: bytearray(2**62), ["the machine has no more"]),
    ],
    ids=["torch", "Python"],
)
def test_running_out_of_memory_is_reported_in_one_line(ask, monkeypatch, fail, words):
    monkeypatch.setattr("secondguess.api.load", fail)
    done = ask("x")
    assert_refused(done, "out of memory: ", "smaller", *words)
    assert "alloc_cpu" not in done.err


def test_a_prompt_whose_cache_does_not_fit_is_refused_before_it_is_allocated(tiny_checkpoint, monkeypatch):
    llm = load(tiny_checkpoint, "none", dtype="float32")
    monkeypatch.setattr(llm.target.runtime, "admit", lambda *_: pytest.fail("a row was admitted"))
    monkeypatch.setattr(memory, "available_memory", lambda _: 256 * llm.cache_bytes - 1)
    with pytest.raises(OutOfMemoryError, match=r"256 cached tokens.*shorten"):
        llm.generate([[5] * 200, [6]])
    monkeypatch.setattr(memory, "available_memory", lambda _: 256 * llm.cache_bytes)
    with pytest.raises(pytest.fail.Exception, match="admitted"):
        llm.generate([[5] * 200, [6]])


@pytest.mark.parametrize("limit", ["memory", "rows"])
def test_prompts_that_do_not_fit_together_decode_one_after_the_other(tiny_checkpoint, monkeypatch, limit):
    llm = load(tiny_checkpoint, "none", dtype="float32")
    prompts = [[5] * 50, [6, 7], [7], [8, 8, 8]]
    together = llm.generate(prompts, max_tokens=8)
    llm.target.runtime.free()
    if limit == "rows":
        llm.shared_batch.scheduler.max_rows = 2
    else:
        needed = 2 * 256 * llm.cache_bytes + 2 * llm.target.runtime.vocab_size * models.PROBS_BYTES
        monkeypatch.setattr(memory, "available_memory", lambda _: needed / models.MEMORY_SHARE)
    most, score = [], llm.target.runtime.score
    monkeypatch.setattr(
        llm.target.runtime, "score", lambda rows, *_: most.append(len(rows)) or score(rows, *_)
    )
    in_turn = llm.generate(prompts, max_tokens=8)
    assert max(most) == 2
    assert [output.token_ids for output in in_turn] == [output.token_ids for output in together]


def test_long_prompts_after_many_short_ones_decode_together(tmp_path, monkeypatch):
    llm = load(str(write_llama(tmp_path / "long", 0, max_position_embeddings=1024)), "none", dtype="float32")
    llm.generate([[number] for number in range(5, 69)], max_tokens=2)
    # The memory of the short rows' entries is enough for those of the long ones.
    needed = 4 * llm.target.runtime.vocab_size * models.PROBS_BYTES
    monkeypatch.setattr(memory, "available_memory", lambda _: needed / models.MEMORY_SHARE)
    most, score = [], llm.target.runtime.score
    monkeypatch.setattr(
        llm.target.runtime, "score", lambda rows, *_: most.append(len(rows)) or score(rows, *_)
    )
    llm.generate([[number] * 600 for number in range(5, 9)], max_tokens=40)
    assert max(most) == 4
    assert (llm.target.runtime.cache.num_slots, llm.target.runtime.cache.capacity) == (4, 1024)


def test_a_prompt_that_begins_like_an_earlier_one_is_prefilled_from_where_it_differs(tiny_checkpoint):
    llm = load(tiny_checkpoint, "none", dtype="float32")
    runtime = llm.target.runtime
    admitted, admit = [], runtime.admit
    runtime.admit = lambda *given: admitted.append(admit(*given)) or [*admitted[-1]]
    text = llm.generate([5] * 100, max_tokens=4).token_ids
    assert llm.generate([5] * 100, max_tokens=4).token_ids == text
    llm.reset_prefix_cache()
    assert llm.generate([5] * 100, max_tokens=4).token_ids == text
    assert admitted == [[0], [99], [0]]


def test_an_allocated_cache_is_not_checked_again(tiny_checkpoint, monkeypatch):
    llm = load(tiny_checkpoint, "none", dtype="float32")
    llm.generate([[5] * 100, [6]], max_tokens=2)
    monkeypatch.setattr(memory, "available_memory", lambda _: 0)
    llm.generate([[5] * 100, [6]], max_tokens=2)


def test_too_little_memory_for_both_models_is_reported_before_loading(
    ask, tiny_checkpoint, tiny_draft_checkpoint, monkeypatch
):
    def refuse_to_load(*_, **__):
        raise AssertionError("loaded, although there is no room")

    arguments = ["x", "--dtype", "float32", "--drafter", f"model:{tiny_draft_checkpoint}"]
    needs = [
        Checkpoint.resolve(path, dtype="float32").memory().total
        for path in (tiny_checkpoint, tiny_draft_checkpoint)
    ]
    monkeypatch.setattr("secondguess.api.load_model", refuse_to_load)
    monkeypatch.setattr("secondguess.checkpoint.memory.available_memory", lambda device: sum(needs) - 1)
    assert_refused(ask(*arguments), "weights", "cache", "available", "tiny-draft", "smaller model")
    monkeypatch.setattr("secondguess.checkpoint.memory.available_memory", lambda device: sum(needs))
    assert "loaded, although" in ask(*arguments).err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--no-history"], ["--share-history together with --no-history", "got --no-history alone"]),
        (["--drafter", "none", "--draft-length", 3], ["--draft-length 3", "got --drafter none"]),
        (["--drafter", "none", "--max-draft-length", 3], ["--max-draft-length 3", "got --drafter none"]),
    ],
)
def test_an_option_that_nothing_uses_is_refused(ask, monkeypatch, arguments, words):
    monkeypatch.setattr("secondguess.api.load", lambda **_: pytest.fail("loaded"))
    assert_refused(ask("x", *arguments), *words)


def test_draft_lengths_of_predictions_and_of_plain_decoding_need_no_drafter(ask):
    plain = ["x", "--drafter", "none", "--max-tokens", 2]
    assert ask(*plain, "--draft-length", 0).code == 0
    assert ask(*plain, "--draft-length", 3, "--prediction", __file__).code == 0


# the other verbs


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--samples", "-5"], ["--samples", "-5"]),
        (["verify", "--temperature", "nan"], ["temperature", "nan"]),
        (["verify", "--temperature", "-1"], ["temperature", "-1"]),
        (["verify", "--max-tokens", "0"], ["--max-tokens", "0"]),
        (["verify", "--max-tokens", "1000000"], ["--max-tokens", "context"]),
        (["verify", "--limit", "nan"], ["limit", "nan"]),
        (["verify", "--delta", "0"], ["delta", "0"]),
        (["verify", "--cells", "1"], ["--cells", "1"]),
        (["verify", "--batch-size", "0"], ["--batch-size", "0"]),
        (["verify", "--seed", "-1"], ["seed", "-1"]),
        (["verify", "--drafter", "oracle"], ["drafter", "oracle"]),
        (["verify", "--verifier", "judge"], ["verifier", "judge"]),
        (["verify", "--dtype", "float32"], ["--model", "--dtype"]),
        (["verify", "--prompt", "x"], ["--model", "--prompt"]),
        (["inspect", "nowhere/at-all"], ["nowhere/at-all"]),
        (["bench", "--num-prompts", "0"], ["--num-prompts", "0"]),
        (["bench", "--max-tokens", "-1"], ["--max-tokens", "-1"]),
        (["bench", "--temperature", "nan"], ["--temperature", "nan"]),
        (["bench", "--threads", "0"], ["--threads", "0"]),
        (["bench", "--threads", "100000000"], ["--threads", "1024"]),
        (["bench", "--draft-length", "0"], ["--draft-length", "0"]),
        (["bench", "--drafters", "all", "--draft-length", "4"], ["--controller fixed:K", "--draft-length 4"]),
        (["bench", "--drafter", "ngram", "--draft-length", "4"], ["--controller fixed:4", "got ngram"]),
        (["bench", "--seed", "-1"], ["seed", "-1"]),
        (["bench", "--against", "everyone"], ["against", "everyone"]),
        (["bench", "--prompts", "nowhere.jsonl"], ["nowhere.jsonl"]),
        (["bench", "--prompts", "spec-bench:nowhere.jsonl"], ["spec-bench:PATH", "nowhere.jsonl"]),
        (["bench", "--prompts", "builtin", "--prompts", "builtin"], ["prompts", "different"]),
        (["bench", "--prompts", "builtin", "--task", "cooking"], ["cooking", "builtin"]),
        (["bench", "--batch-size", "0"], ["--batch-size", "0"]),
        (["bench", "--batch-size", "8", "--against", "transformers"], ["batch_sizes", "8", "transformers"]),
        (["bench", "--controller", "guess:4", "--prompts", "builtin"], ["guess"]),
        (["bench", "nonsense"], ["nonsense"]),
        (["bench", "--name", "a/b"], ["name", "a/b"]),
        (["bench", "--output", __file__], ["--output", "folder"]),
        (["bench", "--plot", "nowhere.json"], ["nowhere.json"]),
        (["bench", "--plot", __file__, "--seed", "0"], ["--plot", "got --seed", "remove it"]),
    ],
    ids=lambda value: " ".join(value[:3]) if "/" not in value[-1] else None,
)
def test_bad_options_of_other_commands_are_refused(secondguess_command, arguments, words):
    assert_refused(secondguess_command(*arguments), *words)


# the rest


def test_an_internal_error_prints_one_line(ask, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("first\nsecond\x1b[31m")

    monkeypatch.setattr("secondguess.api.load", broken)
    done = ask("x")
    assert done.code == 70
    assert done.err == (
        "secondguess: internal error: RuntimeError: first second\\x1b[31m "
        "(SECONDGUESS_TRACEBACK=1 shows where)\n"
    )
    monkeypatch.setenv("SECONDGUESS_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        ask("x")


def test_the_installed_command_returns_the_exit_code():
    script = "from importlib.metadata import entry_points as e; import sys;" \
        "main, = e(group='console_scripts', name='secondguess'); sys.exit(main.load()())"  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script, "generate", ""], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == REFUSED + "expected a prompt with at least one character, got an empty one\n"
