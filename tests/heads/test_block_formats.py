"""Block drafters as their publishers' own code writes and computes them (`tools/drafter_oracles/blocks.py`)."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from head_formats import Recorder, write_folder
from torch import Tensor
from torch.nn import functional

from drafter_oracles.values import (
    ANCHOR,
    BLOCK_SIZE,
    MASK_TOKEN,
    NUM_LAYERS,
    TEXT,
    VOCAB_SIZE,
    WIDTH,
    head_weights,
    target_embeddings,
    target_lm_head,
    target_states,
)
from head_cases import HEADS, tiny_target
from secondguess.core import Budgets, Row
from secondguess.drafters.dspark import DsparkDrafter
from secondguess.drafters.trees import StaticTree
from secondguess.errors import CheckpointError
from secondguess.heads.base import TargetModel
from secondguess.heads.dspark import DsparkHead
from secondguess.heads.folders import refuse_head
from secondguess.heads.learning import TrainingBatch
from secondguess.heads.runtime import BlockRuntime
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise

ORACLES = json.loads(Path(__file__).with_name("block_oracles.json").read_text())
SHARED = ORACLES["shared"]
CASES = {name: case for name, case in ORACLES.items() if "logits" in case}
every_case = pytest.mark.parametrize("name", CASES)
TARGET = TargetModel(
    width=WIDTH,
    dtype=torch.float32,
    embed=lambda tokens: target_embeddings()[tokens],
    normalise=lambda states: states,
    unembed=lambda states: states @ target_lm_head().T,
    vocab_size=VOCAB_SIZE,
    num_layers=NUM_LAYERS,
    device=torch.device("cpu"),
)
Config = dict[str, Any]


def layers_of(config: Config) -> Config:
    described: Config = config.get("transformer_layer_config", config)
    return described


def config_of(name: str) -> Config:
    config: Config = copy.deepcopy(CASES[name]["config"])
    layers_of(config).update(SHARED["layers"])
    return config


def tensors_of(name: str) -> dict[str, Tensor]:
    shapes: dict[str, list[int]] = {}
    for pattern, shape in {**SHARED["tensors"], **CASES[name]["tensors"]}.items():
        for layer in range(SHARED["layers"]["num_hidden_layers"]):
            shapes[pattern.replace("*", str(layer))] = shape
    return head_weights(shapes)


def load(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> DsparkHead:
    head = DsparkHead.load(write_folder(folder, config, tensors), TARGET)
    return head.eval().requires_grad_(False)


def load_case(name: str, folder: Path) -> DsparkHead:
    return load(folder, config_of(name), tensors_of(name))


@torch.inference_mode()
def drafted(head: DsparkHead, others: int = 0) -> tuple[Tensor, Tensor | None]:
    """Return logits `[depth, vocab]` and confidences of the block at the anchor, after the text's own tokens.

    In the batch are `others` longer texts too. The states come in two parts.
    """
    runtime, states = BlockRuntime(head, torch.device("cpu")), target_states()
    rows = [
        Row(TEXT[: length + 1], SamplingParams())
        for length in (ANCHOR, *range(ANCHOR + 2, ANCHOR + 2 + others))
    ]
    for start, end in ((0, 3), (3, len(TEXT))):
        received = [
            {layer: states[layer][start : min(end, len(row.tokens) - 1)] for layer in head.hidden_layers}
            for row in rows
        ]
        runtime.append(rows, received)
    block = runtime.run(rows, head.config.num_drafted)
    first = head.config.first_drafted
    lead = [
        TEXT[ANCHOR - 1]
        if head.markov_head is not None and head.markov_head.precedes_anchor
        else TEXT[ANCHOR]
    ]
    tokens = (lead * first + TEXT[ANCHOR:])[:BLOCK_SIZE]
    logits, confidences = [], []
    for depth in range(first, BLOCK_SIZE):
        before = torch.tensor([tokens[: depth + 1]] * len(rows))
        logits.append(head.vocabulary.to_target(runtime.logits(block, before))[0])
        if head.config.has_confidence:
            confidences.append(runtime.confidence(block, before)[0])
    return torch.stack(logits), torch.stack(confidences) if confidences else None


def largest_difference(head: DsparkHead, name: str, others: int = 0) -> float:
    logits, confidences = drafted(head, others)
    expected = torch.tensor(CASES[name]["logits"])
    if expected.shape[-1] < logits.shape[-1]:
        expected = head.vocabulary.to_target(expected)
    difference = (logits.clamp_min(-1e9) - expected.clamp_min(-1e9)).abs().max()
    if "confidence" in CASES[name]:
        if confidences is None:
            return torch.inf
        difference = difference.maximum((confidences - torch.tensor(CASES[name]["confidence"])).abs().max())
    return float(difference)


@every_case
@pytest.mark.parametrize("others", [0, 2])
def test_the_logits_are_those_of_the_publishers_code(name: str, others: int, tmp_path: Path) -> None:
    assert largest_difference(load_case(name, tmp_path), name, others) < 1e-5


@every_case
def test_the_folder_is_known_as_that_of_a_block_drafter(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, config_of(name), tensors_of(name))
    with pytest.raises(CheckpointError, match=f"drafter of the kind dspark; write dspark:{tmp_path}"):
        refuse_head(str(tmp_path))


@every_case
def test_a_written_head_is_read_unchanged(name: str, tmp_path: Path) -> None:
    load_case(name, tmp_path / "published").save(tmp_path / "written", target="tiny")
    head = DsparkHead.load(tmp_path / "written", TARGET).eval().requires_grad_(False)
    assert largest_difference(head, name) < 1e-5


UNREAD = (
    "speculators_model_type", "architectures", "max_position_embeddings", "use_sliding_window", "num_jacobi_passes",
    "num_anchors", "attention_mode", "projector_type", "tie_word_embeddings", "model_type",
)  # fmt: skip
"""Fields that mark a format, or change nothing."""
ALTERED: dict[str, object] = {
    "aux_hidden_state_layer_ids": [1, 2, 3], "target_layer_ids": [0, 1, 2], "mask_token_id": 3, "block_size": 3,
    "attention_bias": True, "layer_types": ["full_attention", "sliding_attention"], "sliding_window": BLOCK_SIZE,
    "num_target_layers": 4, "head_dim": 4, "hidden_act": "gelu", "hidden_size": 8, "intermediate_size": 8,
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "rms_norm_eps": 0.5, "vocab_size": 14,
    "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}, "draft_vocab_size": 5, "markov_rank": 2,
    "conv_kernel_size": 1, "conv_group_size": 8, "selector_rank": 2, "selector_top_k": 2, "xpress_rank": 2,
    "xpress_mlp_ratio": 1, "emb_dim": 4, "gru_hidden_dim": 3, "pure_draft_prefix_len": 2,
    "swa_window_size": 4, "markov_head_type": "other",
}  # fmt: skip
"""Another value of each field that is not boolean."""


def every_field() -> list[tuple[str, str]]:
    """Return the fields of each case, nested ones as paths."""
    fields: list[tuple[str, str]] = []
    for name in CASES:
        config = config_of(name)
        for outer in ("", "transformer_layer_config", "dflash_config"):
            for key in config.get(outer, {}) if outer else config:
                if not isinstance(config.get(key), dict) or key == "rope_parameters":
                    fields.append((name, f"{outer}.{key}" if outer else key))
    return [(name, field) for name, field in fields if field.rpartition(".")[2] not in UNREAD]


@pytest.mark.parametrize(("name", "field"), every_field())
def test_no_field_is_ignored(name: str, field: str, tmp_path: Path) -> None:
    """A head with another value is refused, or computes something else."""
    config = config_of(name)
    *outer, key = field.split(".")
    inner = config
    for part in outer:
        inner = inner[part]
    value = inner[key]
    inner[key] = not value if isinstance(value, bool) else ALTERED[key]
    if key in ("layer_types", "sliding_window") and "sliding_attention" not in str(value):
        inner["sliding_window"] = BLOCK_SIZE
    if "confidence" in key and "confidence" not in CASES[name]:
        pytest.skip("without a confidence head it changes nothing")
    if key == "sliding_window_non_causal" and "sliding_attention" not in str(config):
        pytest.skip("without windows it changes nothing")
    try:
        head = load(tmp_path, config, tensors_of(name))
    except CheckpointError:
        return
    if head.config.num_drafted != len(CASES[name]["logits"]):
        return
    assert largest_difference(head, name) > 1e-4


# What other publishers write about a head that one of the cases describes.


def nested(config: Config, **fields: object) -> None:
    config["dflash_config"].update(fields)


def test_the_size_of_a_block_may_be_nested(tmp_path: Path) -> None:
    config = config_of("z-lab dflash")
    nested(config, block_size=config.pop("block_size"))
    assert largest_difference(load(tmp_path, config, tensors_of("z-lab dflash")), "z-lab dflash") < 1e-5


def test_layers_of_the_target_that_are_not_named_are_evenly_spread(tmp_path: Path) -> None:
    config = config_of("z-lab dflash")
    del config["dflash_config"]["target_layer_ids"]
    tensors = tensors_of("z-lab dflash")
    tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * WIDTH]
    assert load(tmp_path, config, tensors).config.hidden_layers == (
        2,
        1,
    )  # as z-lab computes it for three layers


@pytest.mark.parametrize(("field", "is_nested"), [("causal", True), ("is_causal", False)])
def test_blocks_without_windows_may_be_causal(field: str, is_nested: bool, tmp_path: Path) -> None:
    """The first mask position sees the same, later ones do not."""
    config = config_of("z-lab dflash")
    (config["dflash_config"] if is_nested else config)[field] = True
    head = load(tmp_path, config, tensors_of("z-lab dflash"))
    expected = torch.tensor(CASES["z-lab dflash"]["logits"])
    assert all(kind.is_causal and not kind.window for kind in head.config.layer_attention)
    logits, _ = drafted(head)
    torch.testing.assert_close(logits[-1:, :1].isfinite(), expected[-1:, :1].isfinite())
    assert (logits - expected).abs().max() > 1e-3
    head.save(tmp_path / "saved")
    again = DsparkHead.load(tmp_path / "saved", TARGET).eval().requires_grad_(False)
    torch.testing.assert_close(drafted(again)[0], logits)


def test_heads_for_other_families_have_layers_like_those_of_qwen3(tmp_path: Path) -> None:
    """Speculators copies the target's model type."""
    config = config_of("speculators dflash")
    config["transformer_layer_config"]["model_type"] = "llama"
    head = load(tmp_path, config, tensors_of("speculators dflash"))
    assert largest_difference(head, "speculators dflash") < 1e-5


