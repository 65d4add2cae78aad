"""Medusa: published formats, logits, training, and refused folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from head_formats import (
    MODEL,
    TARGET,
    TEXT,
    VOCAB_SIZE,
    WIDTH,
    Recorder,
    beside,
    draft_for,
    drafted,
    falls,
    head_of,
    lesson_of,
    named,
    random_tensors,
    ready,
    same_draft,
    states_of,
    with_field,
    without,
    without_field,
    write_folder,
)
from torch import Tensor
from torch.nn.functional import silu

from secondguess.core import Row, Verdict
from secondguess.errors import BadInputError, CheckpointError
from secondguess.heads.medusa import MedusaConfig, MedusaHead
from secondguess.sampling import SamplingParams

NUM_HEADS, NUM_LAYERS, NUM_WORDS = 3, 2, 11
WORDS = torch.arange(NUM_WORDS) * 2 + 3
Parts = dict[str, Tensor]


def original(folder: Path) -> tuple[Path, Parts]:
    """As the paper's code writes it: a pickle of tensors."""
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(NUM_HEADS):
        for layer in range(NUM_LAYERS):
            shapes[f"{head}.{layer}.linear.weight"] = (WIDTH, WIDTH)
            shapes[f"{head}.{layer}.linear.bias"] = (WIDTH,)
        shapes[f"{head}.{NUM_LAYERS}.weight"] = (VOCAB_SIZE, WIDTH)
    tensors = random_tensors(shapes)
    config = {
        "medusa_num_heads": NUM_HEADS,
        "medusa_num_layers": NUM_LAYERS,
        "base_model_name_or_path": "tiny",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "medusa_lm_head.pt")
    return folder, {
        f"W{head}{layer}": tensors[f"{head}.{layer}.linear.weight"]
        for head in range(NUM_HEADS)
        for layer in range(NUM_LAYERS)
    } | {
        f"b{head}{layer}": tensors[f"{head}.{layer}.linear.bias"]
        for head in range(NUM_HEADS)
        for layer in range(NUM_LAYERS)
    } | {f"U{head}": tensors[f"{head}.{NUM_LAYERS}.weight"] for head in range(NUM_HEADS)}


def more_heads_than_its_configuration_says(folder: Path) -> tuple[Path, Parts]:
    """As heads were published."""
    folder, parts = original(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"medusa_num_heads": NUM_HEADS - 1}))
    return folder, parts


def original_without_outputs(folder: Path) -> tuple[Path, Parts]:
    """As the paper's code writes it since version 2."""
    folder, parts = original(folder)
    tensors = torch.load(folder / "medusa_lm_head.pt")
    torch.save(
        {name: each for name, each in tensors.items() if ".linear." in name}, folder / "medusa_lm_head.pt"
    )
    of_target = TARGET.model.get_output_embeddings().weight
    return folder, parts | {f"U{head}": of_target for head in range(NUM_HEADS)}


VLLM = {
    "model_type": "medusa",
    "num_heads": NUM_HEADS,
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": WIDTH,
    "vocab_size": VOCAB_SIZE,
    "truncated_vocab_size": VOCAB_SIZE,
}


def blocks_of(prefix: str = "", bias: bool = False) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}blocks.{head}.layers.{layer}.{part}": shape
        for head in range(NUM_HEADS)
        for layer in range(NUM_LAYERS)
        for part, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,)))
        if part == "weight" or bias
    }


def parts_of(tensors: Parts, outputs: list[str], prefix: str = "") -> Parts:
    """The tensors under the letters of the formula; a head without one of its own has the target's output matrix."""
    of_target = TARGET.model.get_output_embeddings().weight
    parts = {f"U{head}": tensors[name] if name else of_target for head, name in enumerate(outputs)}
    for name, tensor in tensors.items():
        pieces = name.removeprefix(prefix).split(".")
        if pieces[0] == "blocks":
            parts[f"{'W' if pieces[4] == 'weight' else 'b'}{pieces[1]}{pieces[3]}"] = tensor
    return parts


def vllm(folder: Path) -> tuple[Path, Parts]:
    shapes = blocks_of(bias=True) | {
        f"lm_heads.{head}.weight": (VOCAB_SIZE, WIDTH) for head in range(NUM_HEADS)
    }
    tensors = random_tensors(shapes)
    write_folder(folder, VLLM | {"medusa_fc_bias": True}, tensors)
    return folder, parts_of(tensors, [f"lm_heads.{head}.weight" for head in range(NUM_HEADS)])


