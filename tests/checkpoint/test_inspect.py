"""`inspect`: compatibility of target and drafter, and memory, before weights are loaded."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import write_llama
from families import FAMILIES, needs_kernels, write_checkpoint
from secondguess import load
from secondguess.builtin import head_path
from secondguess.checkpoint.description import compatibility_notes, describe, plan_memory
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.memory import check_memory
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.verdicts import Verdict, read_verdict, verdict_file, write_verdict
from secondguess.checkpoint.weight_files import count_parameters
from secondguess.configuration import Configuration, LoadSettings, TuningRecord
from secondguess.core import Row
from secondguess.errors import BadInputError, OutOfMemoryError, SecondGuessError
from secondguess.heads.skip import write_skipped
from secondguess.sampling import SamplingParams

FLOAT32 = ["--dtype", "float32", "--device", "cpu"]


@pytest.fixture
def inspected(secondguess_command, monkeypatch):
    """Return the output of `inspect --json`; reading any weights fails."""

    def refuse(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr("secondguess.checkpoint.loader.module_of", refuse)

    def run(*arguments):
        done = secondguess_command("inspect", *arguments, *FLOAT32, "--json")
        assert (done.code, done.err) == (0, "")
        (record,) = done.records
        return record

    return run


@pytest.fixture(scope="module")
def short_drafter(tmp_path_factory):
    """A draft model with half the target's context."""
    return write_llama(
        tmp_path_factory.mktemp("short"), seed=3, hidden_size=16, num_hidden_layers=1, max_position_embeddings=128
    )  # fmt: skip


def test_the_default_drafter_of_load_is_described(inspected, tiny_checkpoint):
    record = inspected(tiny_checkpoint, "--dtype", "float32")
    assert record["drafter"] == {
        "name": "suffix",
        "model": None,
        "vocabulary": None,
        "remarks": [],
    }
    assert record["memory"]["drafter"] is None
    pair = inspected("builtin")
    assert pair["drafter"]["name"] == "suffix+model:builtin-draft"
    assert pair["drafter"]["model"]["num_parameters"] < pair["num_parameters"]


def test_a_draft_model_is_described_and_counted(inspected, tiny_checkpoint, tiny_draft_checkpoint):
    record = inspected(tiny_checkpoint, "--drafter", f"model:{tiny_draft_checkpoint}")
    drafter = describe(Checkpoint.resolve(tiny_draft_checkpoint, dtype="float32", device="cpu", drafts=True))
    assert record["drafter"]["model"] | {"available_bytes": 0} == dataclasses.asdict(drafter) | {
        "available_bytes": 0
    }
    memory = record["memory"]
    parts = [memory["target"], memory["drafter"]]
    assert memory["target"] == {
        "weights_bytes": record["weights_bytes"],
        "cache_bytes": record["cache_bytes"],
    }
    assert memory["total_bytes"] == sum(sum(part.values()) for part in parts)
    assert memory["fits"] is True


