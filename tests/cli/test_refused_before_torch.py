"""Wrong names and missing models are refused before torch and Transformers, which take seconds, are imported."""

import contextlib
import io
import json
import subprocess
import sys
from functools import cache

import pytest
import typer

CASES = {
    ("inspect", "/missing/path"): "'/missing/path'",
    ("inspect", "org/nope"): "hf download org/nope",
    ("inspect", "builtin", "--abacus"): "--abacus",
    ("generate", "x", "--model", "/missing/path"): "'/missing/path'",
    ("verify", "--model", "/missing/path"): "'/missing/path'",
    ("bench", "--model", "/missing/path"): "'/missing/path'",
    ("tune", "/missing/path"): "'/missing/path'",
    ("train", "medusa", "--out", "out", "--model", "/missing/path"): "'/missing/path'",
    ("train", "layer-skip", "--out", "out", "--model", "/missing/path"): "'/missing/path'",
    ("export", "--to", "abacus"): "llama.cpp",
    ("export", "--to", "vllm", "--drafter", "abacus"): "suffix",
    ("export", "--to", "vllm", "--dtype", "abacus"): "bfloat16",
    ("export", "--to", "vllm", "--quantize", "abacus"): "int8",
    ("serve", "--host", "256.0.0.1"): "--host",
    ("generate", "x", "--drafter", "abacus"): "suffix",
    ("generate", "x", "--drafter", "suffix+abacus"): "suffix+abacus",
    ("generate", "x", "--verifier", "abacus"): "traversal",
    ("generate", "x", "--controller", "abacus"): "confidence",
    ("generate", "x", "--dtype", "abacus"): "bfloat16",
    ("generate", "x", "--device", "abacus"): "cuda:N",
    ("generate", "x", "--runtime", "abacus"): "fused",
    ("generate", "x", "--quantize", "abacus"): "int8",
    ("generate", "x", "--drafter-quantize", "abacus"): "int8",
    ("verify", "--drafter", "abacus"): "suffix",
    ("verify", "--verifier", "abacus"): "traversal",
    ("verify", "--dtype", "abacus"): "bfloat16",
    ("verify", "--device", "abacus"): "cuda:N",
    ("bench", "--drafter", "abacus"): "suffix",
    ("bench", "--drafters", "all", "--controller", "abacus"): "confidence",
    ("bench", "--drafters", "all", "--drafters", "suffix"): "got 'all'",
    ("tune", "builtin", "--drafter", "abacus"): "suffix",
    ("train", "medusa", "--out", "out", "--loss", "abacus"): "lk, kl, tv",
}
"""Command -> what its one line names, in addition to the value that came."""


def run_all():
    """Run every case in this process, in which torch and Transformers cannot be imported; JSON of exit codes and outputs."""
    sys.modules["torch"] = sys.modules["transformers"] = None
    typer.main.get_command = cache(typer.main.get_command)  # takes longer than a command that is refused

    from secondguess.cli import main

    outcomes = []
    for case in CASES:
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            code = main(case)
        outcomes.append([code, out.getvalue(), error.getvalue()])
    print(json.dumps(outcomes))


@pytest.fixture(scope="module")
def outcomes():
    """By command, in one fresh process."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=True)
    return dict(zip(CASES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_a_wrong_name_is_refused_before_torch_is_imported(outcomes, case):
    code, out, error = outcomes[case]
    assert (code, out) == (2, ""), error
    assert error.startswith(("secondguess: error: expected ", "secondguess: error: No such option"))
    assert error.count("\n") == 1
    assert CASES[case] in error


if __name__ == "__main__":
    run_all()
