"""Drafters in GGUF files as llama.cpp writes them: those of published folders, and no key is overlooked."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_dialects import (
    AUTHORS,
    KV_HEADS,
    MAPS,
    TEXT,
    VOCAB_SIZE,
    WHOLE,
    WIDTH,
    WORDS,
    Dialect,
    Meaning,
    own,
    plain_logits,
    target_model,
    third,
)
from eagle_dialects import HEADS as NUM_HEADS
from gguf_drafters import converted, sizes_of, write_gguf
from plain_layers import Tensors
from safetensors.torch import load_file
from test_mtp import write_published

from checkpoints import random_llama
from gguf_files import blocks, write_model, writer_for
from secondguess import load as load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.cli.inspect import compatible_drafters
from secondguess.core import Row
from secondguess.drafters.eagle import EagleDrafter
from secondguess.errors import CheckpointError, SecondGuessError, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.block_layers import BlockAttention, ConvolutionConfig
from secondguess.heads.discovery import find_trained
from secondguess.heads.dspark import DsparkConfig, DsparkHead
from secondguess.heads.eagle import load_eagle
from secondguess.heads.feature import default_layer_config
from secondguess.heads.files import count_weights
from secondguess.heads.folders import find_head_folder, find_own, refuse_head
from secondguess.heads.gguf import EXPERTS, SIGMOID_EXPERTS
from secondguess.heads.layer import LayerConfig
from secondguess.heads.mtp import MtpHead, contains_mtp
from secondguess.names import Name
from secondguess.pairing import resolve_drafter
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from unrolled_cases import NUM_LAYERS as MODULE_LAYERS
from unrolled_cases import drafted_logits, target_of

LENGTH, NUM_DRAFTED = 12, 4
ROTATED = {"attn_q": NUM_HEADS, "attn_k": KV_HEADS}
DEFAULT = Meaning(words=WORDS)
NARROW = WIDTH // 2
CASES: dict[str, tuple[Dialect, dict[str, Any]]] = {
    "authors": (Dialect((), AUTHORS, third("midlayer.") | MAPS, DEFAULT), {"norm_before_residual": False}),
    "normalised residual": (
        Dialect(
            (),
            AUTHORS | {"norm_before_residual": True},
            third("midlayer.") | MAPS,
            replace(DEFAULT, norms_residual=True),
        ),
        {"norm_before_residual": True},
    ),
    "normalised states": (
        Dialect(
            (),
            AUTHORS | {"norm_before_fc": True},
            third("midlayer.", input_norm__weight=(3 * WIDTH,)) | MAPS,
            DEFAULT,
        ),
        {"norm_before_fc": True},
    ),
    "whole vocabulary": (
        Dialect((), WHOLE, third("midlayer.", num_words=VOCAB_SIZE), Meaning()),
        {"norm_before_residual": False, "norm_before_fc": False},
    ),
    "narrow": (
        Dialect(
            (),
            AUTHORS | {"hidden_size": NARROW, "target_hidden_size": WIDTH},
            third("midlayer.", width=NARROW, **own(width=NARROW)) | MAPS,
            DEFAULT,
        ),
        {},
    ),
}
"""A head in its folder, and further fields in GGUF."""
every_case = pytest.mark.parametrize("name", CASES)


def ids_of(tensors: Tensors) -> Tensors:
    """Return tensors with a `d2t` of target ids, and without `t2d`, as converted."""
    found = {name: tensor for name, tensor in tensors.items() if name != "t2d"}
    if "d2t" in found:
        found["d2t"] = found["d2t"] + torch.arange(len(found["d2t"]))
    return found


def contents(name: str) -> tuple[dict[str, Any], Tensors]:
    dialect, further = CASES[name]
    fields = sizes_of(dialect.config) | {
        "target_layers": list(dialect.meaning.states),
        "target_hidden_size": WIDTH,
        **further,
    }
    return fields, converted(ids_of(dialect.tensors), ROTATED)


def write(path: Path, name: str, **changes: Any) -> Path:
    """Write a head with changed fields; double underscores in their names stand for dots."""
    fields, tensors = contents(name)
    return write_gguf(
        path, "eagle3", fields | {key.replace("__", "."): v for key, v in changes.items()}, tensors
    )


def load(path: Path) -> Any:
    runtime = TransformersRuntime(target_model(torch.float32))
    return load_eagle(path, TargetModel.from_runtime(runtime)).float()


def drafted(head: Any) -> torch.Tensor:
    """Return the logits `[depth, vocab]` of a chain in float32."""
    target = TransformersRuntime(target_model(torch.float32))
    drafter = EagleDrafter(head, target, "head")
    row = Row(TEXT[:LENGTH], SamplingParams())
    target.request_hidden_states(drafter.hidden_layers)
    drafter.begin([row], target.begin([row]))
    said = []
    with torch.inference_mode():
        drafter.prepare([row], [0])
        drafter.chains = [[]]
        drafter.start([row], NUM_DRAFTED)
        for token in TEXT[LENGTH : LENGTH + NUM_DRAFTED]:
            said.append(drafter.chain_logits([row], [0])[0])
            drafter.chains[0].append(token)
            drafter.extend([row], [0], [token])
    return torch.stack(said).clone()


@every_case
def test_an_eagle_head_has_the_logits_of_the_reference_and_of_its_folder(name: str, tmp_path: Path) -> None:
    dialect, _ = CASES[name]
    found = drafted(load(write(tmp_path / "head.gguf", name)))
    with torch.no_grad():
        expected = torch.stack([plain_logits(dialect, TEXT, LENGTH, depth) for depth in range(NUM_DRAFTED)])
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(found, drafted(load(dialect.write(tmp_path / "folder"))))


def outcome(path: Path) -> Any:
    """Return everything that a key may change; or the refusal."""
    try:
        head = load(path)
    except SecondGuessError as error:
        return str(error)
    return drafted(head).tolist(), head.layer_config.context_length


CHANGED: dict[str, Any] = {
    "block_count": 2,
    "context_length": 90,
    "embedding_length": 24,
    "feed_forward_length": 44,
    "attention.head_count": 2,
    "attention.head_count_kv": 4,
    "attention.key_length": 16,
    "attention.value_length": 16,
    "attention.layer_norm_rms_epsilon": 1e-2,
    "rope.freq_base": 100.0,
    "rope.dimension_count": 4,
    "vocab_size": 4000,
    "target_layers": [1, 4, 5],
    "target_hidden_size": 24,
    "norm_before_residual": True,
    "norm_before_fc": True,
}
FURTHER: dict[str, Any] = {
    "extract_layers": [1, 4, 5],
    "rope.scaling.type": "longrope",
    "rope.scaling.factor": 4.0,
    "attention.sliding_window": 5,
    "attention.scale": 0.5,
    "w8a8.version": 1,
    "hidden_size": WIDTH,
}


def test_every_key_has_an_effect(tmp_path: Path) -> None:
    fields, tensors = contents("authors")
    assert fields.keys() | {"norm_before_fc"} == CHANGED.keys()
    original = outcome(write(tmp_path / "original.gguf", "authors"))
    assert isinstance(original, tuple)
    for key, value in (CHANGED | FURTHER).items():
        path = write_gguf(tmp_path / f"{key}.gguf", "eagle3", fields | {key: value}, tensors)
        assert outcome(path) != original, key


@pytest.mark.parametrize(
    ("key", "default"), [("attention.head_count_kv", NUM_HEADS), ("rope.freq_base", 10_000.0)]
)
def test_an_absent_key_has_the_default_of_llama_cpp(key: str, default: Any, tmp_path: Path) -> None:
    fields, tensors = contents("authors")
    tensors["blk.0.attn_k.weight"] = tensors["blk.0.attn_q.weight"]
    tensors["blk.0.attn_v.weight"] = tensors["blk.0.attn_q.weight"] * 2
    fields["attention.head_count_kv"] = NUM_HEADS
    written = [
        write_gguf(tmp_path / f"{value}.gguf", "eagle3", fields | {key: value}, tensors)
        for value in (None, default)
    ]
    assert outcome(written[0]) == outcome(written[1])
    assert isinstance(outcome(written[0]), tuple)


def test_earlier_files_name_the_layers_otherwise(tmp_path: Path) -> None:
    later = write(tmp_path / "later.gguf", "authors")
    earlier = write(tmp_path / "earlier.gguf", "authors", target_layers=None, extract_layers=[2, 4, 5])
    assert outcome(earlier) == outcome(later)


REQUIRED = {
    key
    for key in CHANGED
    if not key.startswith(("rope.", "norm_")) and key not in ("attention.head_count_kv", "vocab_size")
} - {"attention.key_length", "attention.value_length"}


@pytest.mark.parametrize("key", sorted(REQUIRED))
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "head.gguf", "authors", **{key: None})
    with pytest.raises(CheckpointError, match=rf"expected the field eagle3\.{key} in .*head\.gguf, got none"):
        load(path)


SIZES = ("context_length", "embedding_length", "attention.head_count", "target_layers")


@pytest.mark.parametrize("key", SIZES)
@pytest.mark.parametrize("value", ["x", 0, 1.5, ["a"], True])
def test_a_value_of_another_kind_is_refused_in_one_line(key: str, value: Any, tmp_path: Path) -> None:
    path = write(tmp_path / "head.gguf", "authors", **{key: value})
    with pytest.raises(SecondGuessError) as refused:
        load(path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("key", ["residual_gain", "w8a8.version", "attention.sliding_window"])
def test_an_unknown_key_is_refused_by_name(key: str, tmp_path: Path) -> None:
    path = write(tmp_path / "head.gguf", "authors", **{key: 1})
    with pytest.raises(UnsupportedModelError, match=rf"known in .*head\.gguf, got eagle3\.{key} of 1,"):
        load(path)


@pytest.mark.parametrize("name", ["gain.weight", "blk.0.attn_gain.weight", "blk.0.attn_q.scale"])
def test_an_unknown_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    fields, tensors = contents("authors")
    path = write_gguf(tmp_path / "head.gguf", "eagle3", fields, tensors | {name: torch.ones(3)})
    with pytest.raises(CheckpointError, match=rf"header describes in .*head\.gguf, got unknown {name}"):
        load(path)


def test_a_map_that_holds_no_ids_is_refused(tmp_path: Path) -> None:
    fields, tensors = contents("authors")
    offsets = write_gguf(tmp_path / "offsets.gguf", "eagle3", fields, tensors | {"d2t": MAPS["d2t"]})
    with pytest.raises(SecondGuessError, match=r"inconsistent map|different tokens"):
        load(offsets)
    floats = write_gguf(tmp_path / "floats.gguf", "eagle3", fields, tensors | {"d2t": torch.ones(9)})
    with pytest.raises(CheckpointError, match=r"floats\.gguf, got: d2t of the type F32, which should be I64"):
        load(floats)


def test_queries_that_are_no_whole_heads_are_refused(tmp_path: Path) -> None:
    fields, tensors = contents("authors")
    weight = tensors["blk.0.attn_q.weight"][:-3]
    path = write_gguf(tmp_path / "head.gguf", "eagle3", fields, tensors | {"blk.0.attn_q.weight": weight})
    with pytest.raises(
        CheckpointError, match=r"blk\.0\.attn_q\.weight: 29 outputs are no heads of 8 numbers"
    ):
        load(path)


def test_a_truncated_file_is_refused_in_one_line(tmp_path: Path) -> None:
    whole = write(tmp_path / "head.gguf", "authors").read_bytes()
    for size in (0, 3, 40, 900, len(whole) // 2, len(whole) - 40):
        (tmp_path / "head.gguf").write_bytes(whole[:size])
        for read in (load, find):
            with pytest.raises(CheckpointError, match=r"whole GGUF file in .*head\.gguf") as refused:
                read(tmp_path / "head.gguf")
            assert "\n" not in str(refused.value)


def find(path: Path, kind: str = "eagle") -> Path:
    return find_head_folder(Name(kind, str(path), {}), "tiny", "")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1"])
def test_quantised_weights_are_decoded(kind: str, tmp_path: Path) -> None:
    """Rows of queries and keys are put in order after they are decoded."""
    fields, tensors = contents("authors")
    path = write_gguf(tmp_path / "coded.gguf", "eagle3", fields, tensors, kind=kind)
    held = {
        name: blocks(tensor.float(), kind)[1] if tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 else tensor
        for name, tensor in tensors.items()
    }
    assert sum(not torch.equal(held[name], tensor) for name, tensor in tensors.items()) >= 6
    exact = write_gguf(tmp_path / "exact.gguf", "eagle3", fields, held)
    torch.testing.assert_close(drafted(load(path)), drafted(load(exact)), atol=1e-5, rtol=0)


SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "beta_fast": 16.0},
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 24,
            "rope.scaling.yarn_beta_fast": 16.0,
        },
    ),
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_scaled_positions_are_those_of_the_folder(scaling: str, tmp_path: Path) -> None:
    in_folder, in_file = SCALINGS[scaling]
    dialect, _ = CASES["authors"]
    folder = dialect.write(tmp_path / "folder", {"rope_scaling": in_folder})
    head = load(write(tmp_path / "head.gguf", "authors", **in_file))
    expected = drafted(load(folder))
    torch.testing.assert_close(drafted(head), expected, atol=1e-5, rtol=0)
    assert not torch.allclose(expected, drafted(load(dialect.write(tmp_path / "plain"))))


def test_positions_of_llama_3_are_known_by_their_factors(tmp_path: Path) -> None:
    fields, tensors = contents("authors")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta = {"rope_theta": 1e7}
    folder = CASES["authors"][0].write(tmp_path / "folder", {"rope_scaling": scaling, **theta})
    head = load(folder)
    unscaled = 1e7 ** (-torch.arange(4) / 4)
    tensors["rope_freqs.weight"] = unscaled / head.rotary.frequencies
    path = write_gguf(tmp_path / "head.gguf", "eagle3", fields | {"rope.freq_base": 1e7}, tensors)
    torch.testing.assert_close(drafted(load(path)), drafted(head), atol=1e-5, rtol=0)
    tensors["rope_freqs.weight"] = tensors["rope_freqs.weight"] * 3
    other = write_gguf(tmp_path / "other.gguf", "eagle3", fields | {"rope.freq_base": 1e7}, tensors)
    with pytest.raises(UnsupportedModelError, match="rotary positions are known"):
        load(other)


def test_the_tokenizer_in_a_file_is_not_read(tmp_path: Path) -> None:
    fields, tensors = contents("authors")
    tokens = {"tokenizer.ggml.mask_token_id": 3, "tokenizer.ggml.tokens": ["a", "b"], "general.name": "tiny"}
    path = write_gguf(tmp_path / "head.gguf", "eagle3", fields, tensors, further=tokens)
    assert outcome(path) == outcome(write(tmp_path / "plain.gguf", "authors"))


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "head.gguf", "authors", target_hidden_size=64)
    with pytest.raises(CheckpointError, match="a width of 32, got one for 64"):
        load(path)
    path = write(tmp_path / "deep.gguf", "authors", target_layers=[2, 4, 40])
    with pytest.raises(CheckpointError, match=r"trained for another target"):
        load(path)


KINDS = {"eagle3": "eagle", "dflash": "dspark", "gemma4-assistant": "gemma4-assistant"}


@pytest.mark.parametrize("architecture", KINDS)
def test_the_kind_of_a_drafter_in_a_file_is_known(architecture: str, tmp_path: Path) -> None:
    path, kind = (
        write_gguf(tmp_path / "head.gguf", architecture, {}, {"x": torch.ones(3)}),
        KINDS[architecture],
    )
    with pytest.raises(CheckpointError, match=rf"drafter of the kind {kind}; write {kind}:.*head\.gguf"):
        refuse_head(str(path))
    with pytest.raises(
        CheckpointError, match=rf"of the kind medusa, got .*, which holds a drafter of the kind {kind}"
    ):
        find(path, "medusa")
    with pytest.raises(
        UnsupportedModelError, match=rf"expected a model, got .*as the drafter {kind}:.*head\.gguf"
    ):
        Checkpoint.resolve(path, device="cpu")
    assert find(path, kind) == path


def test_a_model_in_a_file_is_no_drafter(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", "llama", {"block_count": 2}, {"x": torch.ones(3)})
    refuse_head(str(path))
    for kind in ("eagle", "mtp"):
        with pytest.raises(
            CheckpointError, match=rf"drafter of the kind {kind}, got .*, which holds a model"
        ):
            find(path, kind)


def test_a_layout_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "head.gguf", "gemma4-assistant", {}, {"x": torch.ones(3)})
    with pytest.raises(
        UnsupportedModelError, match=r"got gemma4-assistant in .*, which is not read in GGUF; use its folder"
    ):
        load(path)


def dspark(folder: Path, target: TargetModel, **options: Any) -> tuple[DsparkHead, dict[str, Any], Tensors]:
    """Write a DFlash head into a folder; return it with its fields and tensors in GGUF."""
    layer = default_layer_config(WIDTH)
    config = DsparkConfig(
        replace(layer, model_type="qwen3"), 2, (1, 4), 5, mask_token=7, samples_from_anchor=False, **options
    )
    head = DsparkHead(config, target)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    head.save(folder)
    written = json.loads((folder / "config.json").read_text())
    written = written.get("transformer_layer_config", written)
    fields = sizes_of({"max_position_embeddings": 96, **written}) | {"target_layers": [1, 4], "block_size": 5}
    return head, fields, converted(load_file(folder / "model.safetensors"), {})


FURTHER_OF_BLOCKS = {"tokenizer.ggml.mask_token_id": 7}


def target_parts() -> TargetModel:
    return TargetModel.from_runtime(TransformersRuntime(target_model(torch.float32)))


def test_a_block_drafter_is_that_of_its_folder(tmp_path: Path) -> None:
    target = target_parts()
    head, fields, tensors = dspark(tmp_path / "folder", target)
    path = write_gguf(tmp_path / "head.gguf", "dflash", fields, tensors, further=FURTHER_OF_BLOCKS)
    found = DsparkHead.load(path, target)
    as_written = {
        "norm_eps": head.config.layer.norm_eps,
        "more": head.config.layer.more,
    }  # rounded to float32
    assert replace(found.config, layer=replace(found.config.layer, **as_written)) == head.config
    assert found.config.layer.norm_eps == pytest.approx(head.config.layer.norm_eps)
    assert found.config.layer.context_length == 96
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], value) for name, value in head.state_dict().items())
    assert torch.equal(found.rotary.frequencies, head.rotary.frequencies)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "mask_token_id",
            7,
            r"got dflash\.mask_token_id of 7",
        ),  # of earlier files, which number layers otherwise
        ("target_hidden_size", WIDTH, r"got dflash\.target_hidden_size of 32"),
        ("selector_rank", 4, r"got selector_rank of 4"),
        ("block_size", None, r"field dflash\.block_size in .*, got none"),
        ("target_layers", None, r"field dflash\.target_layers in .*, got none"),
        ("attention.sliding_window", 5, r"field dflash\.attention\.sliding_window_pattern in .*, got none"),
    ],
)
def test_a_block_drafter_with_another_key_is_refused(
    key: str, value: Any, message: str, tmp_path: Path
) -> None:
    target = target_parts()
    _, fields, tensors = dspark(tmp_path / "folder", target)
    path = write_gguf(
        tmp_path / "head.gguf", "dflash", fields | {key: value}, tensors, further=FURTHER_OF_BLOCKS
    )
    with pytest.raises(SecondGuessError, match=message):
        DsparkHead.load(path, target)


CHANGED_IN_BLOCKS: dict[str, Any] = {
    "block_size": 4,
    "target_layers": [1, 3],
    "sample_from_anchor": True,
    "attention.layer_norm_rms_epsilon": 0.1,
    "rope.freq_base": 10.0,
    "rope.dimension_count": 8,
    "attention.head_count": 2,
    "block_count": 3,
    "context_length": 44,
    "attention.causal": True,
    "tokenizer.ggml.mask_token_id": 9,
}


def test_every_key_of_a_block_drafter_has_an_effect(tmp_path: Path) -> None:
    target = target_parts()
    _, fields, tensors = dspark(tmp_path / "folder", target)

    def outcome_of(**changes: Any) -> Any:
        outer = {key: value for key, value in changes.items() if "tokenizer" in key}
        inner = {key: value for key, value in changes.items() if "tokenizer" not in key}
        path = write_gguf(
            tmp_path / "head.gguf", "dflash", fields | inner, tensors, further=FURTHER_OF_BLOCKS | outer
        )
        try:
            return DsparkHead.load(path, target).config
        except SecondGuessError as error:
            return str(error)

    original = outcome_of(**{"attention.causal": False, "rope.dimension_sections": [4, 0, 0, 0]})
    assert isinstance(original, DsparkConfig)
    assert outcome_of() == original
    for key, value in CHANGED_IN_BLOCKS.items():
        assert outcome_of(**{key: value}) != original, key


@pytest.mark.parametrize("is_causal", [True, False])
def test_windows_of_a_block_drafter_are_by_layer(is_causal: bool, tmp_path: Path) -> None:
    target = target_parts()
    attention = (BlockAttention(5, is_causal), BlockAttention(0, is_causal))
    head, fields, tensors = dspark(tmp_path / "folder", target, attention=attention)
    fields |= {"attention.sliding_window": 5, "attention.sliding_window_pattern": [True, False]}
    path = write_gguf(tmp_path / "less.gguf", "dflash", fields, tensors, further=FURTHER_OF_BLOCKS)
    with pytest.raises(CheckpointError, match=r"the field dflash\.attention\.causal in .*, got none"):
        DsparkHead.load(path, target)
    fields |= {"attention.causal": is_causal}
    path = write_gguf(tmp_path / "head.gguf", "dflash", fields, tensors, further=FURTHER_OF_BLOCKS)
    found = DsparkHead.load(path, target).config
    assert replace(found, layer=head.config.layer) == head.config


def test_a_selector_and_convolutions_are_those_of_the_folder(tmp_path: Path) -> None:
    target, convolutions = target_parts(), ConvolutionConfig(2, 8)
    options = {"markov_rank": 3, "markov_kind": "selector", "selector_top_k": 4, "convolutions": convolutions}
    head, fields, tensors = dspark(tmp_path / "folder", target, **options)
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}
    path = write_gguf(tmp_path / "head.gguf", "dflash", fields | sizes, tensors, further=FURTHER_OF_BLOCKS)
    found = DsparkHead.load(path, target)
    assert replace(found.config, layer=head.config.layer) == head.config
    assert found.state_dict().keys() == head.state_dict().keys()
    assert all(torch.equal(found.state_dict()[name], value) for name, value in head.state_dict().items())
    for key in sizes:
        changed = write_gguf(
            tmp_path / f"{key}.gguf", "dflash", fields | sizes | {key: 1}, tensors, further=FURTHER_OF_BLOCKS
        )
        with suppress(SecondGuessError):
            assert DsparkHead.load(changed, target).config != found.config, key


@pytest.mark.parametrize("has_confidence", [True, False])
def test_a_markov_head_and_confidences_are_those_of_the_folder(has_confidence: bool, tmp_path: Path) -> None:
    target = target_parts()
    head, fields, tensors = dspark(
        tmp_path / "folder",
        target,
        markov_rank=3,
        has_confidence=has_confidence,
        confidence_reads_markov=has_confidence,
    )
    if has_confidence:
        tensors["conf_proj.weight"] = tensors["conf_proj.weight"][0]
    path = write_gguf(
        tmp_path / "head.gguf",
        "dflash",
        fields | {"sample_from_anchor": False},
        tensors,
        further=FURTHER_OF_BLOCKS,
    )
    found = DsparkHead.load(path, target)
    assert replace(found.config, layer=head.config.layer) == head.config
    assert all(torch.equal(found.state_dict()[name], value) for name, value in head.state_dict().items())
    path = write_gguf(tmp_path / "less.gguf", "dflash", fields, tensors, further=FURTHER_OF_BLOCKS)
    with pytest.raises(CheckpointError, match=r"the field dflash\.sample_from_anchor in .*, got none"):
        DsparkHead.load(path, target)


def module(folder: Path, model_type: str) -> tuple[dict[str, Any], Tensors]:
    """Write a module into a folder as DeepSeek's; return its fields and tensors in GGUF."""
    target = target_of()
    layer = replace(default_layer_config(WIDTH), model_type=model_type, more={"max_position_embeddings": 96})
    head = MtpHead(layer, target)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    head.save(folder)
    config = json.loads((folder / "config.json").read_text())
    count = {"attn_q": layer.num_heads, "attn_k": layer.num_kv_heads} if model_type == "llama" else {}
    fields = sizes_of(config) | {"block_count": MODULE_LAYERS + 1, "nextn_predict_layers": 1}
    return fields, converted(load_file(folder / "model.safetensors"), count)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_a_module_among_the_blocks_of_a_model_is_that_of_its_folder(model_type: str, tmp_path: Path) -> None:
    fields, tensors = module(tmp_path / "folder", model_type)
    around = {
        "blk.0.attn_q.weight": torch.ones(3, 3),
        "output_norm.weight": torch.ones(3),
        "x": torch.ones(1),
    }
    path = write_gguf(tmp_path / "model.gguf", model_type, fields | {"ssm.x": 1}, tensors | around)
    target = target_of()
    head, expected = MtpHead.load(path, target), MtpHead.load(tmp_path / "folder", target)
    assert contains_mtp(path)
    assert find_own("mtp", "tiny", str(path)) == find(path, "mtp") == path
    refuse_head(str(path))  # it may be a draft model, too
    assert head.layer_config.model_type == expected.layer_config.model_type == model_type
    said = [drafted_logits(found.double(), TEXT[:6], TEXT[6:9]) for found in (head, expected)]
    torch.testing.assert_close(*said, atol=1e-5, rtol=0)
    assert count_weights(path) == count_weights(tmp_path / "folder")