def test_dflash2_of_z_lab_nests_its_fields(tmp_path: Path) -> None:
    name = "speculators dflash2"
    config, tensors = config_of(name), tensors_of(name)
    layers = layers_of(config) | {"layer_types": ["full_attention"] * 2}
    fields = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "mask_token_id")
    published = {
        **layers,
        "architectures": ["DFlash2DraftModel"],
        "num_target_layers": NUM_LAYERS,
        "dflash_config": {
            **{field: config[field] for field in fields},
            "target_layer_ids": [layer - 1 for layer in config["aux_hidden_state_layer_ids"]],
            "block_size": BLOCK_SIZE,
        },
    }
    config["transformer_layer_config"] = layers
    expected, _ = drafted(load(tmp_path / "speculators", config, tensors))
    head = load(tmp_path / "z-lab", published, tensors)
    assert torch.equal(drafted(head)[0], expected)
    head.save(tmp_path / "saved")
    again = DsparkHead.load(tmp_path / "saved", TARGET).eval().requires_grad_(False)
    assert torch.equal(drafted(again)[0], expected)


@pytest.mark.parametrize("name", ["deepspec dspark", "specforge dspark", "speculators dspark with windows"])
def test_a_head_without_the_tensors_of_its_confidence_head_drafts_without(name: str, tmp_path: Path) -> None:
    tensors = {key: part for key, part in tensors_of(name).items() if "confidence" not in key}
    head = load(tmp_path, config_of(name), tensors)
    assert not head.config.has_confidence
    logits, _ = drafted(head)
    torch.testing.assert_close(logits, torch.tensor(CASES[name]["logits"]), atol=1e-5, rtol=0)


