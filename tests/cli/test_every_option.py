"""Every option of every command is on one of the command lines below, all of which run.

The effect of each option is tested with its command. Training and serving are replaced: their
options have to reach the function that would train or serve.
"""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace

import pytest
import typer
from PIL import Image

from secondguess.cli import app

MODELS = "--model {target} --drafter model:{draft} --dtype float32 --device cpu"
LOADING = f"{MODELS} --config {{config}} --verifier block --controller fixed:2 --runtime auto"
INT8 = "--quantize int8 --drafter-quantize int8 --dtype float32 --device cpu"
SAMPLING = (
    "--temperature 1 --top-k 50 --top-p 0.9 --min-p 0.01 --repetition-penalty 1.1 --stop zz --draft-length 2"
)
TRAINING = (
    "--out {folder}/head --model {target} --data {texts} --num-prompts 2 --length 32 --capture-gb 0 --loss kl "
    "--minutes 1 --steps 1 --set batch_size=2 --evaluate-steps 1 --patience 1 --seed 1 --dtype float32 --device cpu"
)
ANSWERS = "--max-tokens 4 --temperature 0 --answer-batch 2"
KINDS = ("draft", "early-exit", "medusa", "mtp", "eagle", "dspark")
SYSTEMS = (
    "--prompts {texts} --num-prompts 2 --max-tokens 4 --batch-size 1 --seed 1 --dtype float32 --device cpu --threads 1 "
    "--json --drafter ngram --output {folder} --temperature 0"
)

LINES = [
    "--version",
    f"generate x --json --max-tokens 4 --min-tokens 1 {LOADING} {SAMPLING} --frequency-penalty 0.1 --presence-penalty 0.1 "
    "--logit-bias 5=-1 --stop-token-id 7 --include-stop --ignore-eos --n 2 --logprobs 1 --prompt-logprobs 1 --max-draft-length 3",
    "generate x --image {image} --model {vision} --max-tokens 4 --dtype float32",
    f"generate --prompt-file {{texts}} --batch-size 2 --seed 1 --max-tokens 4 --prediction {{texts}} --draft-with ngram {MODELS}",
    f"generate x --regex a+ --max-tokens 4 --download org/model {INT8}",
    "generate x --share-history --history --no-history --max-tokens 4 --model {target} --drafter suffix",
    f"generate x --json-schema {{schema}} --max-tokens 4 {MODELS}",
    f"chat --system be-brief --chat-template {{template}} --json --max-tokens 4 --seed 1 {LOADING} {SAMPLING}",
    f"chat --max-tokens 4 --download org/model {INT8}",
    "serve --host 127.0.0.1 --port 0 --api-key-file {keys} --served-model-name mine --chat-template {template} "
    "--cors-origin http://localhost --image-folder {folder} --drain-seconds 1 --sleep-idle 60 --max-body-bytes 1000 "
    f"--max-waiting 2 --max-samples 2 --max-output-tokens 9 --request-seconds 9 {LOADING}",
    f"serve --port 0 --generation-config --no-generation-config {INT8} --share-history --download org/model",
    "score {texts} --window 8 --draft-length 2 --config {config} --model {target} --dtype float32 --device cpu --quantize int8 "
    "--compare int8 --runtime auto --json",
    f"verify {MODELS} --config {{config}} --verifier block --controller fixed:1 --prompt x --temperature 1 --samples 1000 "
    "--max-tokens 2 --cells 3 --limit 0.9 --delta 0.01 --batch-size 200 --seed 1 --json",
    "inspect {target} --config {config} --drafter model:{draft} --dtype float32 --device cpu --quantize int8 "
    "--drafter-quantize int8 --rows 2 --context 64 --json",
    f"bench --model {{target}} {SYSTEMS} --drafter model:{{draft}} --against transformers --task texts --draft-length 2 "
    "--controller fixed:1 --name mine",
    "bench --plot {texts} --output {folder}",
    f"tune {{target}} {SYSTEMS} --minutes 0.01 --config-out {{folder}}/tuned.toml",
    "export --to vllm --json --config {config} --model {target} --drafter model:{draft} --draft-length 3 --dtype float32 "
    "--quantize int8 --drafter-quantize int8",
    *(f"train {kind} {TRAINING} {ANSWERS}" for kind in KINDS),
    *(f"train {kind} {TRAINING} --as-is" for kind in KINDS),
    *(f"train {kind} {TRAINING} --as-is --authors-layout" for kind in ("eagle", "dspark")),
    "train layer-skip --out {folder}/skip --model {target} --data {texts} --num-prompts 2 --max-tokens 4 --length 32 "
    "--temperature 0 --seed 1 --dtype float32 --device cpu",
]


@pytest.fixture
def places(tmp_path, tiny_checkpoint, tiny_draft_checkpoint, llava_checkpoint):
    """Files that the command lines name."""
    contents = {
        "texts": '{"prompt": "def f(x):"}\n{"prompt": "class A:"}\n',
        "schema": '{"type": "integer"}',
        "template": "{% for message in messages %}{{ message.content }}{% endfor %}",
        "keys": "secret\n",
        "config": f"schema = 1\n[load]\nmodel = {json.dumps(str(tiny_checkpoint))}\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "folder").mkdir()
    Image.new("RGB", (20, 16)).save(tmp_path / "image", "PNG")
    paths = {name: tmp_path / name for name in (*contents, "folder", "image")}
    return paths | {"target": tiny_checkpoint, "draft": tiny_draft_checkpoint, "vision": llava_checkpoint}


@pytest.fixture
def reached(monkeypatch):
    """Names of the functions that were called in place of training and serving."""
    seen = []

    def replace(path, result):
        monkeypatch.setattr(path, lambda *_, **__: seen.append(path.rpartition(".")[2]) or result)

    replace("secondguess.server.run.serve_until_signal", None)
    replace("secondguess.train.head_training.train_head", SimpleNamespace(figures={}))
    found = SimpleNamespace(skipped=[1], acceptance=0.5, cost_ratio=0.5, speedup=1.0)
    replace("secondguess.train.skip_search.search_layers", found)
    monkeypatch.setattr("secondguess.checkpoint.resolve.download", lambda name: None)
    monkeypatch.setattr("secondguess.bench.plots.draw", lambda result, folder: [folder / "a.png"])
    return seen


@pytest.mark.parametrize("line", LINES, ids=lambda line: " ".join(line.split()[:2]))
def test_the_command_line_runs(secondguess_command, places, reached, line):
    done = secondguess_command(*shlex.split(line.format(**places)), stdin=b"hello\n")
    assert done.code == 0, done.err
    assert bool(reached) == line.startswith(("train", "serve"))


def options_of(command, path=()):
    """Yield the path of every command below, with the names of each of its options."""
    for parameter in command.params:
        if parameter.opts[0].startswith("-") and not parameter.hidden and "--help" not in parameter.opts:
            yield path, frozenset(parameter.opts)
    for name, below in getattr(command, "commands", {}).items():
        yield from options_of(below, (*path, name))


def test_every_option_is_on_a_command_line():
    given = [line.split() for line in LINES]
    missing = [
        (*path, sorted(names))
        for path, names in options_of(typer.main.get_command(app))
        if not any(tuple(words[: len(path)]) == path and names & set(words) for words in given)
    ]
    assert not missing