SEPARATE = re.compile(r"(.*mlp\.experts)\.(\d+)\.(\w+)_proj\.weight")


def in_file(name: str, tensor: torch.Tensor, joined: dict[str, list[torch.Tensor]]) -> Tensors:
    """Return a tensor of a module as in a file; those of single experts are collected."""
    start = f"blk.{MODULE_LAYERS}."
    if (of_expert := SEPARATE.fullmatch(name)) is not None:
        joined.setdefault(f"{start}ffn_{of_expert[3]}_exps.weight", []).append(tensor)
        return {}
    if name.endswith("experts.gate_up_proj"):
        gate, up = tensor.chunk(2, 1)
        return {f"{start}ffn_up_exps.weight": up, f"{start}ffn_gate_exps.weight": gate}
    if name.endswith("experts.down_proj"):
        return {f"{start}ffn_down_exps.weight": tensor}
    if name.endswith("correction_bias"):
        return {f"{start}exp_probs_b.bias": tensor}
    ((place, value),) = converted({f"layers.{MODULE_LAYERS}.{name}": tensor}, {}).items()
    return {place.replace("ffn_norm", "post_attention_norm"): value[0] if "inp_shexp" in place else value}


NAMES_OF_QWEN = {
    "pre_fc_norm_embedding": "enorm",
    "pre_fc_norm_hidden": "hnorm",
    "fc": "eh_proj",
    "norm": "shared_head.norm",
}
MODULES = {"qwen3.5": "qwen35", "qwen3.5-moe": "qwen35moe", "glm-4.5": "glm4moe"}