def with_other_mask(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a head with its own embeddings, where the mask token's is another."""
    embeddings = target_embeddings()
    embeddings[MASK_TOKEN] = torch.linspace(-1, 1, WIDTH)
    return {**tensors, "embed_tokens.weight": embeddings}


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_embedding_of_the_mask_token_may_lie_beside_the_head(is_bare: bool, tmp_path: Path) -> None:
    config, tensors = config_of("z-lab dflash"), tensors_of("z-lab dflash")
    expected, _ = drafted(load(tmp_path / "own", config, with_other_mask(tensors)))
    embedding = torch.linspace(-1, 1, WIDTH)
    (tmp_path / "beside").mkdir()
    stored = embedding[None] if is_bare else {"mask_token_id": MASK_TOKEN, "embedding": embedding}
    torch.save(stored, tmp_path / "beside" / "mask_embedding.pt")
    head = load(tmp_path / "beside", config, tensors)
    assert (expected - torch.tensor(CASES["z-lab dflash"]["logits"])).abs().max() > 1e-3
    torch.testing.assert_close(drafted(head)[0], expected)
    head.save(tmp_path / "saved")
    again = DsparkHead.load(tmp_path / "saved", TARGET).eval().requires_grad_(False)
    torch.testing.assert_close(drafted(again)[0], expected)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (
            {"mask_token_id": 3, "embedding": torch.zeros(WIDTH)},
            f"for the token 3, which should be {MASK_TOKEN}",
        ),
        ({"mask_token_id": MASK_TOKEN}, "mask_embedding.pt without a tensor"),
        (torch.zeros(3), r"mask_embedding of shape \[3\] instead of \[16\]"),
    ],
)
def test_another_embedding_of_a_mask_token_is_refused(stored: object, message: str, tmp_path: Path) -> None:
    torch.save(stored, tmp_path / "mask_embedding.pt")
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, config_of("z-lab dflash"), tensors_of("z-lab dflash"))


