"""Released models: on the kernels, with the text of plain decoding, and with errors of the kernels found.

`make test` fetches SmolLM2 and `make released` all models; `--released` selects those that take part.
"""

from __future__ import annotations

import copy
import ctypes
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from released_models import RELEASES, Release, make_folder
from torch import Tensor

from builtin_cases import with_drafter
from families import needs_kernels
from secondguess.api import LLM, load
from secondguess.checkpoint.loader import _checked_tokens, _outline, _packed_decoder, load_model, module_of
from secondguess.checkpoint.plan import Checkpoint
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.check import check_decoder
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.rotary import Rotary
from secondguess.runtime.modules.packing import pack_linears

pytestmark = [needs_kernels, pytest.mark.released]

PROMPTS = ("def quicksort(items):\n", "Once upon a time, there was a")
SETTINGS = ({"temperature": 0}, {"temperature": 0.8, "seed": 3})
ENCODINGS = ("file", "folder", "folder,int8", "folder,int4")
DRAFTERS = ("suffix", "ngram", "jacobi", "early-exit:4", "model:", "self:int4", "suffix+self:int4")


def release_of(name: str, request: pytest.FixtureRequest) -> Release:
    if name not in request.config.getoption("--released"):
        pytest.skip(f"{name} takes part with --released {name} (make released)")
    if not RELEASES[name].path.is_file():
        pytest.skip(f"{name} is not here: python tools/released {name}")
    return RELEASES[name]


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest) -> Release:
    return release_of(request.param, request)


@pytest.fixture(scope="module")
def smollm2(request: pytest.FixtureRequest) -> Release:
    return release_of("smollm2", request)


@pytest.fixture(scope="module", autouse=True)
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the verdicts of checks, so that a model is checked once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECONDGUESS_CACHE", str(tmp_path_factory.mktemp("verdicts")))
        yield


def model_in(release: Release, encoding: str) -> dict[str, str | None]:
    """Return the arguments of `load` for a model in an encoding."""
    form, _, quantize = encoding.partition(",")
    return {
        "model": str(release.path if form == "file" else make_folder(release)),
        "quantize": quantize or None,
    }


def texts(llm: LLM) -> list[list[int]]:
    """Return the tokens of all prompts under all settings, alone and as a batch."""
    found = []
    for settings in SETTINGS:
        found += [llm.generate(prompt, max_tokens=24, **settings).token_ids for prompt in PROMPTS]
        found += [output.token_ids for output in llm.generate(list(PROMPTS), max_tokens=24, **settings)]
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_text_with_every_drafter_is_that_of_plain_decoding(release, encoding, caplog):
    """Target and draft model run on the kernels, without a message that they do not.

    In one encoding the target is loaded anew for each drafter, in the others once.
    """
    settings = model_in(release, encoding)
    expected = texts(load(**settings, drafter="none"))
    half = len(PROMPTS)
    assert expected[:half] == expected[half : 2 * half], "a batch"
    applicable = [name for name in DRAFTERS if encoding == "folder" or "self" not in name]
    pair = load(**settings, drafter=f"model:{release.path}")
    for drafter in applicable:
        if drafter == "model:":
            llm = pair
        else:
            llm = load(**settings, drafter=drafter) if encoding == "folder" else with_drafter(pair, drafter)
        assert isinstance(llm.target.runtime, NativeRuntime), drafter
        assert texts(llm) == expected, drafter
    assert not caplog.messages


@pytest.mark.parametrize("runtime", ["fused", "transformers"])
def test_other_runtimes_take_models_that_amplify_rounding(release, runtime):
    model = load(str(make_folder(release)), "none", dtype="bfloat16", runtime=runtime).target
    assert model.kind == runtime
    if runtime == "transformers":
        assert any(isinstance(part, KernelLinear) for part in model.runtime.module.modules())


def test_the_fused_runtime_refuses_wrong_positions_in_bfloat16(smollm2, monkeypatch, caplog):
    table = Rotary.table
    monkeypatch.setattr(Rotary, "table", lambda self, length: table(self, length).flip(0))
    plan = Checkpoint.resolve(str(make_folder(smollm2)), dtype="bfloat16", device="cpu", runtime="fused")
    with pytest.raises(UnsupportedModelError):
        load_model(plan)
    assert "the fused runtime is not used" in caplog.text