def vllm_prefixed(folder: Path) -> tuple[Path, Parts]:
    prefix = "medusa_heads."
    shapes = blocks_of(prefix) | {
        f"{prefix}lm_heads.{head}.weight": (VOCAB_SIZE, WIDTH) for head in range(NUM_HEADS)
    }
    tensors = random_tensors(shapes)
    write_folder(folder, VLLM, tensors)
    return folder, parts_of(tensors, [f"{prefix}lm_heads.{head}.weight" for head in range(NUM_HEADS)], prefix)


def vllm_one_output(folder: Path) -> tuple[Path, Parts]:
    tensors = random_tensors(blocks_of() | {"lm_heads.0.weight": (VOCAB_SIZE, WIDTH)})
    write_folder(folder, VLLM | {"original_lm_head": True}, tensors)
    return folder, parts_of(tensors, ["lm_heads.0.weight"] * NUM_HEADS)


def shared_with_the_target(folder: Path) -> tuple[Path, Parts]:
    """As this package writes it."""
    tensors = random_tensors(blocks_of())
    write_folder(folder, VLLM | {"original_lm_head": True}, tensors)
    return folder, parts_of(tensors, [""] * NUM_HEADS)


def truncated(folder: Path) -> tuple[Path, Parts]:
    shapes = blocks_of() | {f"lm_heads.{head}.weight": (NUM_WORDS, WIDTH) for head in range(NUM_HEADS)}
    tensors = random_tensors(shapes)
    write_folder(folder, VLLM | {"truncated_vocab_size": NUM_WORDS}, tensors | {"token_map": WORDS})
    return folder, parts_of(tensors, [f"lm_heads.{head}.weight" for head in range(NUM_HEADS)])


def truncated_from_whole(folder: Path) -> tuple[Path, Parts]:
    """Whole matrices with a token map that selects rows."""
    shapes = blocks_of() | {f"lm_heads.{head}.weight": (VOCAB_SIZE, WIDTH) for head in range(NUM_HEADS)}
    tensors = random_tensors(shapes)
    write_folder(folder, VLLM | {"truncated_vocab_size": NUM_WORDS}, tensors | {"token_map": WORDS})
    parts = parts_of(tensors, [f"lm_heads.{head}.weight" for head in range(NUM_HEADS)])
    return folder, {name: part[WORDS] if name[0] == "U" else part for name, part in parts.items()}


FORMATS = {
    make.__name__: make
    for make in (
        original,
        more_heads_than_its_configuration_says,
        original_without_outputs,
        vllm,
        vllm_prefixed,
        vllm_one_output,
        shared_with_the_target,
        truncated,
        truncated_from_whole,
    )
}
every_format = pytest.mark.parametrize("format", FORMATS)


def formula(parts: Parts, state: Tensor, head: int) -> Tensor:
    """The paper's section 2.1.1, layer by layer."""
    for layer in range(NUM_LAYERS):
        product = parts[f"W{head}{layer}"] @ state
        if f"b{head}{layer}" in parts:
            product = product + parts[f"b{head}{layer}"]
        state = state + silu(product)
    said = parts[f"U{head}"] @ state
    if len(said) == VOCAB_SIZE:
        return said
    return torch.full((VOCAB_SIZE,), -torch.inf).index_put((WORDS,), said)


@every_format
def test_every_published_format_drafts_as_in_the_paper(format: str, tmp_path: Path) -> None:
    folder, parts = FORMATS[format](tmp_path / "head")
    draft = drafted(named(f"medusa:{folder}"), TARGET, length=9)
    assert draft.lengths.tolist() == [NUM_HEADS]
    state = states_of(TARGET, [TEXT])[-1][0, -2]  # of the token before pending
    expected = torch.stack([formula(parts, state, head) for head in range(NUM_HEADS)]).softmax(-1)
    torch.testing.assert_close(draft.probs[0], expected, atol=1e-5, rtol=1e-4)


@every_format
def test_a_saved_head_drafts_the_same(format: str, tmp_path: Path) -> None:
    folder, _ = FORMATS[format](tmp_path / "head")
    read = named(f"medusa:{folder}")
    before = drafted(read, TARGET)
    TARGET.free()
    head_of(read).save(tmp_path / "saved", target="tiny")
    assert same_draft(before, drafted(named(f"medusa:{tmp_path / 'saved'}"), TARGET))


