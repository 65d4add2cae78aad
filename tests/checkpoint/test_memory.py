"""Memory that loading takes, measured in a process of its own, against the estimate."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from checkpoints import write_tokenizer
from families import FAMILIES, needs_kernels, row_of, write_checkpoint
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.memory import return_freed_memory
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.source import open_source

SLACK = 2**24
"""Bytes that allocators may keep beyond the estimate."""
LOAD = """
import os, sys, time
os.environ["OMP_NUM_THREADS"] = "1"  # threads do not survive the fork
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint

def resolve(path, quantize):
    quantize = None if quantize == "none" else quantize
    return Checkpoint.resolve(path, dtype="bfloat16", device="cpu", runtime="native", quantize=quantize)

def anonymous_bytes(process):  # without pages of files, which the system drops when memory is needed
    with open(f"/proc/{process}/status") as file:
        return next((int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon:")), 0)

load_model(resolve(sys.argv[1], "none"))  # imports, and buffers of torch
for path, quantize in zip(sys.argv[2::2], sys.argv[3::2]):
    (estimates, tell), (starts, start) = os.pipe(), os.pipe()
    child = os.fork()  # each case begins with the memory of a process that has loaded nothing large
    if not child:
        checkpoint = resolve(path, quantize)
        need = checkpoint.memory(0)
        checkpoint.tokenizer
        os.write(tell, str(need.total + need.excess).encode())
        os.read(starts, 1)
        loaded = load_model(checkpoint)
        os._exit(0)
    os.close(tell)
    estimate = int(os.read(estimates, 99))
    before = peak = anonymous_bytes(child)
    os.write(start, b".")
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        peak = max(peak, anonymous_bytes(child))
        time.sleep(0.001)
    assert ended[1] == 0
    print(estimate, peak - before)
"""


def write_large(path: Path, is_tied: bool, dtype: torch.dtype) -> Path:
    """Write a checkpoint most of whose weights are those of its vocabulary."""
    config = transformers.LlamaConfig(
        vocab_size=65_536, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=is_tied,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
    model.to(dtype).save_pretrained(path)
    write_tokenizer(path, 300)
    return path


@needs_kernels
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="this system does not show memory in /proc"
)
def test_loading_a_large_vocabulary_takes_what_was_estimated(tmp_path):
    """With one table for embeddings and head, the same quantised, and with two tables that are read in another dtype."""
    small = write_checkpoint(FAMILIES["llama"](), tmp_path / "small")
    tied = write_large(tmp_path / "tied", True, torch.bfloat16)
    untied = write_large(tmp_path / "untied", False, torch.float32)
    cases = [tied, "none", tied, "int8", tied, "int4", untied, "none"]
    command = [sys.executable, "-c", LOAD, str(small), *map(str, cases)]
    # Otherwise glibc keeps freed tensors of up to 32 MiB, as many as the order of allocations makes it.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    measured = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(measured) == 4
    for estimate, peak in measured:
        assert 0.5 * estimate < peak < 1.1 * estimate + SLACK


def test_experts_that_are_converted_count_twice_while_a_module_is_read(tmp_path):
    path = write_checkpoint(FAMILIES["mixtral"](), tmp_path)
    experts = [each for name, each in load_file(path / "model.safetensors").items() if ".experts." in name]
    assert len(experts) > 10
    stored = experts[0].dtype
    other = torch.float32 if stored == torch.bfloat16 else torch.bfloat16
    kept, converted = (
        Checkpoint.resolve(path, dtype=str(dtype)[6:], device="cpu", runtime="transformers").memory(0)
        for dtype in (stored, other)
    )
    assert kept.loading == kept.weights
    in_experts = sum(each.numel() for each in experts)
    assert converted.loading > converted.weights + in_experts * other.itemsize


@pytest.mark.skipif(sys.platform != "linux" or not platform.libc_ver()[0], reason="needs glibc")
def test_memory_that_was_freed_is_returned_to_the_system():
    def kept_bytes() -> int:
        status = Path("/proc/self/status").read_text()
        return int(re.search(r"RssAnon:\s+(\d+)", status)[1]) * 1024

    pieces = [torch.ones(2**14) for _ in range(1600)]  # 100 MiB, which glibc keeps below the last piece
    last = pieces[-1]
    del pieces
    kept = kept_bytes()
    return_freed_memory()
    assert kept_bytes() < kept - 2**25
    assert last.all()


@pytest.mark.parametrize("name", ["llama", "gemma4", "deepseek-v3", "bloom"])
def test_the_cache_takes_what_was_estimated(name, tmp_path):
    """Heads of other sizes per layer, layers that share keys, and the compressed keys of multi-latent attention."""
    path = write_checkpoint(FAMILIES[name](), tmp_path)
    loaded = load_model(Checkpoint.resolve(path, dtype="float32", device="cpu", runtime="transformers"))
    loaded.runtime.begin([row_of([5, 6, 7])])
    cache = loaded.runtime.cache
    num_bytes = sum(block.nbytes for block in (*cache.keys, *cache.values))
    assert num_bytes == cache.num_slots * cache.capacity * loaded.checkpoint.cache_bytes_per_token


@pytest.mark.parametrize(
    ("config", "num_parameters"),
    [
        ({"dtype": "float32"}, 100),
        ({"torch_dtype": "float32"}, 100),
        ({"dtype": "bfloat16"}, 200),
        ({"text_config": {"dtype": "float32"}}, 100),
        ({}, 200),
    ],
)
def test_parameters_in_pickles_are_counted_by_their_dtype(config, num_parameters, tmp_path):
    """Without a dtype the count may be too high, never too low."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("pytorch_model.bin", "optimizer.bin", "training_args.bin"):
        (tmp_path / name).write_bytes(bytes(400))
    assert open_source(str(tmp_path)).count_parameters() == num_parameters
