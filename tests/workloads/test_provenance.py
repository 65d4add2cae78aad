"""Provenance of results, without host names and paths."""

import hashlib
import os
import socket
from pathlib import Path

import pytest

from secondguess.workloads import provenance
from secondguess.workloads.provenance import collect_provenance, hash_weights, public_name


def collect(folder: Path):
    return collect_provenance(
        num_threads=1,
        device="cpu",
        dtype="float32",
        seed=0,
        models={"tiny": folder},
        runtimes={"tiny": "fused"},
    )


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("/opt/env/bin/secondguess", "secondguess"),
        ("--model=/data/tiny", "--model=tiny"),
        ("/data/models/tiny/", "tiny/"),
        ("/data/a:b", "a:b"),
        ("model:/data/models/tiny", "model:tiny"),
        ("model:/data/d,x=1", "model:d,x=1"),
        ("suffix+model:/data/d+model:/data/e", "suffix+model:d+model:e"),
        ("spec-bench:/data/q.jsonl", "spec-bench:q.jsonl"),
        ("model:builtin-draft", "model:builtin-draft"),
        ("../data/x.jsonl", "../data/x.jsonl"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("http://host:8000/v1,model=a/b", "http://host:8000/v1,model=a/b"),
    ],
)
def test_absolute_paths_are_reduced_to_their_last_part(word, shown):
    assert public_name(word) == shown


def test_the_hash_depends_only_on_the_weights(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(b"one")
    before = hash_weights(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert hash_weights(tmp_path) == before
    (tmp_path / "b.safetensors").write_bytes(b"two")
    assert hash_weights(tmp_path) != before


def test_the_hash_of_pickles_depends_on_the_weights_alone(tmp_path):
    (tmp_path / "pytorch_model-00001-of-00001.bin").write_bytes(b"one")
    before = hash_weights(tmp_path)
    (tmp_path / "optimizer.bin").write_bytes(b"two")
    assert hash_weights(tmp_path) == before == hashlib.sha256(b"one").hexdigest()


def test_the_same_files_are_read_once(tmp_path, monkeypatch):
    weights = tmp_path / "a.safetensors"
    weights.write_bytes(b"one")
    before = hash_weights(tmp_path)
    with monkeypatch.context() as patched:
        opened = Path.open
        patched.setattr(
            Path,
            "open",
            lambda path, *mode, **more: (
                pytest.fail("read again") if path == weights else opened(path, *mode, **more)
            ),
        )
        assert hash_weights(tmp_path) == before
    weights.write_bytes(b"two")  # as long as before
    os.utime(weights, ns=(0, 0))
    assert hash_weights(tmp_path) != before


def test_versions_and_machine_are_recorded(tmp_path):
    about = collect(tmp_path)
    assert about.versions["torch"]
    assert about.versions["transformers"]
    assert about.processor
    assert about.python.startswith("3.")


def test_host_and_folders_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance.sys, "argv", [str(tmp_path / "secondguess"), "bench", str(tmp_path / "x")])
    told = str(collect(tmp_path))
    assert str(tmp_path) not in told
    assert socket.gethostname() not in told


def test_outside_a_checkout_there_is_no_commit(tmp_path):
    assert provenance._git_state(tmp_path) == (None, None)


def test_a_new_result_does_not_make_a_checkout_dirty(tmp_path):
    git = lambda *arguments: provenance._git(tmp_path, "-c", "user.name=x", "-c", "user.email=x", *arguments)  # noqa: E731
    git("init", "-q")
    (tmp_path / "core.py").write_text("one")
    git("add", "core.py")
    git("commit", "-q", "-m", "x")
    commit, dirty = provenance._git_state(tmp_path)
    assert len(commit) == 40
    assert not dirty
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "new.json").write_text("{}")
    assert not provenance._git_state(tmp_path)[1]
    (tmp_path / "core.py").write_text("two")
    assert provenance._git_state(tmp_path)[1]