def test_saved_tensors_have_the_names_of_vllm(tmp_path: Path) -> None:
    head = MedusaHead.fresh(MODEL, num_heads=2, num_layers=1, seed=0)
    head.save(tmp_path, target="tiny")
    assert set(head.state_dict()) == {"blocks.0.layers.0.weight", "blocks.1.layers.0.weight"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config == VLLM | {
        "architectures": ["MedusaModel"],
        "base_model_name_or_path": "tiny",
        "num_heads": 2,
        "num_hidden_layers": 1,
        "medusa_fc_bias": False,
        "original_lm_head": True,
    }


def test_trees_have_one_distribution_per_level(tmp_path: Path) -> None:
    folder, parts = vllm(tmp_path / "head")
    draft = drafted(named(f"medusa:{folder},tree=3x2x1"), TARGET)
    state = states_of(TARGET, [TEXT])[-1][0, -2]
    assert draft.lengths.tolist() == [3 + 6 + 6]
    for node, depth in enumerate([0] * 3 + [1] * 6 + [2] * 6):
        expected = formula(parts, state, depth).softmax(-1)
        torch.testing.assert_close(draft.probs[0, node], expected, atol=1e-5, rtol=1e-4)


def test_the_next_draft_starts_at_the_accepted_path(tmp_path: Path) -> None:
    """After a verdict the state is that of the path's last node, on any branch."""
    folder, parts = vllm(tmp_path / "head")
    drafter = named(f"medusa:{folder},tree=2x2")
    row = ready(drafter, TARGET, TEXT)
    draft = draft_for(drafter, row, 2)
    path = [1, 4]
    with torch.inference_mode():
        hidden = TARGET.score([row], draft).hidden
        TARGET.keep([row], [path])
        row.commit([int(draft.tokens[0, node]) for node in path], 6)
        drafter.observe([row], Verdict([path], [6]), hidden)
    again = draft_for(drafter, row, 2)
    state = states_of(TARGET, [row.tokens])[-1][0, -2]
    torch.testing.assert_close(again.probs[0, 0], formula(parts, state, 0).softmax(-1), atol=1e-5, rtol=1e-4)


def test_there_is_no_draft_after_a_single_token(tmp_path: Path) -> None:
    folder, _ = vllm(tmp_path / "head")
    drafter = named(f"medusa:{folder}")
    row = ready(drafter, TARGET, TEXT[:1])
    assert drafter.candidates([row])[0][0].longest == 0
    assert draft_for(drafter, row, 4).num_nodes == 0


def test_candidates_report_the_number_of_heads(tmp_path: Path) -> None:
    folder, _ = vllm(tmp_path / "head")
    for name, longest in ((f"medusa:{folder}", NUM_HEADS), (f"medusa:{folder},tree=2x2", 2)):
        drafter = named(name)
        assert drafter.name == name
        assert drafter.candidates([ready(drafter, TARGET, TEXT)])[0][0].longest == longest
        TARGET.free()


def test_ended_rows_leave_no_state(tmp_path: Path) -> None:
    folder, _ = vllm(tmp_path / "head")
    drafter = named(f"medusa:{folder}")
    row = ready(drafter, TARGET, TEXT)
    drafter.release(row)
    drafter.release(Row([1], SamplingParams()))  # never began
    assert drafter.candidates([row])[0][0].longest == 0


@every_format
def test_training_logits_equal_draft_logits(format: str, tmp_path: Path) -> None:
    """Each depth's logits at the place of a row are those that drafting there has; the target's are of the token guessed."""
    folder, _ = FORMATS[format](tmp_path / "head")
    drafter = named(f"medusa:{folder}")
    recorder = Recorder()
    text = [*TEXT, 9, 1, 12]
    head_of(drafter).learn(lesson_of(TARGET, [text]), TARGET.embedding_and_head(), recorder)
    draft = drafted(drafter, TARGET, NUM_HEADS)
    known = WORDS if format.startswith("truncated") else torch.arange(VOCAB_SIZE)
    with torch.no_grad():
        dists = TARGET.model(torch.tensor([text]), use_cache=False).logits[0].softmax(-1)[:, known]
    before_pending = len(TEXT) - 2
    for depth in range(NUM_HEADS):
        said = recorder.said[depth][before_pending].softmax(-1)
        torch.testing.assert_close(said, draft.probs[0, depth, known], atol=1e-5, rtol=1e-4)
        meant = recorder.meant[depth][before_pending]
        torch.testing.assert_close(meant, dists[len(TEXT) - 1 + depth], atol=1e-4, rtol=1e-4)


def test_only_tokens_of_the_target_are_learned() -> None:
    head = MedusaHead.fresh(MODEL, num_heads=2, seed=1)
    training_batch = lesson_of(TARGET, [TEXT], num_prompt=len(TEXT) - 1)  # the last token alone
    recorder = Recorder()
    marks = head.learn(training_batch, TARGET.embedding_and_head(), recorder)
    for depth, loss in enumerate(marks.losses):
        expected, overlap = Recorder()(recorder.meant[depth], recorder.said[depth])
        assert len(expected) == 1
        torch.testing.assert_close(loss.detach(), expected[0])
        torch.testing.assert_close(marks.accepted[depth], overlap[0])


@pytest.mark.parametrize("num_layers", [1, 2])
def test_learning_lowers_the_loss(num_layers: int) -> None:
    head = MedusaHead.fresh(MODEL, num_heads=2, num_layers=num_layers, seed=1)
    before, after = falls(head, TARGET)
    assert after < 0.9 * before


def test_layers_of_a_new_head_get_different_gradients() -> None:
    head = MedusaHead.fresh(MODEL, num_heads=1, num_layers=2, seed=1)
    head.learn(lesson_of(TARGET, [TEXT]), TARGET.embedding_and_head(), Recorder()).losses[0].backward()
    first, second = (layer.weight for layer in head.blocks[0].layers)
    assert not torch.equal(first, second)
    assert not torch.equal(first.grad, second.grad)


def test_the_seed_determines_a_new_head() -> None:
    one, same, other = (MedusaHead.fresh(MODEL, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def truncated_without_matrix(config: dict[str, object], tensors: Parts) -> None:
    config |= {"original_lm_head": True, "truncated_vocab_size": 5}
    for head in range(NUM_HEADS):
        del tensors[f"lm_heads.{head}.weight"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("blocks.1.layers.0.weight"), "missing blocks.1.layers.0.weight"),
        (without("lm_heads.2.weight"), "missing lm_heads.2.weight"),
        (beside("blocks.3.layers.0.weight", WIDTH, WIDTH), "unknown blocks.3.layers.0.weight"),
        (beside("blocks.0.layers.0.weight", WIDTH, 8), r"blocks.0.layers.0.weight of shape \[32, 8\]"),
        (with_field(hidden_size=64), "width of 32, got one for 64"),
        (with_field(vocab_size=300), "vocabulary of 31, got one for 300"),
        (with_field(num_heads=0), "num_heads of 0"),
        (with_field(num_heads="3"), "num_heads of '3'"),
        (with_field(num_heads=100), "between 1 and 64, got 100"),
        (with_field(medusa_fc_bias="no"), "medusa_fc_bias of 'no'"),
        (without_field("num_hidden_layers"), "the field 'num_hidden_layers'"),
        (with_field(model_type="hydra"), "got the model_type 'hydra'"),
        (with_field(truncated_vocab_size=5), "token_map of 5 tokens .* got no token_map"),
        (truncated_without_matrix, "an lm_head.weight for the reduced draft vocabulary"),
    ],
)
def test_an_incompatible_folder_is_refused_with_the_reason(spoil, message: str, tmp_path: Path) -> None:
    tensors = random_tensors(
        blocks_of() | {f"lm_heads.{head}.weight": (VOCAB_SIZE, WIDTH) for head in range(NUM_HEADS)}
    )
    config = dict(VLLM)
    spoil(config, tensors)
    write_folder(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        named(f"medusa:{tmp_path}")


@pytest.mark.parametrize("words", [[3, 3, 5], [3, 5, VOCAB_SIZE], [-1, 3, 5]])
def test_an_invalid_token_map_is_refused(words: list[int], tmp_path: Path) -> None:
    shapes = blocks_of() | {f"lm_heads.{head}.weight": (3, WIDTH) for head in range(NUM_HEADS)}
    tensors = random_tensors(shapes) | {"token_map": torch.tensor(words)}
    write_folder(tmp_path, VLLM | {"truncated_vocab_size": 3}, tensors)
    with pytest.raises(CheckpointError, match="different tokens between 0 and 30"):
        named(f"medusa:{tmp_path}")


def test_an_original_folder_for_another_target_is_refused(tmp_path: Path) -> None:
    folder, _ = original(tmp_path / "head")
    tensors = torch.load(folder / "medusa_lm_head.pt")
    tensors[f"0.{NUM_LAYERS}.weight"] = torch.zeros(300, WIDTH)
    torch.save(tensors, folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match="vocabulary of 31, got one for 300"):
        named(f"medusa:{folder}")
    del tensors[f"0.{NUM_LAYERS}.weight"]
    torch.save(tensors, folder / "medusa_lm_head.pt")
    with pytest.raises(CheckpointError, match=r"missing lm_heads\.0\.weight"):
        named(f"medusa:{folder}")


def test_invalid_configurations_are_refused() -> None:
    with pytest.raises(BadInputError, match="per head, one for all or none, got 2 for 3 heads"):
        MedusaConfig(num_heads=3, num_layers=1, num_outputs=2)


def test_unknown_options_of_medusa_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match="one of the options tree"):
        named(f"medusa:{tmp_path},speed=3")
