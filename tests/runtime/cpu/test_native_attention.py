"""Attention of the kernels over several blocks of keys: accuracy, and bits that depend only on a query's own keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from checkpoints import read_module
from families import FAMILIES, needs_kernels, random_tokens, row_of, trees, write_checkpoint
from secondguess.core import Draft
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.fused import fuse

pytestmark = needs_kernels

NUM_TOKENS = 300
TOKENS = torch.tensor([random_tokens(NUM_TOKENS, seed=8)])
UNITS = [pytest.param(unit, id=unit.name) for unit in library.units()]
CASES = {
    "grouped heads": ("llama", {}),
    "one key head": ("llama", {"num_key_value_heads": 1}),
    "many queries of one key head": (
        "llama",
        {"hidden_size": 144, "num_attention_heads": 72, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "a key head each": ("llama", {"num_key_value_heads": 4}),
    "heads of 64": ("llama", {"head_dim": 64}),
    "heads of 80": ("llama", {"head_dim": 80}),
    "heads of 128": ("llama", {"head_dim": 128}),
    "heads of 6": ("llama", {"head_dim": 6}),
    "window": ("mistral", {"sliding_window": 100}),
    "window in every second layer": ("gemma3", {"sliding_window": 70}),
    "soft cap": ("gemma2", {"sliding_window": 90}),
}


@pytest.fixture(scope="module", params=CASES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = CASES[request.param]
    config = FAMILIES[family]()
    for name, value in ({"max_position_embeddings": 2 * NUM_TOKENS} | changes).items():
        setattr(config, name, value)
    return write_checkpoint(config, tmp_path_factory.mktemp("long"))


def native(path: Path, unit: library.Unit) -> NativeRuntime:
    decoder = fuse(read_module(str(path), torch.bfloat16).eval(), packed=False)
    assert decoder is not None
    return NativeRuntime(NativeDecoder(decoder, unit=unit))


def error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).float().square().mean().sqrt())


@pytest.mark.parametrize("unit", UNITS)
def test_the_error_of_long_texts_is_that_of_the_module_in_bfloat16(checkpoint, unit):
    rounded = read_module(str(checkpoint), torch.bfloat16).eval()
    with torch.inference_mode():
        of_module = rounded(TOKENS, use_cache=False).logits
        truth = rounded.float()(TOKENS, use_cache=False).logits
    found = native(checkpoint, unit).probe(TOKENS).logits
    assert error(found, truth) < 1.2 * error(of_module, truth)


@pytest.mark.parametrize("unit", UNITS)
def test_bits_at_the_edges_of_blocks_depend_only_on_the_prefix(checkpoint, unit):
    """Not on later tokens, pieces of a prefill, neighbours, the shape of a draft, nor the number of threads."""
    runtime = native(checkpoint, unit)
    whole = runtime.probe(TOKENS).logits[0]
    tokens = TOKENS[0].tolist()
    before = torch.get_num_threads()
    try:
        for threads, chunk, place in (
            (1, 512, 64),
            (2, 37, 65),
            (3, 100, 127),
            (2, 1, 128),
            (2, 64, 200),
            (1, 50, 259),
        ):
            torch.set_num_threads(threads)
            assert torch.equal(runtime.probe(TOKENS[:, :place]).logits[0], whole[:place])
            runtime.prefill_chunk = chunk
            row, neighbour = row_of(tokens[:place]), row_of(random_tokens(5 + place // 2, seed=place))
            runtime.begin([neighbour, row])
            drafted = tokens[place : place + 6]
            chain = runtime.score([row], Draft.chains([drafted])).logits[0]
            assert torch.equal(chain, whole[place - 1 : place + 6])
            runtime.rewind([row], [place - 1])
            tree = trees(([9, 9], [-1, 0]), ([8, drafted[0], 7, drafted[1], drafted[2]], [-1, -1, 1, 1, 3]))
            logits = runtime.score([neighbour, row], tree).logits[1]
            for node, depth in ((1, 1), (3, 2), (4, 3)):
                assert torch.equal(logits[node + 1], whole[place - 1 + depth])
            for each in (row, neighbour):
                runtime.release(each)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("unit", UNITS)
def test_scores_and_logits_that_are_undefined_stay_so_under_a_cap(tmp_path, unit):
    """Gemma 2 caps both. Here it has a token with an undefined embedding."""
    config = FAMILIES["gemma2"]()
    config.tie_word_embeddings = False
    module = read_module(str(write_checkpoint(config, tmp_path)), torch.bfloat16).eval()
    decoder = fuse(module, packed=False)
    assert decoder is not None
    decoder.embedding.data[6] = torch.nan
    runtime = NativeRuntime(NativeDecoder(decoder, unit=unit))
    assert runtime.probe(torch.tensor([[5, 7, 8]])).logits.isfinite().all()
    assert runtime.probe(torch.tensor([[5, 6, 7, 8]])).logits[0, 1:].isnan().all()
