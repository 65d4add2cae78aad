"""DSpark: published formats, logits of a block, training, and refused folders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from head_formats import (
    MODEL,
    TARGET,
    TEXT,
    TREE,
    VOCAB_SIZE,
    WIDTH,
    Recorder,
    beside,
    draft_for,
    drafted,
    falls,
    head_of,
    lesson_of,
    many_texts,
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

from secondguess.controllers import make_controller
from secondguess.controllers.confidence import ConfidenceController, ConfidenceOptions
from secondguess.controllers.draft_probs import DraftProbs
from secondguess.core import Budgets, Draft, Row, Verdict
from secondguess.decode import Components, decode
from secondguess.drafters.dspark import DsparkDrafter
from secondguess.drafters.sampling_drafter import SamplingDrafter
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.heads.base import TargetModel
from secondguess.heads.dspark import NUM_ANCHORS, DsparkHead
from secondguess.proof.enumeration import enumerate_rounds, exact_dist, largest_difference, text_dist
from secondguess.runtime.modules.tiny import tiny_pair
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import KeyedNoise
from secondguess.verifiers import make_verifier

NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, MLP_SIZE, RANK, NUM_WORDS = 4, 2, 8, 40, 5, 11
THETA, EPS = 500.0, 1e-6
LAYERS = [0, 2, 3]
BLOCK, MASK = 4, 6
WORDS = torch.arange(NUM_WORDS) * 2 + 3
Parts = dict[str, Tensor]

DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "speculators_model_type": "dflash",
    "speculators_version": "0.5.0",
    "block_size": BLOCK,
    "aux_hidden_state_layer_ids": LAYERS,
    "mask_token_id": MASK,
    "draft_vocab_size": VOCAB_SIZE,
    "transformer_layer_config": {
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_SIZE,
        "intermediate_size": MLP_SIZE,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "layer_types": ["full_attention", "full_attention"],
    },
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": BLOCK - 1}],
        "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
    },
}
DSPARK = DFLASH | {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "sample_from_anchor": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def backbone() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (WIDTH, len(LAYERS) * WIDTH),
        "hidden_norm.weight": (WIDTH,),
        "norm.weight": (WIDTH,),
    }
    for layer in range(2):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (WIDTH,),
                "post_attention_layernorm": (WIDTH,),
                "self_attn.q_proj": (NUM_HEADS * HEAD_SIZE, WIDTH),
                "self_attn.k_proj": (NUM_KV_HEADS * HEAD_SIZE, WIDTH),
                "self_attn.v_proj": (NUM_KV_HEADS * HEAD_SIZE, WIDTH),
                "self_attn.o_proj": (WIDTH, NUM_HEADS * HEAD_SIZE),
                "self_attn.q_norm": (HEAD_SIZE,),
                "self_attn.k_norm": (HEAD_SIZE,),
                "mlp.gate_proj": (MLP_SIZE, WIDTH),
                "mlp.up_proj": (MLP_SIZE, WIDTH),
                "mlp.down_proj": (WIDTH, MLP_SIZE),
            }.items()
        }
    return shapes


def heads(num_words: int = VOCAB_SIZE, rank: int = RANK) -> dict[str, tuple[int, ...]]:
    return {
        "markov_head.markov_w1.weight": (VOCAB_SIZE, RANK),
        "markov_head.markov_w2.weight": (num_words, RANK),
        "confidence_head.proj.weight": (1, WIDTH + rank),
        "confidence_head.proj.bias": (1,),
    }


def dspark(folder: Path) -> tuple[Path, Parts]:
    tensors = random_tensors(backbone() | heads())
    return write_folder(folder, DSPARK, tensors), tensors


def with_the_targets_ends(folder: Path) -> tuple[Path, Parts]:
    """As it was first published: with copies of the target's embeddings and output matrix."""
    model = TARGET.model
    tensors = random_tensors(backbone() | heads())
    copies = {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach().clone(),
        "lm_head.weight": model.get_output_embeddings().weight.detach().clone(),
    }
    return write_folder(folder, DSPARK, tensors | copies), tensors


def truncated(folder: Path) -> tuple[Path, Parts]:
    tensors = random_tensors(backbone() | heads(NUM_WORDS) | {"lm_head.weight": (NUM_WORDS, WIDTH)})
    return write_folder(folder, DSPARK | {"draft_vocab_size": NUM_WORDS}, tensors | word_maps()), tensors