def write_module(folder: Path, name: str, path: Path, kind: str = "", **changes: Any) -> Path:
    """Write a published module into a folder, and in GGUF."""
    folder.mkdir()
    write_published(folder, name)
    is_qwen, tensors, joined = "qwen" in name, {}, {}
    for key, tensor in load_file(folder / "model.safetensors").items():
        short = (
            key.removeprefix("mtp.").removeprefix("layers.0.").removeprefix(f"model.layers.{MODULE_LAYERS}.")
        )
        stem, _, suffix = short.rpartition(".")
        renamed = f"{NAMES_OF_QWEN.get(stem, stem)}.{suffix}" if is_qwen else short
        tensors |= in_file(
            renamed.removeprefix("."), tensor + 1 if is_qwen and "norm" in short else tensor, joined
        )
    tensors |= {key: torch.stack(matrices) for key, matrices in joined.items()}
    config = {"max_position_embeddings": 96, "intermediate_size": 48} | json.loads(
        (folder / "config.json").read_text()
    )
    rope = config["rope_parameters"]
    experts = EXPERTS if is_qwen else SIGMOID_EXPERTS
    fields = sizes_of(config) | {
        "block_count": MODULE_LAYERS + 1,
        "nextn_predict_layers": 1,
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.dimension_count": int(config["head_dim"] * rope.get("partial_rotary_factor", 1.0)),
        "rope.dimension_sections": [1, 1, 0, 0],
        **{key: config.get(field) for key, field in experts.items()},
    }
    return write_gguf(path, MODULES[name], fields | changes, tensors, kind=kind)