def with_module(source: Path, folder: Path, *names: str) -> Path:
    """Return a copy of a checkpoint with tensors of a multi-token-prediction module."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    number = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    tensors |= {f"model.layers.{number}.{name}.weight": torch.ones(1) for name in ("eh_proj", *names)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_module_of_a_targets_checkpoint_is_listed_without_a_path(inspected, tiny_checkpoint, tmp_path):
    assert "mtp:PATH" in inspected(tiny_checkpoint)["drafters"]
    found = inspected(with_module(tiny_checkpoint, tmp_path / "with"), "--drafter", "mtp")["drafters"]
    assert [name for name in found if name.startswith("mtp")] == ["mtp"]


def test_a_module_of_another_kind_of_layer_is_refused_before_weights_are_read(
    inspected, secondguess_command, tiny_checkpoint, tmp_path
):
    folder = with_module(tiny_checkpoint, tmp_path / "with", "self_attn.kv_a_proj_with_mqa")
    found = inspected(folder)["drafters"]
    assert [name for name in found if name.startswith("mtp")] == ["mtp:PATH"]
    done = secondguess_command("inspect", folder, "--drafter", "mtp", *FLOAT32)
    assert done.code == 2
    assert "latent attention (MLA), which is not supported" in done.err


def test_weights_of_a_smaller_model_than_the_configuration_describes_are_refused(
    secondguess_command, tiny_checkpoint, tmp_path
):
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "copied")
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 16
    (folder / "config.json").write_text(json.dumps(config))
    done = secondguess_command("inspect", folder, *FLOAT32)
    assert done.code == 2
    assert "mlp.gate_proj.weight of shape (64, 32), not (80, 32), as the configuration says" in done.err
    # Of weights in the older format, next to which there may be an adapter, nothing is known.
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(bytes(100))
    assert secondguess_command("inspect", folder, *FLOAT32).code == 0
    for left in folder.glob("*model*"):
        left.unlink()
    done = secondguess_command("inspect", folder, *FLOAT32)
    assert done.code == 2, done.out
    assert "got none" in done.err


@pytest.mark.parametrize(("rows", "context"), [(1, 7), (3, 200), (4, 256), (5, 100)])
def test_caches_are_counted_as_they_are_allocated(inspected, tiny_checkpoint, monkeypatch, rows, context):
    planned = inspected(tiny_checkpoint, "--rows", rows, "--context", context)["memory"]
    assert (planned["rows"], planned["context"]) == (rows, context)
    monkeypatch.undo()
    runtime = load(str(tiny_checkpoint), "none", dtype="float32", device="cpu").target.runtime
    runtime.begin([Row([5] * context, SamplingParams()) for _ in range(rows)])
    blocks = [*runtime.cache.keys, *runtime.cache.values]
    assert sum(block.nbytes for block in blocks) == planned["target"]["cache_bytes"]


def test_fits_agrees_with_the_check_of_load(tiny_checkpoint, tiny_draft_checkpoint, monkeypatch):
    pair = [Checkpoint.resolve(path, dtype="float32") for path in (tiny_checkpoint, tiny_draft_checkpoint)]
    total = plan_memory(*pair, rows=2, context=100).total_bytes
    for missing in (0, 1):
        for module in ("description", "memory"):
            monkeypatch.setattr(
                f"secondguess.checkpoint.{module}.available_memory", lambda _, enough=total - missing: enough
            )
        plan = plan_memory(*pair, rows=2, context=100)
        assert plan.missing_bytes == missing
        assert plan.as_dict()["fits"] is (missing == 0)
        refusal = pytest.raises(OutOfMemoryError) if missing else contextlib.nullcontext()
        with refusal:
            check_memory(plan.needs.values(), pair[0].device)


@pytest.mark.parametrize(
    ("available", "words"),
    [(10**12, "fits into the"), (1000, "does not fit"), (None, "is unknown")],
)
def test_the_text_output_states_whether_it_fits(
    secondguess_command, tiny_checkpoint, monkeypatch, available, words
):
    monkeypatch.setattr("secondguess.checkpoint.description.available_memory", lambda _: available)
    done = secondguess_command("inspect", tiny_checkpoint, "--rows", 2, "--context", 100, *FLOAT32)
    assert done.code == 0
    assert "2 sequences of 100 tokens" in done.out
    assert words in done.out


def test_int8_memory_is_reported_and_counted_if_chosen(inspected, secondguess_command, tiny_checkpoint):
    own = f"model:{tiny_checkpoint}"
    before = inspected(tiny_checkpoint, "--drafter", own)
    after = inspected(tiny_checkpoint, "--drafter", own, "--quantize", "int8", "--drafter-quantize", "int8")
    for who in ("target", "drafter"):
        promised = before["memory"]["int8_weights_bytes"][who]
        assert promised < before["memory"][who]["weights_bytes"]
        assert after["memory"][who]["weights_bytes"] == promised
    assert after["weights_bytes"] == before["memory"]["int8_weights_bytes"]["target"]
    said = secondguess_command("inspect", tiny_checkpoint, *FLOAT32).out
    assert "of weights instead of" in said
    assert (
        "instead of"
        not in secondguess_command("inspect", tiny_checkpoint, *FLOAT32, "--quantize", "int8").out
    )


@pytest.mark.parametrize("there", [True, False])
def test_the_library_for_int8_is_reported(
    inspected, secondguess_command, tiny_checkpoint, monkeypatch, there
):
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao") if there else None)
    monkeypatch.setattr("secondguess.checkpoint.plan.can_quantise", lambda device: False)
    assert bool(inspected(tiny_checkpoint)["memory"]["int8_obstacle"]) is not there
    said = secondguess_command("inspect", tiny_checkpoint, *FLOAT32).out
    assert ("pip install secondguess[quant]" in said) is not there


def test_compatible_differences_are_remarks(
    inspected, secondguess_command, tiny_checkpoint, short_drafter, tmp_path
):
    (remark,) = inspected(tiny_checkpoint, "--drafter", f"model:{short_drafter}")["drafter"]["remarks"]
    assert "beyond the draft model's context of 128 tokens" in remark
    assert (
        remark in secondguess_command("inspect", tiny_checkpoint, "--drafter", f"model:{short_drafter}").out
    )
    target = describe(Checkpoint.resolve(tiny_checkpoint))
    wider, larger = compatibility_notes(target, dataclasses.replace(target, vocab_size=320))
    assert "320 and 300" in wider
    assert "not smaller" in larger


def test_rows_beyond_the_context_of_the_draft_model_are_not_counted_for_it(
    inspected, tiny_draft_checkpoint, tmp_path
):
    # Caches start with 256 positions, so that only longer contexts differ.
    target = write_llama(tmp_path / "long", seed=0, max_position_embeddings=1024)
    drafter = ["--drafter", f"model:{tiny_draft_checkpoint}"]
    whole, quarter = (inspected(target, *drafter, "--context", size)["memory"] for size in (1024, 256))
    assert whole["target"]["cache_bytes"] == 4 * quarter["target"]["cache_bytes"]
    assert whole["drafter"] == quarter["drafter"]


@pytest.mark.parametrize("what", ["tokenizer", "layers"])
def test_an_incompatible_drafter_is_refused_before_weights_are_read(
    secondguess_command, tiny_checkpoint, tmp_path, monkeypatch, what
):
    monkeypatch.setattr("secondguess.checkpoint.loader.module_of", lambda _: pytest.fail("weights were read"))
    if what == "tokenizer":
        drafter = f"model:{write_llama(tmp_path, seed=2, vocab_size=280)}"
        file = tmp_path / "tokenizer.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"decoder": None}))
        expected = ["tokenizers that can be compared", "the decoder none", str(tmp_path)]
    else:
        write_skipped(tmp_path, [1, 99], {})
        drafter, expected = f"layer-skip:{tmp_path}", ["layers 0 to 1", "100 layers"]
    done = secondguess_command("inspect", tiny_checkpoint, "--drafter", drafter)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    with pytest.raises(SecondGuessError) as refused:
        load(tiny_checkpoint, drafter)
    for words in expected:
        assert words in done.err
        assert words in str(refused.value)


def test_a_drafter_that_cannot_draft_is_refused(secondguess_command, tiny_checkpoint, tmp_path):
    from transformers import RwkvConfig, RwkvForCausalLM

    config = RwkvConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2)
    RwkvForCausalLM(config).save_pretrained(tmp_path / "rwkv")
    for file in tiny_checkpoint.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "rwkv")
    done = secondguess_command("inspect", tiny_checkpoint, "--drafter", f"model:{tmp_path / 'rwkv'}")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "takes no KV cache" in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "0"], ["rows", "0"]),
        (["--rows", "-3"], ["rows", "-3"]),
        (["--rows", "9" * 30], ["rows", "100000"]),
        (["--rows", "many"], ["--rows"]),
        (["--context", "0"], ["context", "0"]),
        (["--context", "257"], ["context", "256", "257"]),
        (["--context", "9" * 30], ["context", "256"]),
        (["--drafter", "oracle"], ["drafter", "oracle"]),
        (["--drafter", "model"], ["path of a draft model"]),
        (["--drafter", "model:nowhere/at-all"], ["nowhere/at-all"]),
        (["--drafter", "ngram,max=99"], ["max", "99"]),
        (["--drafter", "ngram", "--drafter-quantize", "int8"], ["drafter_quantize", "ngram"]),
        (["--quantize", "int1"], ["quantize", "int1"]),
        (["--drafter", "eagle:/nope"], ["eagle", "/nope", "secondguess train eagle"]),
        (["--drafter", "suffix+eagle:/nope"], ["eagle", "/nope"]),
        (["--drafter", "medusa"], ["medusa:PATH"]),
        (["--drafter", f"eagle:{head_path('medusa')}"], ["write medusa:"]),
        (["--drafter", "early-exit:99"], ["exit", "99"]),
        (["--drafter", "early-exit:0"], ["layer 1", "0"]),
        (["--drafter", "layer-skip:0-99"], ["layers 0 to 1", "99"]),
        (["--drafter", "self"], ["self:int4", "got self"]),
        (["--drafter", "self:int9"], ["self:int4", "int9"]),
        (["--drafter", "self:int4", "--dtype", "float32"], ["bfloat16", "float32"]),
        (["--drafter", "self:int4", "--quantize", "int8", "--dtype", "bfloat16"], ["bfloat16", "int8"]),
        (["--drafter", "medusa:somewhere,tree=best"], ["best", "3x2x1"]),
    ],
)
def test_bad_options_of_inspect_are_refused(secondguess_command, tiny_checkpoint, arguments, words):
    done = secondguess_command("inspect", tiny_checkpoint, *arguments)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in done.err


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"verifier": "nonsense"}, ["verifier", "nonsense"]),
        ({"controller": "bogus"}, ["controller", "bogus"]),
        ({"runtime": "bogus"}, ["runtime", "bogus"]),
        ({"runtime": "native", "dtype": "float32"}, ["native", "float32"]),
        ({"runtime": "fused", "quantize": "int8"}, ["fused", "int8"]),
        ({"runtime": "transformers", "drafter": "early-exit:1"}, ["layers run one by one"]),
        ({"runtime": "fused", "drafter": "self:int4"}, ["kernels", "runtime fused"]),
    ],
)
def test_a_configuration_that_load_refuses_is_refused(
    secondguess_command, tiny_checkpoint, tmp_path, monkeypatch, settings, words
):
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    path = tmp_path / "secondguess.toml"
    path.write_text(Configuration(LoadSettings(model=str(tiny_checkpoint), **settings)).to_toml())
    done = secondguess_command("inspect", "--config", path)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    for word in words:
        assert word in done.err


@pytest.mark.parametrize("runtime", ["fused", "transformers"])
def test_the_runtime_of_a_configuration_is_the_one_that_is_described(
    inspected, tiny_checkpoint, tmp_path, runtime
):
    path = tmp_path / "secondguess.toml"
    path.write_text(Configuration(LoadSettings(model=str(tiny_checkpoint), runtime=runtime)).to_toml())
    assert inspected("--config", path)["runtime"] == runtime


def test_heads_are_counted(inspected, secondguess_command, monkeypatch):
    """By `inspect`, and by `load` before anything is read."""
    size = 4 * count_parameters(head_path("medusa"))
    plain = inspected("builtin", "--drafter", "ngram")["memory"]
    with_head = inspected("builtin", "--drafter", "ngram+medusa")["memory"]
    assert (plain["head_bytes"], with_head["head_bytes"]) == (0, size)
    kept = plain["target"]["weights_bytes"] + plain["target"]["cache_bytes"]
    excess = plain["total_bytes"] - kept
    # while a head is packed its module is held, too
    assert with_head["total_bytes"] == kept + size + max(size, excess)
    said = secondguess_command("inspect", "builtin", "--drafter", "medusa", *FLOAT32).out
    assert "drafter's own weights" in said
    assert "while loading" in said
    monkeypatch.setattr("secondguess.checkpoint.memory.available_memory", lambda _: plain["total_bytes"])
    with pytest.raises(OutOfMemoryError, match="medusa"):
        load("builtin", "medusa", dtype="float32", device="cpu")


def test_a_model_without_a_context_limit_uses_the_default_context(tiny_checkpoint, monkeypatch):
    endless = Checkpoint.resolve(tiny_checkpoint)
    monkeypatch.setattr(Checkpoint, "context_length", None)
    assert plan_memory(endless).context == 4096
    assert plan_memory(endless, rows=2, context=1_000_000).context == 1_000_000
    with pytest.raises(BadInputError, match="100000000 tokens"):
        plan_memory(endless, context=10**12)


def test_a_configuration_is_inspected(inspected, secondguess_command, tiny_checkpoint, tmp_path):
    path = tmp_path / "secondguess.toml"
    settings = LoadSettings(model=str(tiny_checkpoint), drafter="ngram", controller="fixed:4")
    configuration = Configuration(settings, TuningRecord(processor="Some CPU", speedup={1: 2.25}))
    path.write_text(configuration.to_toml())
    record = inspected("--config", path)
    assert (record["name"], record["drafter"]["name"]) == (str(tiny_checkpoint), "ngram")
    assert record["configuration"]["load"]["controller"] == "fixed:4"
    assert record["configuration"]["tuned"] == {"processor": "Some CPU", "speedup": {"1": 2.25}}
    assert inspected(tiny_checkpoint)["configuration"] is None
    said = secondguess_command("inspect", "--config", path).out
    assert "controller fixed:4" in said
    assert "processor Some CPU, speedup 2.25x (batch size 1)" in said
    other = secondguess_command("inspect", "builtin", "--config", path)
    assert (other.code, other.err.count("\n")) == (2, 1)
    assert "give no --model" in other.err


def test_a_broken_verdict_is_none(tmp_path):
    file = tmp_path / "kept" / "verdict.json"
    write_verdict(file, Verdict("layer 1", 0.5, 1.0))
    assert read_verdict(file) == Verdict("layer 1", 0.5, 1.0)
    assert list(file.parent.iterdir()) == [file]
    for text in ("", "[]", '{"part": "layer 1", "error": null, "limit": 1}', '{"part": "layer 1"}'):
        file.write_text(text)
        assert read_verdict(file) is None


@needs_kernels
def test_kernels_that_a_check_has_refused_are_not_promised(tmp_path, monkeypatch):
    checkpoint = write_checkpoint(FAMILIES["llama"](), tmp_path / "model")
    monkeypatch.setenv("SECONDGUESS_CACHE", str(tmp_path / "verdicts"))
    plan = Checkpoint.resolve(checkpoint, dtype="bfloat16", device="cpu")
    assert describe(plan).runtime == "native"
    for weight_format in plan.weight_formats:
        write_verdict(verdict_file(plan, weight_format), Verdict("layer 1", 3.0, 1.0))
    described = describe(plan)
    assert described.runtime == load_model(plan).kind == "fused"
    assert "layer 1 has 3 times the error of rounding" in described.not_native
