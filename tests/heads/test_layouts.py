"""EAGLE-3 heads as their authors write them, and heads with quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from head_formats import MODEL, NAMED, TARGET, VOCAB_SIZE, drafted, edit, named, same_draft
from torch import Tensor

from secondguess.errors import UnsupportedModelError
from secondguess.heads.base import DraftVocabulary
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.eagle import EagleConfig, EagleHead
from secondguess.heads.files import read_config, read_tensors, write_head
from secondguess.heads.medusa import MedusaHead


def trained(seed: int = 3, **changes: Any) -> EagleHead:
    """A head with a smaller vocabulary, as training makes it, with random norms."""
    head = EagleHead.fresh(
        MODEL, seed, vocabulary=DraftVocabulary(VOCAB_SIZE, torch.arange(0, VOCAB_SIZE, 2))
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return head


def test_the_authors_layout_drafts_the_same(tmp_path: Path) -> None:
    head = trained()
    head.save(tmp_path / "speculators")
    head.save_in_authors_layout(tmp_path / "authors")
    config, tensors = read_config(tmp_path / "authors"), read_tensors(tmp_path / "authors")
    assert not [name for name in config if "speculators" in name]
    assert {"midlayer.hidden_norm.weight", "fc.weight", "d2t", "t2d", "lm_head.weight"} <= set(tensors)
    assert not [name for name in tensors if name.startswith(("layers.", "embed_tokens"))]
    drafts = [
        drafted(named(f"eagle:{tmp_path / name}", NAMED), TARGET) for name in ("speculators", "authors")
    ]
    assert same_draft(*drafts)


def test_other_states_than_the_authors_are_written_as_numbers_of_outputs(tmp_path: Path) -> None:
    config = EagleConfig(layer=trained().layer_config, hidden_layers=(0, 2, 3), norm_before_residual=True)
    EagleHead(config, MODEL, has_head=False).save_in_authors_layout(tmp_path)
    written = read_config(tmp_path)
    assert written["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [-1, 1, 2]}
    assert written["norm_before_residual"] is True
    assert EagleHead.load(tmp_path, MODEL).hidden_layers == (0, 2, 3)


def test_the_authors_layout_of_a_block_drafter_drafts_the_same(tmp_path: Path) -> None:
    head = DsparkHead.fresh(MODEL, 3)
    head.save(tmp_path / "speculators")
    head.save_in_authors_layout(tmp_path / "authors")
    config = read_config(tmp_path / "authors")
    assert not [name for name in config if "speculators" in name]
    assert config["num_target_layers"] == MODEL.num_layers
    drafts = [
        drafted(named(f"dspark:{tmp_path / name}", NAMED), TARGET) for name in ("speculators", "authors")
    ]
    assert same_draft(*drafts)


def test_heads_of_one_layout_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot write a MedusaHead in its authors' layout"):
        MedusaHead.fresh(MODEL).save_in_authors_layout(tmp_path)
    layers = EagleConfig(layer=trained().layer_config, hidden_layers=(1, 2, 3), num_layers=2)
    with pytest.raises(UnsupportedModelError, match="one layer of full attention"):
        EagleHead(layers, MODEL, has_head=False).save_in_authors_layout(tmp_path)


def packed(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """Return tensors of compressed-tensors, 8 bits with a scale per 32 inputs, and the weight that they stand for."""
    groups = weight.unflatten(1, (-1, 32))
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    codes = (groups / scale).round().clamp(-127, 127)
    unsigned = (codes.flatten(1) + 128).long().unflatten(1, (-1, 4))
    words = sum(unsigned[..., place] << (8 * place) for place in range(4))
    assert isinstance(words, Tensor)
    tensors = {
        "weight_packed": words.to(torch.uint32).view(torch.int32),
        "weight_scale": scale[..., 0].half(),
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, (codes * scale).flatten(1)


def test_quantised_weights_of_a_head_are_decoded(tmp_path: Path) -> None:
    trained().save_in_authors_layout(tmp_path / "exact")
    config, tensors = read_config(tmp_path / "exact"), read_tensors(tmp_path / "exact")
    quantised: dict[str, Tensor] = {}
    for name in [name for name in tensors if name.startswith("midlayer.") and name.endswith("proj.weight")]:
        stored, tensors[name] = packed(tensors[name].float())
        quantised |= {name.replace("weight", part): tensor for part, tensor in stored.items()}
    write_head(tmp_path / "exact", config, tensors)
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int"},
            "input_activations": None,
        }
    }
    described = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    rest = {
        name: tensor
        for name, tensor in tensors.items()
        if name.replace("weight", "weight_packed") not in quantised
    }
    write_head(tmp_path / "packed", config | {"quantization_config": described}, rest | quantised)
    assert len(quantised) == 21
    drafts = [drafted(named(f"eagle:{tmp_path / name}"), TARGET) for name in ("exact", "packed")]
    assert same_draft(*drafts)
    edit(tmp_path / "packed", quantization_config={**described, "format": "naive-quantized"})
    with pytest.raises(UnsupportedModelError, match="naive-quantized"):
        named(f"eagle:{tmp_path / 'packed'}")