def test_weights_in_a_pickle_are_read_beside_an_embedding_of_the_mask_token(tmp_path: Path) -> None:
    config, tensors = config_of("z-lab dflash"), tensors_of("z-lab dflash")
    load(tmp_path, config, tensors)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    torch.save(target_embeddings()[MASK_TOKEN], tmp_path / "mask_embedding.pt")
    head = DsparkHead.load(tmp_path, TARGET).eval().requires_grad_(False)
    assert largest_difference(head, "z-lab dflash") < 1e-5
    (tmp_path / "mask_embedding.pt").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match="readable weights in"):
        DsparkHead.load(tmp_path, TARGET)


def test_a_head_may_have_more_tokens_than_its_target(tmp_path: Path) -> None:
    """Its mask token is one of them; the others are never drafted."""
    name = "deepspec gated dspark"
    config, tensors = config_of(name), tensors_of(name)
    expected, _ = drafted(load(tmp_path / "own", config, with_other_mask(tensors)))
    embeddings = torch.cat((target_embeddings(), torch.linspace(-1, 1, WIDTH)[None]))
    larger = {**tensors, "embed_tokens.weight": embeddings}
    for table in ("lm_head.weight", "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        larger[table] = torch.cat((tensors[table], torch.full((1, tensors[table].shape[1]), 9.0)))
    config |= {"vocab_size": VOCAB_SIZE + 1, "mask_token_id": VOCAB_SIZE}
    head = load(tmp_path / "larger", config, larger)
    assert head.embed_tokens is None  # all but the mask token's are the target's
    torch.testing.assert_close(drafted(head)[0], expected)
    head.save(tmp_path / "saved")
    again = DsparkHead.load(tmp_path / "saved", TARGET).eval().requires_grad_(False)
    torch.testing.assert_close(drafted(again)[0], expected)


def test_copies_of_the_targets_embeddings_are_dropped(tmp_path: Path) -> None:
    tensors = tensors_of("deepspec dspark")
    assert load(tmp_path / "own", config_of("deepspec dspark"), tensors).embed_tokens is not None
    tensors["embed_tokens.weight"] = target_embeddings()
    assert load(tmp_path / "copy", config_of("deepspec dspark"), tensors).embed_tokens is None


def test_a_head_may_be_narrower_than_its_target(tmp_path: Path) -> None:
    """It has embeddings and an LM head of its own; columns of zeros widen the fusion."""
    name = "deepspec dspark"
    config, tensors = config_of(name), tensors_of(name)
    wide = 3 * WIDTH
    states = target_states()
    tensors["fc.weight"] = functional.pad(
        tensors["fc.weight"].unflatten(1, (3, WIDTH)), (0, wide - WIDTH)
    ).flatten(1)
    target = TargetModel(**{**vars(TARGET), "width": wide})
    write_folder(tmp_path, config | {"target_hidden_size": wide}, tensors)
    head = DsparkHead.load(tmp_path, target).eval().requires_grad_(False)
    joined = torch.cat([functional.pad(states[layer], (0, wide - WIDTH)) for layer in head.hidden_layers], -1)
    narrow = load(tmp_path / "narrow", config_of(name), tensors_of(name))
    expected = narrow.features({layer: states[layer] for layer in narrow.hidden_layers})
    torch.testing.assert_close(head.hidden_norm(head.fc(joined)), expected)
    for missing in ("embed_tokens.weight", "lm_head.weight"):
        write_folder(
            tmp_path,
            config | {"target_hidden_size": wide},
            {k: v for k, v in tensors.items() if k != missing},
        )
        with pytest.raises(
            CheckpointError, match=r"embed_tokens.weight and lm_head.weight of the width 16 .* width 48"
        ):
            DsparkHead.load(tmp_path, target)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("dflash_config.attention_sink_bias", True, "whose dflash_config.attention_sink_bias is .* got True"),
        ("add_swa_attention_sink_bias", True, "whose add_swa_attention_sink_bias is .* got True"),
        (
            "dflash_config.attention_value_scale",
            0.7,
            "whose dflash_config.attention_value_scale is .* got 0.7",
        ),
        (
            "dflash_config.use_aux_hidden_state",
            False,
            "whose dflash_config.use_aux_hidden_state is .* got False",
        ),
        (
            "dflash_config.input_embedding_scale",
            4.0,
            "whose dflash_config.input_embedding_scale is .* got 4.0",
        ),
        ("dflash_config.output_multiplier", 0.5, "whose dflash_config.output_multiplier is .* got 0.5"),
        ("final_logit_softcapping", 30.0, "whose final_logit_softcapping is .* got 30.0"),
        ("logit_scale", 0.5, "whose logit_scale is .* got 0.5"),
        ("is_neox_style", False, "whose is_neox_style is .* got False"),
        ("dflash_config.projector_type", "other", "projector_type dflash, .* got 'other'"),
        ("dflash_config.new_field", 1, "known in .* got dflash_config.new_field of 1"),
        ("num_target_layers", 36, "number of layers of 3, got one for 36"),
        ("dflash_config.use_swa", True, "the field 'sliding_window'"),
        ("dflash_config.target_layer_ids", [0, 1, 3], r"reads states 0 to 3 .* got \[1, 2, 4\]"),
    ],
)
def test_what_would_change_the_logits_is_refused_by_name(
    field: str, value: object, message: str, tmp_path: Path
) -> None:
    config = config_of("z-lab dflash")
    *outer, key = field.split(".")
    (config[outer[0]] if outer else config)[key] = value
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, config, tensors_of("z-lab dflash"))