def test_a_module_with_wrong_products_is_not_packed(smollm2, monkeypatch):
    model = module_of(Checkpoint.resolve(str(make_folder(smollm2)), dtype="bfloat16", device="cpu"))
    forward = KernelLinear.forward
    monkeypatch.setattr(KernelLinear, "forward", lambda self, values: 1.1 * forward(self, values))
    assert not pack_linears(model)


Plant = Callable[[NativeDecoder], None]
"""Function that puts an error into a decoder, whose structures no other decoder shares."""


@pytest.fixture(scope="module", params=ENCODINGS)
def packed(
    request: pytest.FixtureRequest, smollm2: Release
) -> tuple[Checkpoint, NativeDecoder, Callable[[str], Tensor]]:
    settings = model_in(smollm2, request.param)
    plan = Checkpoint.resolve(settings.pop("model"), dtype="bfloat16", device="cpu", **settings)
    return plan, *_packed_decoder(plan, plan.weight_formats[0])


def planted(decoder: NativeDecoder, plant: Plant) -> NativeDecoder:
    """Return a copy of a decoder with an error; only weights are shared."""
    other = copy.copy(decoder)
    other.described = library.Decoder.from_buffer_copy(decoder.described)
    other.described.layers = (library.Layer * decoder.num_layers)(
        *decoder.described.layers[: decoder.num_layers]
    )
    other.rotaries = [rotary.to(torch.float32) for rotary in decoder.rotaries]
    other._kept = [decoder]
    plant(other)
    return other


def failed_parts(
    packed: tuple[Checkpoint, NativeDecoder, Callable[[str], Tensor]], plant: Plant
) -> list[str]:
    plan, decoder, read = packed
    parts = check_decoder(NativeRuntime(planted(decoder, plant)), _outline(plan), read, _checked_tokens(plan))
    return [part.name for part in parts if not part.passes]


def keep(decoder: NativeDecoder, values: Tensor) -> int:
    decoder._kept.append(values)
    return values.data_ptr()


def other_layer(name: str, layer: int) -> Plant:
    """A product multiplies by the weight of the next layer."""

    def plant(decoder: NativeDecoder) -> None:
        own, other = (getattr(decoder.described.layers[index], name) for index in (layer, layer + 1))
        assert own.encoding == other.encoding
        own.data = other.data

    return plant


def wrong_block(name: str, layer: int) -> Plant:
    """32 outputs of a product are those of the next layer."""

    def plant(decoder: NativeDecoder) -> None:
        own, other = (
            getattr(decoder.blocks[index], {"gate_up": "inner"}.get(name, name))
            for index in (layer, layer + 1)
        )
        assert own.weight.encoding == other.weight.encoding
        size = own.tensors[-1].numel() * 32 // own.num_lines
        getattr(decoder.described.layers[layer], name).data = keep(
            decoder, torch.cat((other.tensors[-1][:size], own.tensors[-1][size:]))
        )

    return plant


def louder_norm(name: str, layer: int = 0) -> Plant:
    """A norm multiplies by weights that are 3 % larger."""

    def plant(decoder: NativeDecoder) -> None:
        norm = getattr(decoder.described if name == "norm" else decoder.described.layers[layer], name)
        numbers = (ctypes.c_float * decoder.embedding.shape[1]).from_address(norm.weight)
        norm.weight = keep(decoder, torch.tensor(list(numbers)) * 1.03)

    return plant


def wrong_value(name: str, value: float, layer: int | None = None) -> Plant:
    """A field of the description has another value."""

    def plant(decoder: NativeDecoder) -> None:
        setattr(decoder.described if layer is None else decoder.described.layers[layer], name, value)

    return plant


def rotated_less(decoder: NativeDecoder) -> None:
    """The angles between positions are 1 % smaller."""
    rotary = decoder.rotaries[0]
    rotary.frequencies = rotary.frequencies * 0.99


