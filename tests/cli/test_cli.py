"""Output of the command line as text and as JSON; every option has an effect or is refused."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from checkpoints import write_llama, write_tokenizer
from families import needs_kernels
from forked import start_command
from secondguess import __main__ as started
from secondguess import __version__
from secondguess.api import load
from secondguess.cli import main
from secondguess.configuration import LoadSettings
from secondguess.runtime.cpu.library import units
from secondguess.sampling import Grammar, SamplingParams
from secondguess.stats import Stats

DRAFTERS = ["none", "model", "ngram", "suffix"]
FIELDS = [
    "text",
    "index",
    "token_ids",
    "finish_reason",
    "exactness",
    "model",
    "drafter",
    "verifier",
    "controller",
    "dtype",
    "stats",
]
CLOSING_LINE = re.compile(
    r"[\d.]+ tokens/s, (?:acceptance rate \d+%|nothing drafted), [\d.]+ tokens per target pass\n$"
)


@pytest.fixture
def components(tiny_checkpoint):
    """Options that name a target with a drafter that needs no model, in full precision."""
    return ["--model", tiny_checkpoint, "--drafter", "suffix", "--dtype", "float32"]


def named(drafter: str, draft_model: Path) -> str:
    return f"model:{draft_model}" if drafter == "model" else drafter


def test_version_and_help_need_no_heavy_import():
    script = (
        "import sys; from secondguess.cli import main;"
        "codes = [main(['--version']), main(['generate', '--help'])];"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); sys.exit(f'{codes} {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stderr == "[0, 0] set()\n"
    assert done.stdout.startswith(f"secondguess {__version__}\n")
    assert "--prompt-file" in done.stdout


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("--version", 0),
        ("--version <&- >&- 2>&-", 0),
        ("chat nonsense 2>&-", 2),
        ("bench --help | true", 141),
    ],
)
def test_closed_streams_and_pipes_have_the_documented_exit_codes(command, code):
    script = f"{shlex.quote(sys.executable)} -m secondguess {command}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (code, "")


def test_json_is_one_object_with_every_documented_field(secondguess_command, components, tiny_checkpoint):
    done = secondguess_command("generate", "def quicksort", "--json", "--max-tokens", 12, *components)
    assert (done.code, done.err) == (0, "")
    (record,) = done.records
    assert list(record) == FIELDS
    assert list(record["stats"]) == list(Stats().as_dict())
    assert list(record["stats"]["seconds"]) == ["plan", "prefill", "draft", "score", "verify", "other"]
    assert record["stats"]["num_tokens"] == len(record["token_ids"]) == 12
    assert record["finish_reason"] == "length"
    assert record["exactness"] == "lossless"
    assert (record["dtype"], record["model"]) == ("float32", str(tiny_checkpoint))


def test_plain_decoding_has_no_acceptance(secondguess_command, components):
    plain = ["generate", "x = ", "--max-tokens", 4, *components, "--drafter", "none"]
    assert ", nothing drafted, 1.00 tokens per target pass" in secondguess_command(*plain).err
    assert secondguess_command(*plain, "--json").records[0]["stats"]["acceptance_rate"] is None


def test_text_and_logprobs_equal_those_of_the_api(secondguess_command, components, tiny_checkpoint):
    llm = load(str(tiny_checkpoint), "none", dtype="float32")
    expected = llm.generate("class Stack:", max_tokens=20, logprobs=2)
    arguments = ["generate", "class Stack:", "--json", "--max-tokens", 20, "--logprobs", 2, *components]
    (record,) = secondguess_command(*arguments).records
    assert (record["text"], record["token_ids"]) == (expected.text, expected.token_ids)
    for shown, own in zip(record["logprobs"], expected.logprobs, strict=True):
        assert (shown["token"], shown["text"]) == (own.token, own.text)
        texts = [alternative["text"] for alternative in shown["alternatives"]]
        assert texts == list(own.alternative_texts.values())
        # Greedy: the token is the first of its own alternatives.
        assert shown["alternatives"][0] == {name: shown[name] for name in ("token", "text", "logprob")}


def test_standard_input_is_a_prompt(secondguess_command, components):
    settings = ["--json", "--max-tokens", 8, *components]
    (typed,) = secondguess_command("generate", "naïve = ", *settings).records
    (piped,) = secondguess_command("generate", "-", *settings, stdin="naïve = ".encode()).records
    assert piped["token_ids"] == typed["token_ids"]


@pytest.mark.parametrize("sampling", [[], ["--temperature", 1, "--seed", 7]], ids=["greedy", "seeded"])
def test_every_drafter_generates_the_same_text(
    secondguess_command, tiny_checkpoint, tiny_draft_checkpoint, sampling
):
    texts = {}
    for drafter in DRAFTERS:
        models = ["--model", tiny_checkpoint, "--drafter", named(drafter, tiny_draft_checkpoint)]
        arguments = ["--json", "--max-tokens", 24, "--dtype", "float32", *sampling, *models]
        (record,) = secondguess_command("generate", "def f(", *arguments).records
        assert record["drafter"].startswith(drafter)
        texts[drafter] = tuple(record["token_ids"])
    assert set(texts.values()) == {texts["none"]}


def test_a_prompt_file_gives_the_same_output_in_batches(secondguess_command, components, tmp_path):
    lines = [
        {"prompt": "def f(x):"},
        {"prompt": "class A:\n", "metadata": {"task_id": "a/1", "tests": [1, None]}},
        {"prompt": "x", "max_tokens": 3},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    settings = ["--max-tokens", 9, "--temperature", 1, "--seed", 3, "--json", *components]
    alone = [secondguess_command("generate", line["prompt"], *settings).records[0] for line in lines]
    for size in (1, 2, 3):
        done = secondguess_command("generate", "--prompt-file", file, "--batch-size", size, *settings)
        ids = [record["token_ids"] for record in done.records]
        assert ids == [alone[0]["token_ids"], alone[1]["token_ids"], alone[2]["token_ids"][:3]]
        metadata = [record.get("metadata", "none") for record in done.records]
        assert metadata == ["none", {"task_id": "a/1", "tests": [1, None]}, "none"]


def test_settings_of_a_line_override_those_of_the_command(secondguess_command, components, tmp_path):
    file = tmp_path / "prompts.jsonl"
    banned = {"prompt": "x", "logit_bias": {str(token): -1e999 for token in range(299)}, "logprobs": 0}
    file.write_text(json.dumps(banned) + "\n" + json.dumps({"prompt": "x"}))
    first, second = secondguess_command(
        "generate", "--prompt-file", file, "--json", "--max-tokens", 4, *components
    ).records
    assert first["token_ids"] == [299] * 4
    assert [each["token"] for each in first["logprobs"]] == [299] * 4
    assert second["token_ids"] != [299] * 4
    assert "logprobs" not in second


def test_samples_of_a_prompt_follow_each_other(secondguess_command, components, tmp_path, tiny_checkpoint):
    import secondguess

    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "def f(", "n": 2, "metadata": "first"},
        {"prompt": "x"},
        {"prompt": "class ", "n": 1, "metadata": "last"},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = ["--n", 3, "--temperature", 1, "--seed", 5, "--max-tokens", 6, "--json", *components]
    records = secondguess_command("generate", "--prompt-file", file, "--batch-size", 2, *settings).records
    assert [record["index"] for record in records] == [0, 1, 0, 1, 2, 0]
    assert [record.get("metadata") for record in records] == ["first", "first", None, None, None, "last"]
    llm = secondguess.load(str(tiny_checkpoint), "none", dtype="float32")
    expected = llm.generate("x", n=3, temperature=1, seed=5, max_tokens=6)
    assert [record["token_ids"] for record in records[2:5]] == [output.token_ids for output in expected]


def test_the_text_output_shows_each_sample_with_its_prompt(secondguess_command, components):
    sampling = ["--n", "2", "--temperature", "1", "--seed", "5", "--max-tokens", "5"]
    arguments = ["generate", "def f(x):", *sampling, *components]
    first, second = (record["text"] for record in secondguess_command(*arguments, "--json").records)
    done = secondguess_command(*arguments)
    assert done.out == f"def f(x):{first}\n\ndef f(x):{second}\n"
    assert re.findall(r"\n(sample \d): [\d.]+ tokens/s", done.err) == ["sample 1", "sample 2"]


def test_the_text_output_reports_a_full_context(secondguess_command, components):
    arguments = ["generate", "-", "--max-tokens", 20, "--min-tokens", 20, *components]
    (record,) = secondguess_command(*arguments, "--json", stdin=b"z9" * 125).records
    assert record["finish_reason"] == "context"
    assert "\ncontext full: " in secondguess_command(*arguments, stdin=b"z9" * 125).err


OPTIONS = {
    "max_tokens": ("--max-tokens 7", 7),
    "min_tokens": ("--min-tokens 3", 3),
    "temperature": ("--temperature 0.5", 0.5),
    "top_k": ("--top-k 5", 5),
    "top_p": ("--top-p 0.9", 0.9),
    "min_p": ("--min-p 0.1", 0.1),
    "repetition_penalty": ("--repetition-penalty 1.2", 1.2),
    "frequency_penalty": ("--frequency-penalty -0.5", -0.5),
    "presence_penalty": ("--presence-penalty 0.5", 0.5),
    "logit_bias": ("--logit-bias 5=-inf --logit-bias 6=2", {5: float("-inf"), 6: 2.0}),
    "stop": ("--stop a --stop def", ("a", "def")),
    "include_stop_str_in_output": ("--include-stop", True),
    "stop_token_ids": ("--stop-token-id 5 --stop-token-id 6", (5, 6)),
    "ignore_eos": ("--ignore-eos", True),
    "n": ("--n 3", 3),
    "seed": ("--seed 9", 9),
    "logprobs": ("--logprobs 1", 1),
    "prompt_logprobs": ("--prompt-logprobs 1", 1),
    "grammar": ("--regex a+", Grammar.regex("a+")),
    "prediction": (f"--prediction {__file__}", Path(__file__).read_text(encoding="utf-8")),
    "draft_length": ("--draft-length 2", 2),
    "max_draft_length": ("--max-draft-length 3", 3),
    "draft_with": ("--draft-with ngram", "ngram"),
    "history": ("--share-history --no-history", False),
}


def test_every_sampling_setting_has_an_option_that_reaches_it(secondguess_command, monkeypatch):
    seen = []
    monkeypatch.setattr("secondguess.api.load", lambda *_, **__: None)
    monkeypatch.setattr(
        "secondguess.cli.generate.answer", lambda llm, requests, params, *_: seen.extend(params)
    )
    assert list(OPTIONS) == list(SamplingParams.__dataclass_fields__)
    arguments = " ".join(text for text, _ in OPTIONS.values()).split()
    assert secondguess_command("generate", "x", "--json", *arguments).code == 0
    assert secondguess_command("generate", "x").code == 0
    assert seen == [
        SamplingParams(**{name: value for name, (_, value) in OPTIONS.items()}),
        SamplingParams(),
    ]


def test_a_json_schema_is_read_from_a_file(secondguess_command, monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr("secondguess.api.load", lambda *_, **__: None)
    monkeypatch.setattr(
        "secondguess.cli.generate.answer", lambda llm, requests, params, *_: seen.extend(params)
    )
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}')
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "x"}\n{"prompt": "y", "grammar": {"regex": "b"}, "prediction": "bb"}\n')
    assert secondguess_command("generate", "--prompt-file", prompts, "--json-schema", file).code == 0
    assert [each.grammar for each in seen] == [Grammar.json_schema({"type": "integer"}), Grammar.regex("b")]
    assert [each.prediction for each in seen] == [None, "bb"]
    for wrong in (["--json-schema", file, "--regex", "a"], ["--prediction", tmp_path / "absent"]):
        assert secondguess_command("generate", "x", *wrong).code == 2


def test_every_model_option_reaches_load(secondguess_command, monkeypatch, tiny_checkpoint):
    seen = {}

    def load(model, drafter, **others):
        seen.update(model=model, drafter=drafter, **others)

    monkeypatch.setattr("secondguess.api.load", load)
    monkeypatch.setattr("secondguess.cli.generate.answer", lambda *_: 0)
    expected = {
        "model": str(tiny_checkpoint),
        "drafter": "ngram",
        "verifier": "block",
        "controller": "fixed:3",
        "dtype": "float64",
        "device": "cuda:7",
        "quantize": "int8",
        "drafter_quantize": "int8",
        "runtime": "fused",
    }
    assert {*expected, "share_history"} == LoadSettings.model_fields.keys()
    arguments = [part for name, value in expected.items() for part in (f"--{name.replace('_', '-')}", value)]
    assert secondguess_command("generate", "x", "--json", *arguments, "--share-history").code == 0
    assert seen == expected | {"share_history": True}


def test_the_text_output_is_the_text_and_statistics_go_to_standard_error(secondguess_command, components):
    arguments = ["generate", "def f(x):", "--max-tokens", 8, *components]
    (record,) = secondguess_command(*arguments, "--json").records
    done = secondguess_command(*arguments)
    assert done.out == "def f(x):" + record["text"] + "\n"
    assert CLOSING_LINE.search(done.err)
    assert "\x1b" not in done.out + done.err
    assert done.err.count("\n") == 3
    for picked in ("float32", "cpu", "drafter suffix, verifier auto, controller cost\n"):
        assert picked in done.err


def test_the_closing_line_names_the_quantisation(secondguess_command):
    done = secondguess_command("generate", "x", "--quantize", "int8", "--drafter", "none", "--max-tokens", 2)
    assert "builtin (bfloat16 on cpu, runtime native, weights in 8 bits)" in done.err or not units()


def test_the_text_output_shows_the_prompts_of_a_file_in_order(secondguess_command, components, tmp_path):
    prompts = ["def first(", "def second(", "def third("]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    arguments = ["generate", "--prompt-file", file, "--batch-size", 2, "--max-tokens", 5, *components]
    records = secondguess_command(*arguments, "--json").records
    assert secondguess_command(*arguments).out == "\n".join(
        f"{prompt}{record['text']}\n" for prompt, record in zip(prompts, records, strict=True)
    )


def test_a_terminal_shows_the_origin_of_each_token(secondguess_command, tiny_checkpoint, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    own_drafter = ["--model", tiny_checkpoint, "--drafter", f"model:{tiny_checkpoint}", "--dtype", "float32"]
    arguments = ["generate", "def f(x):", "--max-tokens", 20, "--controller", "fixed:3", *own_drafter]
    (record,) = secondguess_command(*arguments, "--json").records
    out = secondguess_command(*arguments).out
    legend, body = out.split("sampled from the target", 1)
    assert "drafted and accepted" in legend
    # A drafter that is never wrong writes three tokens of every four.
    green, blue = (re.findall(rf"\x1b\[{code}m([^\x1b]+)\x1b\[0m", body) for code in (32, 94))
    assert record["stats"]["num_accepted"] == 15
    assert green
    assert blue
    plain = re.sub(r"\x1b\[[\d;]*m", "", body)
    assert plain.strip().startswith("def f(x):")

    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in secondguess_command(*arguments).out


ESCAPING = "evil\x1b[2J\x07"


@pytest.mark.parametrize("variable", ["NO_COLOR", "NOTHING"])
def test_escape_sequences_of_the_model_are_neutralised(
    secondguess_command, components, monkeypatch, variable
):
    from transformers import AutoTokenizer

    (escape,) = AutoTokenizer.from_pretrained(components[1])("\x1b").input_ids
    arguments = ["generate", ESCAPING, "--logit-bias", f"{escape}=100", "--max-tokens", 3, *components]
    assert secondguess_command(*arguments).out.startswith(ESCAPING + "\x1b" * 3)

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv(variable, "1")
    coloured = secondguess_command(*arguments).out
    shown = re.sub(r"\x1b\[[\d;]*m", "", coloured)
    assert (coloured == shown) is (variable == "NO_COLOR")
    assert "evil\\x1b[2J\\x07" + "\\x1b" * 3 in shown
    assert "\x1b" not in shown


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_a_terminal_without_colours_is_distinguished_from_a_pipe(components, monkeypatch):
    import pty

    ours, theirs = pty.openpty()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("FORCE_COLOR", "")
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stdout", terminal)
        code = main(["generate", ESCAPING, "--max-tokens", "1", *map(str, components)])
    shown = read_terminal(ours)
    os.close(ours)
    assert code == 0
    assert shown.startswith(rb"evil\x1b[2J\x07")


def read_terminal(descriptor):
    """Everything until the other side hangs up, which Linux reports as an error."""
    content = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(descriptor, 1024):
            content += chunk
    return content


def test_an_interruption_keeps_the_generated_text(secondguess_command, components, monkeypatch):
    monkeypatch.setattr("secondguess.cli.output.JsonWriter.show", interrupt_after(3))
    arguments = ["generate", "def f(", "--max-tokens", 200, *components]
    done = secondguess_command(*arguments, "--json")
    assert (done.code, done.err) == (130, "secondguess: interrupted\n")
    (record,) = done.records
    assert record["finish_reason"] is None
    assert 3 <= len(record["token_ids"]) == record["stats"]["num_tokens"] < 200

    monkeypatch.undo()
    (whole,) = secondguess_command(*arguments, "--json").records
    assert whole["token_ids"][: len(record["token_ids"])] == record["token_ids"]
    assert record["text"]
    assert whole["text"].startswith(record["text"])


def interrupt_after(count):
    calls = []

    def show(writer, pieces):
        calls.append(pieces)
        if len(calls) == count:
            signal.raise_signal(signal.SIGINT)

    return show


def test_an_interrupted_batch_prints_every_prompt_of_the_batch(
    secondguess_command, components, tmp_path, monkeypatch
):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "max_tokens": 99}) + "\n" for prompt in "abcd"))
    monkeypatch.setattr("secondguess.cli.output.JsonWriter.show", interrupt_after(5))
    done = secondguess_command("generate", "--prompt-file", file, "--batch-size", 2, "--json", *components)
    assert done.code == 130
    assert [record["finish_reason"] for record in done.records] == [None, None]


@pytest.fixture(scope="module")
def endless_checkpoint(tmp_path_factory):
    """A tiny model with a context for a generation that does not end during a test."""
    return write_llama(tmp_path_factory.mktemp("endless"), seed=0, max_position_embeddings=1_000_000)


def test_ctrl_c_in_a_real_process(endless_checkpoint, tmp_path):
    settings = ["--drafter", "suffix", "--max-tokens", "900000", "--min-tokens", "900000"]
    reader, writer = os.pipe()
    errors = tmp_path / "errors"
    with errors.open("wb") as stream:
        process = start_command(
            ["generate", "def f(x):", "--model", endless_checkpoint, *settings],
            [None, writer, stream.fileno()],
        )
    os.close(writer)
    with open(reader, "rb") as output:
        seen = output.read(40)
        os.kill(process.pid, signal.SIGINT)
        text = (seen + output.read()).decode()
    process.join(60)
    assert process.exitcode == 130, errors.read_text()
    assert text.startswith("def f(x):")
    about, empty, figures, interrupted = errors.read_text().splitlines()  # and nothing from loading
    assert about.startswith(f"{endless_checkpoint} (")
    assert re.match(r"interrupted: [\d.]+ tokens/s, ", figures)
    assert (empty, interrupted) == ("", "secondguess: interrupted")


def in_a_finalizer():
    class Interrupted:
        def __del__(self):
            raise KeyboardInterrupt

    Interrupted()
    for _ in range(500):  # a sleep is not cut short by an interruption of its own process
        time.sleep(0.01)


def in_an_import():
    raise RuntimeError("failed to import") from KeyboardInterrupt()


@pytest.mark.parametrize("interrupt", [in_a_finalizer, in_an_import])
def test_ctrl_c_that_arrives_in_a_finalizer_or_an_import_is_not_lost(monkeypatch, capsys, interrupt):
    monkeypatch.setattr("secondguess.cli._run", lambda arguments: interrupt())
    # Nothing is interrupted where a caller, such as an earlier test, ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert main([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "secondguess: interrupted\n"


def test_ctrl_c_while_the_commands_are_imported_is_one_line(monkeypatch, capsys):
    class Importing(ModuleType):
        def __getattr__(self, name):
            raise KeyboardInterrupt

    monkeypatch.setitem(sys.modules, "secondguess.cli", Importing("secondguess.cli"))
    assert started.main() == 130
    assert capsys.readouterr().err == "secondguess: interrupted\n"


def test_an_error_after_ctrl_c_was_handled_is_an_error(monkeypatch, capsys):
    def fail(arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise RuntimeError("a bug") from None

    monkeypatch.setattr("secondguess.cli._run", fail)
    assert main([]) == 70
    assert "a bug" in capsys.readouterr().err


def test_a_closed_pipe_is_not_an_error(endless_checkpoint, monkeypatch, capfd):
    reader, writer = os.pipe()

    def read_and_leave():
        os.read(reader, 9)
        os.close(reader)

    neighbour = threading.Thread(target=read_and_leave)
    neighbour.start()
    settings = ["--drafter", "suffix", "--max-tokens", "900000"]
    with open(writer, "w") as stream:  # closed at the end, as a process does
        monkeypatch.setattr(sys, "stdout", stream)
        code = main(["generate", "def f(x):", "--model", str(endless_checkpoint), *settings])
        neighbour.join()
    assert code == 141
    assert "rror" not in capfd.readouterr().err


def test_verify_prints_a_certificate(secondguess_command, monkeypatch):
    options = [
        "--samples",
        "2000",
        "--max-tokens",
        "2",
        "--cells",
        "9",
        "--verifier",
        "block",
        "--controller",
        "fixed:1",
    ]
    passing = secondguess_command("verify", "--limit", 0.5, *options)
    assert (passing.code, passing.err) == (0, "")
    for words in ("block", "fixed:1", "2,000", "total variation", "G-test", "PASSED"):
        assert words in passing.out
    failing = secondguess_command("verify", "--limit", 0.0588, "--json", *options)
    assert failing.code == 1
    (record,) = failing.records
    assert record["passed"] is False
    assert record["bound"] > record["limit"] == 0.0588
    assert (record["num_samples"], record["num_tokens"], record["temperature"]) == (2000, 2, 1.0)


def test_verify_without_drafts_is_inconclusive(secondguess_command, tiny_checkpoint):
    options = ["--samples", 1000, "--max-tokens", 2, "--prompt", "x", "--limit", 0.9]
    done = secondguess_command("verify", "--model", tiny_checkpoint, "--drafter", "suffix", *options)
    assert done.code == 1
    assert "INCONCLUSIVE: suffix" in done.out


VERIFY = ["verify", "--samples", 1000, "--max-tokens", 3, "--prompt", "x", "--limit", 0.9, "--json"]


@needs_kernels
@pytest.mark.parametrize("drafter", [(), ("--drafter", "suffix+self:int4")])
def test_verify_drafts_with_a_copy_of_the_target(secondguess_command, tiny_checkpoint, drafter):
    done = secondguess_command(*VERIFY, "--model", tiny_checkpoint, *drafter)
    (record,) = done.records
    assert done.code == 0
    assert record["is_conclusive"]
    assert "self:int4" in record["drafter"]
    assert record["runtime"] == "TransformersRuntime"


@needs_kernels
@pytest.mark.parametrize(
    ("options", "runtime"),
    [
        (("--model", "builtin"), "FusedRuntime"),
        (("--model", "builtin", "--dtype", "bfloat16"), "NativeRuntime"),
        (
            ("--model", "builtin", "--dtype", "bfloat16", "--drafter", "early-exit:2+self:int4"),
            "NativeRuntime",
        ),
    ],
)
def test_verify_uses_the_runtime_of_generate_where_that_drafts(secondguess_command, options, runtime):
    (record,) = secondguess_command(*VERIFY, *options).records
    assert record["is_conclusive"]
    assert record["runtime"] == runtime


@needs_kernels
@pytest.mark.parametrize("drafter", ["suffix+self:int4", "model:builtin-draft"])
def test_verify_refuses_rounded_weights(secondguess_command, tmp_path, drafter):
    config = tmp_path / "rounded.toml"
    config.write_text(f'schema = 1\n[load]\nmodel = "builtin"\ndrafter = "{drafter}"\nquantize = "int8"\n')
    done = secondguess_command(*VERIFY, "--config", config)
    assert done.code == 2
    assert "quantize" in done.err


def test_verify_refuses_samples_with_which_nothing_can_pass(secondguess_command):
    done = secondguess_command("verify", "--samples", 2000)
    assert done.code == 2
    assert "expected at least 69,078 samples for a limit of 0.01" in done.err


def test_verify_tests_the_named_model(secondguess_command, tiny_checkpoint):
    options = ["--samples", 1000, "--max-tokens", 2, "--limit", 0.9, "--prompt", "x", "--temperature", 0.7]
    (record,) = secondguess_command(
        "verify", "--model", tiny_checkpoint, "--drafter", "ngram", "--dtype", "float32", "--json", *options
    ).records
    assert (record["model"], record["temperature"]) == (str(tiny_checkpoint), 0.7)
    assert record["drafter"].startswith("ngram")
    assert record["p_value"] > 1e-6


def test_inspect_describes_a_model_without_loading_it(secondguess_command, tiny_checkpoint):
    done = secondguess_command("inspect", tiny_checkpoint, "--dtype", "float32")
    assert (done.code, done.err) == (0, "")
    for words in (
        "LlamaForCausalLM",
        "2 layers",
        "300",
        "256 tokens",
        "float32 on cpu",
        "2 x full attention",
    ):
        assert words in done.out
    (record,) = secondguess_command("inspect", tiny_checkpoint, "--json", "--dtype", "float32").records
    num_parameters = 2 * 300 * 32 + 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32) + 32
    assert record["num_parameters"] == num_parameters
    assert record["weights_bytes"] == 4 * num_parameters
    # Keys and values of 2 layers, 2 heads of 8 numbers, 256 positions.
    assert record["cache_bytes"] == 4 * 2 * 2 * 2 * 8 * 256
    assert record["supported"] is True
    assert record["drafters"][0] == "suffix"
    assert {"none", "model:PATH", "ngram", "suffix", "eagle:PATH"} <= set(record["drafters"])
    assert "eagle" not in record["drafters"]  # none is shipped for this target
    assert "self:int4" not in record["drafters"]  # the kernels compute in bfloat16


def test_inspect_lists_a_copy_of_the_target_only_if_it_can_be_made(secondguess_command):
    (record,) = secondguess_command("inspect", "builtin", "--dtype", "bfloat16", "--json").records
    (quantised,) = secondguess_command("inspect", "builtin", "--quantize", "int8", "--json").records
    assert "self:int4" not in quantised["drafters"]
    assert {*record["drafters"]} - {*quantised["drafters"]} == ({"self:int4"} if units() else set())


def test_inspect_distinguishes_sliding_and_full_layers(secondguess_command, tmp_path):
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        sliding_window=32,
        max_position_embeddings=64,
    )
    Gemma3ForCausalLM(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    (record,) = secondguess_command("inspect", tmp_path, "--json").records
    assert record["attention"] == {"sliding_attention": 5, "full_attention": 1}
    assert record["sliding_window"] == 32


def test_bench_uses_its_options_and_saves_the_report(
    secondguess_command, tmp_path, monkeypatch, tiny_checkpoint
):
    from secondguess.bench.config import BenchConfig

    seen = []

    def run_bench(config, progress):
        seen.append(config)
        progress(1, 2, "half")
        return SimpleNamespace(complete=False)

    def save_report(report, folder):
        assert folder == tmp_path
        return [folder / "a.json", folder / "a.md"]

    monkeypatch.setattr("secondguess.bench.harness.run_bench", run_bench)
    monkeypatch.setattr("secondguess.bench.writing.as_markdown", lambda _: "# table\n")
    monkeypatch.setattr("secondguess.bench.writing.save_report", save_report)
    plain = secondguess_command("bench", "--output", tmp_path)
    # Interrupted, and yet saved.
    assert (plain.code, plain.out) == (130, "# table\n")
    assert f"saved {tmp_path / 'a.json'}, {tmp_path / 'a.md'}" in plain.err
    assert seen.pop() == BenchConfig()

    options = {
        "--against": ("against", ("transformers",)),
        "--prompts": ("prompts", ("builtin", "gsm8k")),
        "--num-prompts": ("num_prompts", 3),
        "--max-tokens": ("num_tokens", 5),
        "--temperature": ("temperatures", (0.5, 2.0)),
        "--draft-length": ("draft_lengths", (1, 2)),
        "--seed": ("seed", 4),
        "--model": ("model", str(tiny_checkpoint)),
        "--drafter": ("drafters", ("model:builtin-draft",)),
        "--dtype": ("dtype", "float32"),
        "--device": ("device", "cuda"),
        "--threads": ("num_threads", 1),
        "--name": ("name", "n"),
        "--task": ("tasks", ("qa", "rag")),
        "--controller": ("controllers", ("fixed:2", "confidence")),
        "--batch-size": ("batch_sizes", (1, 8)),
    }
    arguments = [
        part
        for option, (_, value) in options.items()
        for own in (value if isinstance(value, tuple) else (value,))
        for part in (option, own)
    ]
    secondguess_command("bench", "--output", tmp_path, *arguments)
    assert seen == [BenchConfig(**dict(options.values()))]


def test_bench_checks_its_folder_before_measuring(secondguess_command, tmp_path, monkeypatch):
    monkeypatch.setattr("secondguess.bench.harness.run_bench", lambda *_: pytest.fail("measured"))
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "folder"):
        done = secondguess_command("bench", "--output", output)
        assert (done.code, done.out) == (2, "")
        assert "expected a folder for --output" in done.err
        assert len(done.err.splitlines()) == 1


def test_a_benchmark_that_cannot_be_saved_is_still_printed(secondguess_command, tmp_path, monkeypatch):
    def save_report(*_):
        raise OSError("no space left")

    monkeypatch.setattr("secondguess.bench.harness.run_bench", lambda *_: None)
    monkeypatch.setattr("secondguess.bench.writing.as_markdown", lambda _: "# table\n")
    monkeypatch.setattr("secondguess.bench.writing.save_report", save_report)
    done = secondguess_command("bench", "--output", tmp_path)
    assert (done.code, done.out) == (2, "# table\n")
    assert "no space left" in done.err


def test_training_checks_its_folder_before_it_starts(secondguess_command, tmp_path, monkeypatch):
    monkeypatch.setattr("secondguess.train.head_training.train_head", lambda *_: pytest.fail("trained"))
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "folder"
    done = secondguess_command("train", "eagle", "--out", inside)
    assert done.code == 2
    assert "expected a folder for --out that can be written to" in done.err

    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("secondguess.files.TemporaryFile", refuse)
    done = secondguess_command("train", "eagle", "--out", tmp_path / "eagle")
    assert done.code == 2
    assert "expected a folder for --out that can be written to" in done.err


@pytest.mark.parametrize("draft_length", [None, "0"])
def test_score_compares_formats_of_weights(secondguess_command, tmp_path, draft_length):
    text = "def add(a, b):\n    return a + b\n"
    (tmp_path / "text.py").write_text(text)
    options = [] if draft_length is None else ["--draft-length", draft_length]
    arguments = [tmp_path / "text.py", "-", "--window", 9, "--compare", "int8", "--json", *options]
    done = secondguess_command("score", *arguments, stdin=text.encode())
    assert done.code == 0, done.err
    plain, again, quantised, _ = json.loads(done.out)
    assert (plain["text"], again["text"], again["logprob"]) == (
        str(tmp_path / "text.py"),
        "-",
        plain["logprob"],
    )
    llm = load(drafter="none")
    score = llm.score(text, window=9)
    assert plain["num_tokens"] == quantised["num_tokens"] == len(score.logprobs)
    assert plain["logprob"] == pytest.approx(score.logprob, abs=0.05)
    assert plain["perplexity"] == pytest.approx(score.perplexity, rel=0.01)
    assert plain["bits_per_byte"] == pytest.approx(-score.logprob / math.log(2) / len(text), rel=0.01)
    assert plain["mean_change"] == 0 < quantised["mean_change"] < 0.5
    assert plain["runtime"] != quantised["runtime"]
    table = secondguess_command("score", str(tmp_path / "text.py"), "--window", "9")
    _, figures = table.out.splitlines()
    assert float(figures.split()[3]) == pytest.approx(score.perplexity, rel=0.01)


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (b"", [], "got nothing"),
        (b"\xff", [], "UTF-8"),
        (b"x = 1", ["--window", "1"], "window of at least 2"),
        (b"x", [], "text: expected a text of at least 2 tokens"),
    ],
)
def test_what_cannot_be_scored_is_one_error(secondguess_command, tmp_path, content, arguments, words):
    (tmp_path / "text").write_bytes(content)
    done = secondguess_command("score", str(tmp_path / "text"), *arguments)
    assert done.code == 2
    assert words in done.err