def test_a_window_smaller_than_a_block_is_refused(tmp_path: Path) -> None:
    """The publishers' code differs in whether the window ends inside the block."""
    name = "specforge dflash with windows"
    with pytest.raises(
        CheckpointError, match="a sliding window of 3, which should be no smaller than a block"
    ):
        load(tmp_path, config_of(name) | {"sliding_window": 3}, tensors_of(name))


def test_neutral_values_change_nothing(tmp_path: Path) -> None:
    config = config_of("z-lab dflash") | {"logit_scale": 1.0, "is_neox_style": True}
    nested(
        config, attention_sink_bias=False, attention_value_scale=1.0, projector_type="dflash", use_swa=False
    )
    assert largest_difference(load(tmp_path, config, tensors_of("z-lab dflash")), "z-lab dflash") < 1e-5


# Drafters give the head the right tokens.

BLOCK_KINDS = ("dspark", "dspark-windows", "dspark-rnn", "dflash2", "xpress", "domino")


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("shape", [None, StaticTree((3, 2, 1))], ids=["chain", "tree"])
def test_drafts_are_drawn_after_their_own_paths(kind: str, shape: StaticTree | None) -> None:
    target = TransformersRuntime(tiny_target(seed=2).float())
    drafter = HEADS[kind](target, shape)
    assert isinstance(drafter, DsparkDrafter)
    row = Row([3, 9, 4, 1, 7, 2, 30, 8], SamplingParams(temperature=1.0, max_tokens=40), seed=5)
    target.request_hidden_states(drafter.hidden_layers)
    with torch.inference_mode():
        drafter.begin([row], target.begin([row]))
        drafter.prepare([row], [0])
        budgets = Budgets([3], lambda *told: [True], uses_probs=False)
        draft = drafter.propose([row], budgets, KeyedNoise.from_rows([row]))
        block = drafter.runtime.run([row], drafter.head.config.num_drafted)
        assert draft.probs is not None
        assert draft.num_nodes >= 3
        for node in range(draft.num_nodes):
            path, parent = [], int(draft.parents[0, node])
            while parent >= 0:
                path.insert(0, int(draft.tokens[0, parent]))
                parent = int(draft.parents[0, parent])
            lead = [row.tokens[-2] if kind == "xpress" else row.pending] * drafter.head.config.first_drafted
            before = torch.tensor([[*lead, row.pending, *path]])
            expected = drafter.runtime.logits(block, before)[0].softmax(-1)
            torch.testing.assert_close(draft.probs[0, node], expected.to(draft.probs), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in BLOCK_KINDS if kind != "dflash2"])
