"""EAGLE heads in each published dialect: logits of the reference, and no field is overlooked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_dialects import (
    DIALECTS,
    TEXT,
    VOCAB_SIZE,
    WIDTH,
    Dialect,
    changed,
    leaves,
    plain_logits,
    target_model,
)
from torch import Tensor

from checkpoints import random_llama
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.eagle import EagleDrafter
from secondguess.errors import BadInputError, CheckpointError, SecondGuessError, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.eagle import Eagle1Head, EagleHead, load_eagle
from secondguess.heads.fields import HARMLESS
from secondguess.heads.folders import refuse_head
from secondguess.heads.learning import TrainingBatch
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

LENGTH, NUM_DRAFTED = 12, 4
TOLERANCE = 1e-5
every_dialect = pytest.mark.parametrize("name", DIALECTS)


def load(folder: Path) -> EagleHead | Eagle1Head:
    runtime = TransformersRuntime(target_model(torch.float32))
    return load_eagle(folder, TargetModel.from_runtime(runtime)).float()


def drafted(head: EagleHead | Eagle1Head) -> tuple[Tensor, EagleDrafter]:
    """Return the logits `[depth, vocab]` of a chain in float32, and the drafter."""
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
    return torch.stack(said).clone(), drafter


def expected(dialect: Dialect) -> Tensor:
    with torch.no_grad():
        return torch.stack([plain_logits(dialect, TEXT, LENGTH, depth) for depth in range(NUM_DRAFTED)])


def largest_difference(found: Tensor, reference: Tensor) -> float:
    assert torch.equal(found.isfinite(), reference.isfinite())
    covered = reference.isfinite()
    return float((found.double()[covered] - reference[covered]).abs().max())


@every_dialect
def test_a_dialect_has_the_logits_of_its_publisher(name: str, tmp_path: Path) -> None:
    dialect = DIALECTS[name]
    found, _ = drafted(load(dialect.write(tmp_path)))
    assert largest_difference(found, expected(dialect)) <= TOLERANCE


@every_dialect
def test_a_dialect_is_written_and_read_back(name: str, tmp_path: Path) -> None:
    head = load(DIALECTS[name].write(tmp_path / "from"))
    logits, drafter = drafted(head)
    head.save(tmp_path / "to", "tiny")
    again, other = drafted(load(tmp_path / "to"))
    assert torch.equal(again, logits)
    assert drafter.head.windows == other.head.windows
    assert drafter.room(Row([1] * 90, SamplingParams())) == other.room(Row([1] * 90, SamplingParams()))


@every_dialect
def test_a_dialect_is_recognised_without_its_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"drafter of the kind eagle; write eagle:{tmp_path}"):
        refuse_head(str(DIALECTS[name].write(tmp_path)))


def outcome(folder: Path) -> Any:
    """Return everything that a field may change: logits, context, and draft length in training; or the refusal."""
    try:
        head = load(folder)
    except SecondGuessError as error:
        return str(error).replace(str(folder), "")
    logits, drafter = drafted(head)
    return logits.tolist(), drafter.runtime.context_length, head.num_steps


WITHOUT_EFFECT = {
    "SpecForge, a window of the target that is not used": {"sliding_window"},
    "Model-Optimizer, last state": {"eagle_config.eagle_aux_hidden_state_layer_ids"},
    "P-EAGLE of speculators": {"norm_output"},  # no output is read again
    "latent attention": {"num_key_value_heads"},  # all heads share one vector
    # no layer is sliding
    "DeepSpec": {"use_sliding_window"},
    "DeepSpec, three layers": {"use_sliding_window"},
    "SpecForge, normalised states": {"use_sliding_window"},
}
"""Fields that have no effect in one dialect."""
INERT = {"eagle_config.parallel_draft_heads_num_layers", "draft_num_hidden_layers", "max_window_layers"}
"""Fields that never have an effect in these dialects."""


@every_dialect
def test_every_field_matters_or_is_known_to_change_nothing(name: str, tmp_path: Path) -> None:
    """Each field is changed, alone; without an effect, a head of which the field is a part would be wrong."""
    dialect = DIALECTS[name]
    original = outcome(dialect.write(tmp_path / "original"))
    assert isinstance(original, tuple)
    overlooked = []
    for path, value in leaves(dialect.config):
        after = outcome(dialect.write(tmp_path / path, {path: changed(value)}))
        is_harmless = not HARMLESS.isdisjoint(path.split(".")) or path in INERT
        if after == original and not is_harmless and path not in WITHOUT_EFFECT.get(name, ()):
            overlooked.append(path)
    assert overlooked == []


@every_dialect
def test_an_unknown_field_is_refused_by_name_at_every_depth(name: str, tmp_path: Path) -> None:
    dialect = DIALECTS[name]
    outer = {"": None} | {path.rpartition(".")[0]: None for path, _ in leaves(dialect.config)}
    for place in outer:
        if not HARMLESS.isdisjoint(place.split(".")):
            continue
        path = f"{place}.residual_gain".removeprefix(".")
        folder = dialect.write(tmp_path / (place or "top"), {path: False})
        with pytest.raises(UnsupportedModelError, match=r"got (model\.)?\S*residual_gain of False"):
            load(folder)


@every_dialect
def test_an_unknown_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    dialect = DIALECTS[name]
    dialect.tensors["gain.weight"] = torch.ones(3)
    try:
        with pytest.raises(CheckpointError, match=r"got unknown gain\.weight"):
            load(dialect.write(tmp_path))
    finally:
        del dialect.tensors["gain.weight"]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "states beside others": (
        "Model-Optimizer",
        {"eagle_aux_hidden_state_layer_ids": [0, 2, 4]},
        r"states \[0, 2, 4\] beside the outputs of layers \[0, 2, 4\], which are other states",
    ),
    "a flag beside another": (
        "nested norm_before_fc",
        {"norm_before_fc": False},
        r"eagle_config\.norm_before_fc of True beside norm_before_fc of False",
    ),
    "no mask token": (
        "P-EAGLE",
        {"mask_token_id": None, "pard_token": None},
        "expected the field 'mask_token_id'",
    ),
    "a mask token outside": ("P-EAGLE", {"mask_token_id": 40, "pard_token": 40}, "the mask token"),
    "a norm before no fusion": (
        "Model-Optimizer, last state",
        {"eagle_config.norm_before_fc": True},
        "without a fusion",
    ),
    "no last norm": (
        "Model-Optimizer",
        {"eagle_config.use_last_layernorm": False},
        r"eagle_config\.use_last_layernorm is True in .*, got False",
    ),
    "a narrower head of nothing": ("authors", {"hidden_size": 24}, "width of 32, got one for 24"),
    "a window of no size": (
        "speculators, sliding",
        {"transformer_layer_config.sliding_window": None},
        "expected the sliding_window of layers with sliding_attention",
    ),
    "a window that is switched off": (
        "speculators, sliding",
        {"transformer_layer_config.use_sliding_window": False},
        "use_sliding_window of False",
    ),
    "windows of two sizes": ("window by use_swa", {"sliding_window": 5}, "a sliding_window of 5 beside"),
    "layers of another kind": (
        "speculators, sliding",
        {"transformer_layer_config.layer_types": ["linear_attention"]},
        "full_attention or sliding_attention",
    ),
    "layers of another target": ("layers of the target", {"num_hidden_layers": 40}, "number of layers of 8"),
    "layers of another target, DeepSpec": ("DeepSpec", {"num_target_layers": 36}, "number of layers of 8"),
    "biases that are missing": ("mlp_bias", {"attention_bias": True}, r"missing layers\.0\.self_attn"),
    "two thetas": (
        "authors",
        {"rope_scaling": {"rope_theta": 5.0}},
        "rope_theta of 10000.0 beside one of 5.0",
    ),
    "another field of a scaling": (
        "authors",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "beta_fast": 4.0}},
        r"got rope_scaling\.beta_fast of 4\.0",
    ),
    "quantised weights": (
        "authors",
        {"quantization_config": {"bits": 4}},
        r"got quantization_config\.bits of 4",
    ),
    "another vocabulary": ("padded", {"vocab_size": 2048, "draft_vocab_size": 2048}, "vocabulary of 31"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_itself_is_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    name, changes, message = REFUSED[case]
    with pytest.raises(SecondGuessError, match=message) as caught:
        load(DIALECTS[name].write(tmp_path, changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("has_own", [True, False])
def test_a_head_of_fewer_tokens_than_a_padded_target_drafts_those(has_own: bool, tmp_path: Path) -> None:
    """The target's logits have 64 columns, of which the head has the first 31."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 8}
    model = random_llama(vocab_size=64, bos_token_id=None, eos_token_id=None, **sizes)
    target = TargetModel.from_runtime(TransformersRuntime(model.float()))
    dialect = DIALECTS["Model-Optimizer, whole vocabulary"]
    embeddings = {"embed_tokens.weight": torch.ones(VOCAB_SIZE, WIDTH)} if has_own else {}
    head = load_eagle(replace(dialect, tensors=dialect.tensors | embeddings).write(tmp_path), target)
    assert head.logits(torch.randn(WIDTH)).isfinite().nonzero()[:, 0].tolist() == list(range(VOCAB_SIZE))
    embedded = head.embed(torch.tensor([VOCAB_SIZE - 1, VOCAB_SIZE, 63]))
    if has_own:
        assert embedded.sum(1).tolist() == [WIDTH, 0, 0]
    else:
        assert torch.equal(embedded, model.model.embed_tokens(torch.tensor([VOCAB_SIZE - 1, VOCAB_SIZE, 63])))