@pytest.mark.parametrize("name", MODULES)
def test_a_published_module_is_that_of_its_folder(name: str, tmp_path: Path) -> None:
    """Qwen's norms have weights around 1 in the file and around 0 in the folder; experts are joined."""
    path = write_module(tmp_path / "folder", name, tmp_path / "module.gguf")
    heads = [MtpHead.load(place, target_of()).double() for place in (path, tmp_path / "folder")]
    assert heads[0].layer_config.has_experts == heads[1].layer_config.has_experts == (name != "qwen3.5")
    said = [drafted_logits(head, TEXT[:6], TEXT[6:9]) for head in heads]
    torch.testing.assert_close(*said, atol=1e-5, rtol=0)
    assert count_weights(path) == sum(weight.numel() for weight in heads[0].state_dict().values())


CHANGED_IN_MODULES: dict[str, Any] = {
    "expert_used_count": 1,
    "expert_weights_scale": 3.0,
    "expert_weights_norm": False,
    "expert_group_count": 2,
    "expert_group_used_count": 2,
    "expert_gating_func": 1,
    "expert_count": 6,
    "expert_feed_forward_length": 24,
    "attention.layer_norm_rms_epsilon": 0.1,
    "rope.freq_base": 10.0,
    "rope.dimension_count": 4,
    "attention.head_count": 2,
    "block_count": MODULE_LAYERS + 2,
}