def word_maps() -> Parts:
    known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    known[WORDS] = True
    return {"d2t": WORDS - torch.arange(NUM_WORDS), "t2d": known}


def blind_confidence(folder: Path) -> tuple[Path, Parts]:
    """Its confidence does not see the token before."""
    tensors = random_tensors(backbone() | heads(rank=0))
    return write_folder(folder, DSPARK | {"confidence_head_with_markov": False}, tensors), tensors


def behind_the_anchor(folder: Path) -> tuple[Path, Parts]:
    """The first mask predicts the first node, and there is no confidence head."""
    shapes = {name: shape for name, shape in heads().items() if "confidence" not in name}
    tensors = random_tensors(backbone() | shapes)
    config = DSPARK | {
        "sample_from_anchor": False,
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    return write_folder(folder, config, tensors), tensors


def dflash(folder: Path) -> tuple[Path, Parts]:
    tensors = random_tensors(backbone())
    return write_folder(folder, DFLASH, tensors), tensors


FORMATS = {
    make.__name__: make
    for make in (dspark, with_the_targets_ends, truncated, blind_confidence, behind_the_anchor, dflash)
}
every_format = pytest.mark.parametrize("format", FORMATS)
FIRST = {"behind_the_anchor": 1, "dflash": 1}
"""Position in the block that predicts the first node, if it is not the anchor."""


def norm(states: Tensor, weight: Tensor) -> Tensor:
    return states / (states.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def turned(heads: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of `[position, head, size]`, as products of complex numbers."""
    half = HEAD_SIZE // 2
    angles = positions[:, None] * THETA ** (-torch.arange(half) / half)
    spun = torch.complex(heads[..., :half], heads[..., half:]) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    return torch.cat((spun.real, spun.imag), -1)


def block_states(parts: Parts, text: list[int]) -> Tensor:
    """Return the hidden states `[position, width]` of the block after `text`, one position, head and key at a time."""
    states = states_of(TARGET, [text])
    place = len(text) - 1
    features = norm(
        torch.cat([states[layer][0, :place] for layer in LAYERS], -1) @ parts["fc.weight"].T,
        parts["hidden_norm.weight"],
    )
    block = TARGET.model.get_input_embeddings().weight[[text[-1]] + [MASK] * (BLOCK - 1)]
    positions = torch.arange(place + BLOCK).float()
    for layer in range(2):
        weight = {
            name.removeprefix(f"layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in parts.items()
            if name.startswith(f"layers.{layer}.")
        }
        read = norm(block, weight["input_layernorm"])
        sources = torch.cat((features, read))
        keys = (sources @ weight["self_attn.k_proj"].T).view(-1, NUM_KV_HEADS, HEAD_SIZE)
        keys = turned(norm(keys, weight["self_attn.k_norm"]), positions)
        values = (sources @ weight["self_attn.v_proj"].T).view(-1, NUM_KV_HEADS, HEAD_SIZE)
        queries = (read @ weight["self_attn.q_proj"].T).view(-1, NUM_HEADS, HEAD_SIZE)
        queries = turned(norm(queries, weight["self_attn.q_norm"]), positions[place:])
        gathered = torch.empty(BLOCK, NUM_HEADS, HEAD_SIZE)
        for position in range(BLOCK):
            for head in range(NUM_HEADS):
                group = head // (NUM_HEADS // NUM_KV_HEADS)
                scores = keys[:, group] @ queries[position, head] / HEAD_SIZE**0.5
                gathered[position, head] = scores.softmax(0) @ values[:, group]
        block = block + gathered.flatten(1) @ weight["self_attn.o_proj"].T
        read = norm(block, weight["post_attention_layernorm"])
        gated = silu(read @ weight["mlp.gate_proj"].T) * (read @ weight["mlp.up_proj"].T)
        block = block + gated @ weight["mlp.down_proj"].T
    return norm(block, parts["norm.weight"]).detach()


def formula(parts: Parts, state: Tensor, before: int) -> Tensor:
    """Return the logits over the target's vocabulary after the token `before`."""
    output = parts.get("lm_head.weight", TARGET.model.get_output_embeddings().weight.detach())
    said = output @ state
    if "markov_head.markov_w1.weight" in parts:
        said = said + parts["markov_head.markov_w2.weight"] @ parts["markov_head.markov_w1.weight"][before]
    if len(said) == VOCAB_SIZE:
        return said
    return torch.full((VOCAB_SIZE,), -torch.inf).index_put((WORDS,), said)


def fresh_head(**sizes: object) -> DsparkHead:
    return DsparkHead.fresh(
        MODEL, **{"hidden_layers": LAYERS, "block_size": BLOCK, "markov_rank": RANK} | sizes
    )


@every_format
def test_every_published_format_drafts_as_in_the_paper(format: str, tmp_path: Path) -> None:
    folder, parts = FORMATS[format](tmp_path / "head")
    draft = drafted(named(f"dspark:{folder}"), TARGET, length=9)
    first = FIRST.get(format, 0)
    assert draft.lengths.tolist() == [BLOCK - first]
    states = block_states(parts, TEXT)[first:]
    before = [TEXT[-1], *draft.tokens[0, :-1].tolist()]
    expected = torch.stack([formula(parts, *pair) for pair in zip(states, before, strict=True)]).softmax(-1)
    torch.testing.assert_close(draft.probs[0], expected, atol=1e-5, rtol=1e-4)


@every_format
def test_a_saved_head_drafts_the_same(format: str, tmp_path: Path) -> None:
    folder, _ = FORMATS[format](tmp_path / "head")
    read = named(f"dspark:{folder}")
    before = drafted(read, TARGET)
    TARGET.free()
    head_of(read).save(tmp_path / "saved", target="tiny")
    assert same_draft(before, drafted(named(f"dspark:{tmp_path / 'saved'}"), TARGET))


def test_saved_tensors_have_the_names_of_speculators(tmp_path: Path) -> None:
    head = fresh_head(num_layers=2)
    head.save(tmp_path, target="tiny")
    assert set(head.state_dict()) == set(backbone() | heads())
    config = json.loads((tmp_path / "config.json").read_text())
    for field in (
        "architectures",
        "speculators_model_type",
        "block_size",
        "aux_hidden_state_layer_ids",
        "sample_from_anchor",
        "draft_vocab_size",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ):
        assert config[field] == DSPARK[field], field
    assert config["speculators_config"]["verifier"]["name_or_path"] == "tiny"
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == BLOCK
    assert config["transformer_layer_config"]["model_type"] == "qwen3"


@every_format
def test_nodes_of_a_tree_follow_their_own_parents(format: str, tmp_path: Path) -> None:
    folder, parts = FORMATS[format](tmp_path / "head")
    draft = drafted(named(f"dspark:{folder},tree=3x2x1"), TARGET)
    states = block_states(parts, TEXT)[FIRST.get(format, 0) :]
    assert draft.lengths.tolist() == [3 + 6 + 6]
    for node, depth in enumerate([0] * 3 + [1] * 6 + [2] * 6):
        parent = int(draft.parents[0, node])
        before = TEXT[-1] if parent < 0 else int(draft.tokens[0, parent])
        expected = formula(parts, states[depth], before).softmax(-1)
        torch.testing.assert_close(draft.probs[0, node], expected, atol=1e-5, rtol=1e-4)


def test_the_context_grows_by_the_accepted_tokens(tmp_path: Path) -> None:
    """Round after round, with a tree, a rejection and a round without a draft: the context is that of the text."""
    folder, parts = dspark(tmp_path / "head")
    drafter = named(f"dspark:{folder}")
    row = ready(drafter, TARGET, TEXT)
    tokens, parents = (torch.tensor([list(each)]) for each in zip(*TREE, strict=True))
    tree = Draft(tokens, parents, torch.tensor([len(TREE)]))
    for draft, path in ((tree, [1, 3, 5]), (tree, []), (Draft.empty(1), []), (tree, [1])):
        draft_for(drafter, row, 2)
        with torch.inference_mode():
            hidden = TARGET.score([row], draft).hidden
            TARGET.keep([row], [path])
            row.commit([int(draft.tokens[0, node]) for node in path], 6)
            drafter.observe([row], Verdict([path], [6]), hidden)
    again = draft_for(drafter, row, 1)
    state = block_states(parts, row.tokens)[0]
    expected = formula(parts, state, row.pending).softmax(-1)
    torch.testing.assert_close(again.probs[0, 0], expected, atol=1e-5, rtol=1e-4)


def test_rows_of_different_lengths_join_and_leave(tmp_path: Path) -> None:
    """Each row of a batch, whichever others there are or were, is drafted for as alone."""
    folder, parts = dspark(tmp_path / "head")
    drafter = named(f"dspark:{folder}")
    texts = [TEXT, TEXT[:2], TEXT[:1], many_texts(1, 40)[0], TEXT[3:9]]
    rows = [ready(drafter, TARGET, text) for text in texts]
    for gone in (rows[1], rows[4], Row([1], SamplingParams())):
        drafter.release(gone)
        TARGET.release(gone)
    for row in (rows[3], rows[0], ready(drafter, TARGET, TEXT[2:8])):
        draft = draft_for(drafter, row, 1)
        expected = formula(parts, block_states(parts, row.tokens)[0], row.pending).softmax(-1)
        torch.testing.assert_close(draft.probs[0, 0], expected, atol=1e-5, rtol=1e-4)
    assert draft_for(drafter, rows[2], 3).num_nodes == 0  # after a single token


def test_candidates_report_the_unread_tokens(tmp_path: Path) -> None:
    folder, _ = dspark(tmp_path / "head")
    drafter = named(f"dspark:{folder},tree=2x2")
    assert drafter.name == f"dspark:{folder},tree=2x2"
    row = Row(many_texts(1, 40)[0], SamplingParams(max_tokens=9))
    with torch.inference_mode():
        TARGET.request_hidden_states(drafter.hidden_layers)
        drafter.begin([row], TARGET.begin([row]))
        (before,) = drafter.candidates([row])[0]
        drafter.prepare([row], [0])
        (after,) = drafter.candidates([row])[0]
    assert (before.longest, before.num_uncached) == (2, 32)
    assert (after.longest, after.num_uncached) == (2, 0)


@pytest.mark.parametrize("format", ["dspark", "dflash"])
def test_drafts_end_with_the_context_that_a_head_was_made_for(format: str, tmp_path: Path) -> None:
    folder, _ = FORMATS[format](tmp_path / "head")
    config = json.loads((folder / "config.json").read_text())
    config["transformer_layer_config"]["max_position_embeddings"] = len(TEXT) + 2
    (folder / "config.json").write_text(json.dumps(config))
    drafter = named(f"dspark:{folder}")
    first, row = FIRST.get(format, 0), ready(drafter, TARGET, TEXT)
    for longest in (3 - first, 2 - first, 1 - first, 0, 0):
        (candidate,) = drafter.candidates([row])[0]
        assert (candidate.longest, draft_for(drafter, row, 9).num_nodes) == (max(0, longest),) * 2
        with torch.inference_mode():
            hidden = TARGET.score([row], Draft.empty(1)).hidden
            TARGET.keep([row], [[]])
            row.commit([], 6)
            drafter.observe([row], Verdict([[]], [6]), hidden)
    assert candidate.num_uncached == 0


@every_format
def test_training_logits_equal_draft_logits(format: str, tmp_path: Path) -> None:
    """Each depth's logits at a position are those of drafting there, after the same tokens."""
    folder, parts = FORMATS[format](tmp_path / "head")
    head = head_of(named(f"dspark:{folder}"))
    text = [*TEXT, 9, 1, 12, 3, 7]
    recorder = Recorder()
    training_batch = lesson_of(TARGET, [text], num_prompt=len(TEXT))
    anchors, chosen = head._anchors(training_batch.counts)
    head.learn(training_batch, TARGET.embedding_and_head(), recorder)
    known = WORDS if format == "truncated" else torch.arange(VOCAB_SIZE)
    with torch.no_grad():
        dists = TARGET.model(torch.tensor([text]), use_cache=False).logits[0].softmax(-1)[:, known]
    assert sorted(anchors[chosen].tolist()) == list(range(len(TEXT) - 1, len(text) - 1))
    shown = zip(recorder.said[0], recorder.meant[0], strict=True)
    for anchor in anchors[0].tolist():
        states = block_states(parts, text[: anchor + 1])[FIRST.get(format, 0) :]
        for depth, state in enumerate(states):
            if anchor + depth + 1 < len(text):
                expected = formula(parts, state, text[anchor + depth])[known]
                said, meant = next(shown)
                torch.testing.assert_close(said, expected, atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(meant, dists[anchor + depth], atol=1e-4, rtol=1e-4)


def test_acceptance_by_depth_counts_tokens_of_the_target() -> None:
    head = fresh_head().eval()
    training_batch = lesson_of(TARGET, [TEXT, TEXT[::-1]], num_prompt=len(TEXT) - 2)
    recorder = Recorder()
    marks = head.learn(training_batch, TARGET.embedding_and_head(), recorder)
    anchors, _ = head._anchors(training_batch.counts)
    assert anchors.sort().values.tolist() == [[len(TEXT) - 3, len(TEXT) - 2]] * 2
    nodes = anchors[..., None] + torch.arange(1, BLOCK + 1)
    depths = (nodes < len(TEXT)).nonzero()[:, 2]
    losses, overlap = Recorder()(recorder.meant[0], recorder.said[0])
    for depth in range(BLOCK):
        counted = depths == depth
        for found, each in ((marks.losses, losses), (marks.accepted, overlap)):
            expected = each[counted].mean() if counted.any() else torch.tensor(0.0)
            torch.testing.assert_close(found[depth].detach(), expected)


def test_learning_lowers_the_loss() -> None:
    head = fresh_head(num_layers=1, seed=1)
    before, after = falls(head, TARGET)
    assert after < 0.9 * before


def test_the_confidence_head_learns_the_acceptance_probability(tmp_path: Path) -> None:
    """Alone, on top of a frozen drafter: from a loss like a coin's to near the entropy of the truth."""
    folder, _ = dspark(tmp_path / "head")
    head = head_of(named(f"dspark:{folder}"))
    for weight in head.confidence_head.parameters():
        torch.nn.init.zeros_(weight).requires_grad_(True)
    training_batch, embedding_and_head = lesson_of(TARGET, many_texts()), TARGET.embedding_and_head()
    optimiser = torch.optim.Adam(head.confidence_head.parameters(), lr=3e-2)
    losses = []
    for _ in range(60):
        marks = head.learn(training_batch, embedding_and_head, Recorder())
        losses.append(marks.extra.detach())
        optimiser.zero_grad()
        marks.extra.backward()
        optimiser.step()
    assert losses[0] == pytest.approx(torch.tensor(2.0).log())
    share = torch.stack(marks.accepted).mean()
    constant = -(share * share.log() + (1 - share) * (1 - share).log())
    assert losses[-1] < constant  # better than knowing the average


def test_training_draws_new_anchors_and_evaluation_does_not() -> None:
    head = fresh_head(seed=3)
    counts = torch.ones(1, 3 * NUM_ANCHORS, dtype=torch.bool)
    one, other = (head._anchors(counts)[0] for _ in range(2))
    assert one.shape == (1, NUM_ANCHORS)
    assert not torch.equal(one, other)
    head.eval()
    one, other = (head._anchors(counts)[0] for _ in range(2))
    assert torch.equal(one, other)
    assert len(set(one[0].tolist())) == NUM_ANCHORS
    assert one.min() >= 1
    assert one.max() < counts.shape[1] - 1


def test_a_new_head_starts_with_the_gains_of_the_targets_norm() -> None:
    target_norm = TARGET.model.model.norm
    found = target_norm.weight.detach().clone()
    try:
        with torch.no_grad():
            target_norm.weight.copy_(torch.linspace(0.5, 3, WIDTH))
        head = fresh_head()
        torch.testing.assert_close(head.norm.weight.detach(), torch.linspace(0.5, 3, WIDTH))
    finally:
        with torch.no_grad():
            target_norm.weight.copy_(found)


def test_the_seed_determines_a_new_head() -> None:
    one, same, other = (fresh_head(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def with_layer_field(**fields: object):
    return lambda config, tensors: config.update(
        transformer_layer_config=config["transformer_layer_config"] | fields
    )


def of_another_vocabulary(config: dict[str, object], tensors: Parts) -> None:
    with_field(draft_vocab_size=300)(config, tensors)
    with_layer_field(vocab_size=300)(config, tensors)


def of_a_smaller_vocabulary(config: dict[str, object], tensors: Parts) -> None:
    with_field(draft_vocab_size=NUM_WORDS)(config, tensors)
    tensors |= word_maps()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without("fc.weight"), "missing fc.weight"),
        (without("markov_head.markov_w2.weight"), "missing markov_head.markov_w2.weight"),
        (without("layers.1.self_attn.q_norm.weight"), "missing layers.1.self_attn.q_norm.weight"),
        (beside("layers.2.mlp.up_proj.weight", 1), "unknown layers.2.mlp.up_proj.weight"),
        (beside("fc.weight", WIDTH, WIDTH), r"fc.weight of shape \[32, 32\] instead of \[32, 96\]"),
        (with_layer_field(hidden_size=64), "width of 32, got one for 64"),
        (of_another_vocabulary, "vocabulary of 31, got one for 300"),
        (with_layer_field(model_type="mamba"), "layers like those of llama, .* got mamba"),
        (with_layer_field(layer_types=["sliding_attention"] * 2), "the field 'sliding_window'"),
        (with_layer_field(layer_types=["linear_attention"] * 2), "2 layers of the types full_attention and"),
        (with_layer_field(layer_types=["full_attention"]), "2 layers of the types full_attention and"),
        (with_layer_field(num_attention_heads=3), "share key heads evenly"),
        (
            with_field(speculators_model_type="eagle3"),
            "dspark or dflash or dflash2 or xpress in .* got 'eagle3'",
        ),
        (with_field(markov_head_type="other"), "of the type vanilla, gated, rnn.* in .* got 'other'"),
        (with_field(markov_head_type="gated"), "missing markov_head.gate_proj.bias"),
        (with_field(logit_scale=0.5), "whose logit_scale is 1 in .* got 0.5"),
        (with_field(block_size=0), "block_size of 0"),
        (with_field(block_size=99), "between 1 and 64, got 99"),
        (with_field(block_size=1, sample_from_anchor=False), "draft tokens of a block drafter between 1"),
        (with_field(mask_token_id=None), "the field 'mask_token_id'"),
        (with_field(mask_token_id=31), "mask token between 0 and 30, got 31"),
        (with_field(aux_hidden_state_layer_ids=[]), r"numbered from 0 on, got \[\]"),
        (with_field(aux_hidden_state_layer_ids=None), "config.json"),
        (with_field(markov_rank=0), "a Markov head and a confidence head"),
        (with_field(draft_vocab_size=5), "expected d2t and t2d in .* got no d2t"),
        (of_a_smaller_vocabulary, "an lm_head.weight for the reduced draft vocabulary"),
        (with_field(enable_confidence_head="yes"), "enable_confidence_head of 'yes'"),
        (without_field("transformer_layer_config"), "the field 'transformer_layer_config'"),
        (without_field("mask_token_id"), "the field 'mask_token_id'"),
    ],
)
def test_an_incompatible_folder_is_refused_with_the_reason(spoil, message: str, tmp_path: Path) -> None:
    tensors = random_tensors(backbone() | heads())
    config = dict(DSPARK)
    spoil(config, tensors)
    write_folder(tmp_path, config, tensors)
    with pytest.raises(CheckpointError, match=message):
        named(f"dspark:{tmp_path}")


def test_a_layer_that_the_target_lacks_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(backbone() | heads())
    write_folder(tmp_path, DSPARK | {"aux_hidden_state_layer_ids": [0, 1, 9]}, tensors)
    refusal = (
        rf"head in {tmp_path} that reads states 0 to 3 .* got \[0, 1, 9\]; it was trained for another target"
    )
    with pytest.raises(CheckpointError, match=refusal):
        named(f"dspark:{tmp_path}")


def test_inconsistent_vocabulary_maps_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors(backbone() | heads(NUM_WORDS) | {"lm_head.weight": (NUM_WORDS, WIDTH)})
    known = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    known[:NUM_WORDS] = True
    maps = {"d2t": WORDS - torch.arange(NUM_WORDS), "t2d": known}
    write_folder(tmp_path, DSPARK | {"draft_vocab_size": NUM_WORDS}, tensors | maps)
    with pytest.raises(CheckpointError, match="got an inconsistent map"):
        named(f"dspark:{tmp_path}")


def test_unknown_kinds_are_reported_as_unsupported(tmp_path: Path) -> None:
    write_folder(tmp_path, DSPARK | {"markov_head_type": "other"}, random_tensors(backbone() | heads()))
    with pytest.raises(UnsupportedModelError):
        named(f"dspark:{tmp_path}")


def lengths_under(drafter: SamplingDrafter, controller: str) -> list[int]:
    """Return the number of nodes drafted for rows in their first round."""
    rows = [Row(text, SamplingParams(max_tokens=20, temperature=1.0), seed=2) for text in many_texts(3, 9)]
    components = Components(TARGET, drafter, make_verifier("auto"), make_controller(controller))
    rounds = decode(components, rows)
    next(rounds)
    rounds.close()
    return [counts.num_drafted for counts in (components.recorder.of(row) for row in rows)]


@pytest.mark.parametrize(("bias", "length"), [(-9.0, 1), (9.0, BLOCK)])
def test_the_confidence_head_limits_the_draft_length(bias: float, length: int, tmp_path: Path) -> None:
    folder, parts = dspark(tmp_path / "head")
    parts["confidence_head.proj.weight"].zero_()
    parts["confidence_head.proj.bias"].fill_(bias)
    write_folder(folder, DSPARK, parts)
    drafter = named(f"dspark:{folder}")
    assert lengths_under(drafter, f"confidence:{BLOCK},threshold=0.5") == [length] * 3


@pytest.mark.parametrize("make", [dspark, blind_confidence])
def test_predicted_confidences_are_those_of_the_paper(make, tmp_path: Path) -> None:
    """`sigmoid(w . [h; W1 x] + b)` with the token x before the node, never the node's own."""
    folder, parts = make(tmp_path / "head")
    drafter = named(f"dspark:{folder}")
    told: list[list[float]] = []

    def keep_drafting(dists: Tensor, depth: int, acceptance_probs: list[float], *_: object) -> list[bool]:
        told.append(acceptance_probs)
        return [True]

    row = ready(drafter, TARGET, TEXT)
    with torch.inference_mode():
        draft = drafter.propose([row], Budgets([BLOCK], keep_drafting), KeyedNoise.from_rows([row]))
    states = block_states(parts, TEXT)
    before = [TEXT[-1], *draft.tokens[0].tolist()]
    assert len(told) == BLOCK - 1
    for depth, acceptance_probs in enumerate(told):
        seen = [states[depth], parts["markov_head.markov_w1.weight"][before[depth]]]
        weight = parts["confidence_head.proj.weight"][0]
        joined = torch.cat(seen)[: len(weight)]
        expected = torch.sigmoid(weight @ joined + parts["confidence_head.proj.bias"][0])
        assert acceptance_probs == [pytest.approx(float(expected), abs=1e-5)]


def test_without_a_confidence_head_the_controller_reads_the_distribution(tmp_path: Path) -> None:
    folder, _ = dflash(tmp_path / "head")
    drafter = named(f"dspark:{folder}")
    asked: list[tuple[int, object]] = []

    def keep_drafting(dists: Tensor, depth: int, acceptance_probs: object, *_: object) -> list[bool]:
        asked.append((depth, acceptance_probs))
        return [True]

    row = ready(drafter, TARGET, TEXT)
    with torch.inference_mode():
        drafter.propose([row], Budgets([2], keep_drafting), KeyedNoise.from_rows([row]))
    assert asked == [(0, None)]


def test_stopping_by_confidence_keeps_the_output_distribution() -> None:
    """Two rounds on a real cache, enumerated, where some drafts stop early and others do not."""
    model = tiny_pair(vocab_size=2)[0].double()
    dists = {}
    outputs: list[tuple[int, ...]] = [()]
    for output in outputs:
        with torch.inference_mode():
            dists[output] = model(torch.tensor([[0, 1, *output]]), use_cache=False).logits[0, -1].softmax(-1)
        if len(output) < 3:
            outputs += [(*output, 0), (*output, 1)]
    target = TransformersRuntime(model)
    sizes = {"hidden_layers": (0, 1), "block_size": 2, "markov_rank": 2, "num_layers": 1}
    head = DsparkHead.fresh(TargetModel.from_runtime(target), 1, **sizes)
    torch.nn.init.normal_(
        head.confidence_head.proj.weight, std=3.0, generator=torch.Generator().manual_seed(4)
    )
    drafter = DsparkDrafter(head.to(target.embedding_and_head().dtype), target, "dspark")
    answers: set[bool] = set()

    class Noted(ConfidenceController):
        def keep_drafting(self, rows: Sequence[Row], dists: DraftProbs, depth: int) -> list[bool]:
            decided = super().keep_drafting(rows, dists, depth)
            answers.update(decided)
            return decided

    controller = Noted(ConfidenceOptions(length=2, threshold=0.9))
    components = Components(target, drafter, make_verifier("block"), controller)
    params = SamplingParams(temperature=1.0, max_tokens=20)
    (branches,) = enumerate_rounds(components, lambda: [Row([0, 1], params)], num_rounds=2)
    found = text_dist(branches, dists.__getitem__, 4)
    assert largest_difference(found, exact_dist(dists.__getitem__, 4)) < 1e-9
    assert answers == {True, False}