def test_a_head_drafts_no_further_than_its_context(tmp_path: Path) -> None:
    """Rows beyond it cost nothing: no states are kept for them, and nothing is prefilled."""
    head = load(DIALECTS["authors"].write(tmp_path, {"max_position_embeddings": 14}))
    target = TransformersRuntime(target_model(torch.float32))
    drafter = EagleDrafter(head, target, "head")
    rows = [Row(TEXT[:size], SamplingParams(max_tokens=16), seed=1) for size in (10, 18)]
    lengths = []
    components = Components(target, drafter, make_verifier("auto"), make_controller("fixed:3"))
    for _ in decode(components, rows):
        lengths.append((len(rows[0].tokens), drafter.room(rows[0])))
        assert drafter.room(rows[1]) == drafter.num_uncached(rows[1]) == 0
        if rows[1] in drafter._hidden_buffer._pieces:
            assert not drafter._hidden_buffer.has(rows[1])
    assert {room for size, room in lengths if size > 14} == {0}
    assert [room for size, room in lengths if size <= 14] == [15 - size for size, _ in lengths if size <= 14]
    assert len(rows[0].output) == 16


def test_a_head_that_drafts_in_parallel_is_not_trained_step_by_step(tmp_path: Path) -> None:
    head = load(DIALECTS["P-EAGLE"].write(tmp_path))
    with pytest.raises(BadInputError, match="drafts in parallel"):
        head.unroll(TrainingBatch(torch.tensor([TEXT]), torch.ones(1, len(TEXT), dtype=torch.bool), {}))


def test_the_vocabulary_of_the_reference_is_that_of_the_target() -> None:
    assert target_model().config.vocab_size == VOCAB_SIZE