def test_every_key_of_a_module_has_an_effect(tmp_path: Path) -> None:
    def outcome_of(index: int, **changes: Any) -> Any:
        changes = {"expert_group_used_count": 1, **changes}
        path = write_module(tmp_path / f"{index}", "glm-4.5", tmp_path / f"{index}.gguf", **changes)
        try:
            return drafted_logits(MtpHead.load(path, target_of()).double(), TEXT[:6], TEXT[6:9]).tolist()
        except SecondGuessError as error:
            return str(error)

    original = outcome_of(0)
    assert isinstance(original, list)
    for index, (key, value) in enumerate(CHANGED_IN_MODULES.items()):
        assert outcome_of(index + 1, **{key: value}) != original, key


def test_quantised_experts_are_decoded_one_by_one(tmp_path: Path) -> None:
    path = write_module(tmp_path / "folder", "glm-4.5", tmp_path / "coded.gguf", "Q8_0")
    said = [
        drafted_logits(MtpHead.load(place, target_of()).double(), TEXT[:6], TEXT[6:9])
        for place in (path, tmp_path / "folder")
    ]
    assert not torch.equal(*said)
    torch.testing.assert_close(*said, atol=0.1, rtol=0)


def test_a_module_of_a_layer_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    fields, tensors = module(tmp_path / "folder", "llama")
    path = write_gguf(tmp_path / "model.gguf", "deepseek2", fields, tensors)
    assert not contains_mtp(path)
    assert find(path, "mtp") == path
    with pytest.raises(
        UnsupportedModelError, match=r"glm4moe, got deepseek2 in .*, which is not read in GGUF"
    ):
        MtpHead.load(path, target_of())


