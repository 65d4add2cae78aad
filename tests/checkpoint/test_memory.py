"""Memory that loading takes, measured in a process of its own, against the estimate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from checkpoints import write_tokenizer
from families import FAMILIES, needs_kernels, write_checkpoint

SLACK = 2**24
"""Bytes that allocators may keep beyond the estimate."""
LOAD = """
import sys, torch
from secondguess.checkpoint.checkpoint import Checkpoint

def resolve(path):
    quantize = None if sys.argv[3] == "none" else sys.argv[3]
    return Checkpoint.resolve(path, dtype="bfloat16", device="cpu", runtime="native", quantize=quantize)

first = resolve(sys.argv[1]).load()  # imports, and buffers of torch
checkpoint = resolve(sys.argv[2])
need = checkpoint.memory(0)
checkpoint.tokenizer
print(need.total + need.excess, flush=True)
sys.stdin.readline()
loaded = checkpoint.load()
print("loaded", flush=True)
sys.stdin.readline()
"""


def anonymous_bytes(process: subprocess.Popen[str]) -> int:
    """Memory of a process without pages of files, which the system drops when memory is needed."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) * 1024


@needs_kernels
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not show memory in /proc"
)
@pytest.mark.parametrize(
    ("is_tied", "stored", "quantize"),
    [
        (True, torch.bfloat16, "none"),
        (True, torch.bfloat16, "int8"),
        (False, torch.float32, "none"),
    ],
)
def test_loading_a_large_vocabulary_takes_what_was_estimated(is_tied, stored, quantize, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=65_536, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=is_tied,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.to(stored).save_pretrained(tmp_path / "large")
    write_tokenizer(tmp_path / "large", 300)
    small = write_checkpoint(FAMILIES["llama"](), tmp_path / "small")
    command = [sys.executable, "-c", LOAD, str(small), str(tmp_path / "large"), quantize]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            estimate = int(process.stdout.readline())
            before = anonymous_bytes(process)
            sampler = subprocess.Popen(
                [sys.executable, "-S", "-c", SAMPLE, str(process.pid)], stdout=subprocess.PIPE, text=True
            )
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "loaded\n"
        finally:
            process.kill()
        peak = int(sampler.communicate()[0]) * 1024 - before
    assert 0.5 * estimate < peak < 1.1 * estimate + SLACK


SAMPLE = """
import sys, time
largest = 0
try:
    while True:
        with open(f"/proc/{sys.argv[1]}/status") as file:
            found = [int(line.split()[1]) for line in file if line.startswith("RssAnon:")]
        if not found:  # the process has ended
            break
        largest = max(largest, *found)
        time.sleep(0.001)
except OSError:
    pass
print(largest)
"""