def later_positions(decoder: NativeDecoder) -> None:
    """Positions from the 1024th on are rotated as the one before."""
    table = decoder.rotaries[0].table(8192).clone()
    table[1024:] = table[1023:-1].clone()
    decoder.rotaries[0].table = lambda length: table[:length]  # type: ignore[method-assign]


PRODUCTS = ("qkv", "output", "gate_up", "down")
IN_ONE_PART: dict[str, tuple[Plant, str]] = {
    **{
        f"other layer, {name}": (other_layer(name, layer), f"layer {layer}")
        for name, layer in zip(PRODUCTS, (7, 10, 13, 16), strict=True)
    },
    **{
        f"wrong block, {name}": (wrong_block(name, layer), f"layer {layer}")
        for name, layer in zip(PRODUCTS, (3, 19, 22, 25), strict=True)
    },
    "attention norm": (louder_norm("attention_norm", 5), "layer 5"),
    "feed-forward norm": (louder_norm("mlp_norm", 9), "layer 9"),
    "last norm": (louder_norm("norm"), "head"),
    "later positions": (later_positions, "rotary positions"),
    "window": (wrong_value("window", 8, layer=4), "layer 4"),
    "window of the last tokens": (wrong_value("window", 17, layer=12), "layer 12"),
}
"""Errors in parts of their own, each of which runs from exact inputs: one check finds them all."""
PLANTED = IN_ONE_PART | {
    "angles": (rotated_less, "rotary positions"),
    "interleaved pairs": (wrong_value("is_interleaved", 1), "layer 0"),
    "no mask": (wrong_value("is_bidirectional", 1), "layer 0"),
    "scaling of scores": (wrong_value("scaling", 0.125 * 1.05), "layer 0"),
    "activation": (wrong_value("activation", 1), "layer 0"),
}


@pytest.fixture(scope="module")
def failed_with(
    packed: tuple[Checkpoint, NativeDecoder, Callable[[str], Tensor]],
) -> Callable[..., list[str]]:
    """Function from names of errors to the parts that fail with them."""

    @cache
    def failed(*names: str) -> list[str]:
        def plant(decoder: NativeDecoder) -> None:
            for name in names:
                PLANTED[name][0](decoder)

        return failed_parts(packed, plant)

    return failed


def test_no_part_fails_without_an_error(failed_with):
    assert not failed_with()


def test_no_part_fails_with_errors_in_others(failed_with):
    parts = [part for _, part in IN_ONE_PART.values()]
    assert len(parts) == len(set(parts))
    assert {*failed_with(*IN_ONE_PART)} == {*parts, "logits"}


@pytest.mark.parametrize("name", PLANTED)
def test_an_error_in_the_kernels_is_found(failed_with, name):
    together = IN_ONE_PART if name in IN_ONE_PART else (name,)
    assert PLANTED[name][1] in failed_with(*together)


OPENINGS = """
import collections, sys
counts = collections.Counter()
def count(event, arguments):
    if event == "open" and str(arguments[0]).startswith(sys.argv[1]):
        counts[str(arguments[0])] += 1
sys.addaudithook(count)
from secondguess.api import load
load(sys.argv[1], "none").generate("a", max_tokens=1)
print(__import__("json").dumps(counts))
"""


@pytest.mark.parametrize("form", ["file", "folder"])
def test_every_file_is_opened_once(smollm2, form):
    """Transformers reads `tokenizer_config.json` three times; weights in safetensors are mapped without Python."""
    path = model_in(smollm2, form)["model"]
    run = subprocess.run(
        [sys.executable, "-c", OPENINGS, str(path)], capture_output=True, text=True, check=True
    )
    counts = {Path(name).name: count for name, count in json.loads(run.stdout.splitlines()[-1]).items()}
    counts.pop("tokenizer_config.json", None)
    assert counts
    assert set(counts.values()) == {1}, counts


def test_inspect_promises_what_loading_does(release, secondguess_command):
    described = secondguess_command("inspect", release.path, "--json").records[0]
    assert described["runtime"] == load(str(release.path), "none").target.kind