def test_a_model_in_gguf_drafts_with_the_module_in_its_file(tmp_path: Path) -> None:
    """The module counts as a layer in the header, and is none of the target's."""
    model = random_llama(3, vocab_size=300, hidden_size=64, num_hidden_layers=2)
    described = SimpleNamespace(**{**model.config.to_dict(), "num_hidden_layers": 3})
    writer = writer_for(tmp_path, "llama", described, nextn_predict_layers=1, rope__freq_base=10000.0)
    target = TargetModel.from_runtime(TransformersRuntime(model))
    layer = LayerConfig(64, 4, 2, 16, 64, norm_eps=model.config.rms_norm_eps)
    head = MtpHead(layer, target)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    head.save(tmp_path / "folder")
    count = {"attn_q": layer.num_heads, "attn_k": layer.num_kv_heads}
    for name, tensor in converted(load_file(tmp_path / "folder" / "model.safetensors"), count).items():
        writer.add_tensor(name, tensor.numpy())
    write_model(writer, model, "F16")
    checkpoint = Checkpoint.resolve(tmp_path / "model.gguf", dtype="float32", device="cpu")
    assert checkpoint.num_layers == 2
    assert "mtp" in compatible_drafters(checkpoint, ())
    resolve_drafter("mtp", checkpoint)
    outputs = []
    for drafter, controller in (
        ("mtp", "fixed:3"),
        (f"mtp:{tmp_path / 'folder'}", "fixed:3"),
        ("none", None),
    ):
        llm = load_model(str(tmp_path / "model.gguf"), drafter, dtype="float32", controller=controller)
        outputs.append(llm.generate("def quicksort(items):", max_tokens=24))
    assert [output.token_ids for output in outputs[1:]] == [outputs[0].token_ids] * 2
    assert outputs[0].stats.num_drafted == outputs[1].stats.num_drafted > 0


def test_a_file_beside_the_target_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secondguess.heads.discovery.MAX_FOLDERS", 9)
    target_model(torch.float32).save_pretrained(tmp_path / "target")
    head = write(tmp_path / "head.gguf", "authors")
    (tmp_path / "model.gguf").write_bytes(head.read_bytes().replace(b"eagle3", b"llamas"))
    (tmp_path / "broken.gguf").write_bytes(head.read_bytes()[:30])
    (found,) = find_trained(Checkpoint.resolve(str(tmp_path / "target"), dtype="float32"))
    assert (found.name, found.folder, found.obstacle) == (f"eagle:{head}", head, "")