def test_heads_are_trained_on_the_logits_that_they_draft_with(kind: str) -> None:
    target = TransformersRuntime(tiny_target(seed=2).float())
    head = HEADS[kind](target, None).head.eval()  # type: ignore[attr-defined]
    text = [3, 9, 4, 1, 7, 2, 30, 8, 5, 5, 1, 12]
    with torch.no_grad():
        found = target.model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    states = {**dict(enumerate(found)), -1: found[-1]}
    counts = torch.ones(1, len(text), dtype=torch.bool)
    anchors, chosen = head._anchors(counts)
    recorder = Recorder()
    head.learn(TrainingBatch(torch.tensor([text]), counts, states), target.embedding_and_head(), recorder)
    said = iter(recorder.said[0])
    first = head.config.first_drafted
    for anchor in anchors[0][chosen[0]].tolist():
        runtime = BlockRuntime(head, torch.device("cpu"))
        row = Row(text[: anchor + 1], SamplingParams())
        with torch.inference_mode():
            runtime.append([row], [{layer: states[layer][0, :anchor] for layer in head.hidden_layers}])
            block = runtime.run([row], head.config.num_drafted)
            lead = [text[anchor - 1] if kind == "xpress" else text[anchor]] * first
            for depth in range(min(head.config.num_drafted, len(text) - 1 - anchor)):
                before = torch.tensor([[*lead, *text[anchor : anchor + depth + 1]]])
                torch.testing.assert_close(next(said), runtime.logits(block, before)[0], atol=1e-4, rtol=1e-4)
    assert next(said, None) is None
