"""Written heads, read by the speculators library, or by its schema if it is not installed."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path

import eagle_dialects
import pytest
import test_eagle_dialects
import torch
from safetensors.torch import load_file
from torch import Tensor

from secondguess.heads.eagle import EagleHead
from unrolled_cases import TEXT, VOCAB_SIZE, WIDTH, fresh_head, lesson_of, target_model, target_of

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {"norm_before_residual": False},
    "normed-residual": {"norm_before_residual": True},
    "gpt-oss": {"norm_before_residual": False, "norm_before_fc": True},
    "3.1": {"norm_before_residual": False, "fc_norm": True, "norm_output": True},
    "deep": {"norm_before_residual": False, "num_layers": 2},
}
every_setting = pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)


def make_head(settings: dict[str, object]) -> EagleHead:
    """In float32, with norms that are not ones."""
    plain = fresh_head("eagle3", torch.float32)
    assert isinstance(plain, EagleHead)
    generator = torch.Generator().manual_seed(0)
    head = EagleHead(replace(plain.config, **settings), target_of(torch.float32), plain.vocabulary)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_(float("norm" in name), 0.2, generator=generator)
    return head


@pytest.fixture
def saved_target(tmp_path: Path) -> Path:
    target_model(torch.float32).save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def unrolled(head: EagleHead) -> list[Tensor]:
    training_batch = lesson_of(torch.tensor([TEXT]), target_model(torch.float32))
    with torch.no_grad():
        return [head.draft_logits(thought)[0] for thought in head.unroll(training_batch)]


@every_setting
@pytest.mark.filterwarnings("ignore")
def test_speculators_reads_written_heads(
    settings: dict[str, object], saved_target: Path, tmp_path: Path
) -> None:
    speculators = pytest.importorskip(
        "speculators", reason="speculators is not installed: it wants another transformers than ours"
    )
    head = make_head(settings)
    head.save(tmp_path / "head", str(saved_target))
    config = speculators.SpeculatorModelConfig.from_pretrained(str(tmp_path / "head"))
    # Its own kernels want texts of 128 tokens and more.
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = speculators.SpeculatorModel.from_pretrained(str(tmp_path / "head"), config=config)
    said: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, given, logits: said.append(logits[0]))
    training_batch = lesson_of(torch.tensor([TEXT]), target_model(torch.float32))
    states = torch.cat([training_batch.hidden[layer][:, :-1] for layer in head.hidden_layers], -1)
    with torch.no_grad():
        theirs(
            states,
            training_batch.tokens[:, 1:],
            torch.zeros(1, len(TEXT) - 1, dtype=torch.long),
            ttt_steps=head.num_steps,
        )
    for ours, other in zip(unrolled(head), said, strict=True):
        torch.testing.assert_close(other[: len(ours)], ours, atol=1e-4, rtol=1e-4)
    theirs.save_pretrained(tmp_path / "theirs")
    again = EagleHead.load(tmp_path / "theirs", target_of(torch.float32))
    assert all(map(torch.equal, unrolled(again), unrolled(head)))


@pytest.mark.parametrize(
    ("name", "num_steps"),
    [
        ("speculators", 3),
        # Later steps of its trainer count a window from the root of a chain, readers from each token.
        ("speculators, sliding", 1),
        ("speculators, two layers, one sliding", 1),
        ("P-EAGLE of speculators", 3),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_heads_of_speculators_have_its_logits(
    name: str, num_steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speculators = pytest.importorskip("speculators", reason="speculators is not installed")
    target = eagle_dialects.target_model(torch.float32)
    target.save_pretrained(tmp_path / "target")
    tokens = torch.tensor([eagle_dialects.TEXT])
    # It leaves embeddings that a file does not have uninitialised.
    embeddings = {"embed_tokens.weight": target.model.embed_tokens.weight}
    dialect = eagle_dialects.DIALECTS[name]
    dialect = replace(dialect, tensors=dialect.tensors | embeddings)
    path = "speculators_config.verifier.name_or_path"
    folder = dialect.write(tmp_path / "head", {path: str(tmp_path / "target")})
    ours, _ = test_eagle_dialects.drafted(test_eagle_dialects.load(folder))
    config = speculators.SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = speculators.SpeculatorModel.from_pretrained(str(folder), config=config)
    said: list[Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, given, logits: said.append(logits[0]))
    length = test_eagle_dialects.LENGTH
    last = length - 2
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        hidden = target(tokens, output_hidden_states=True).hidden_states
        states = torch.cat([hidden[layer] for layer in dialect.meaning.states], -1)[:, :-1]
        documents = torch.zeros(1, states.shape[1], dtype=torch.long)
        if dialect.meaning.mask is None:
            theirs(states, tokens[:, 1:], documents, ttt_steps=num_steps)
            expected = [logits[last] for logits in said]
        else:
            core = importlib.import_module("speculators.models.peagle.core")
            anchors = torch.cat((torch.arange(length - 1), torch.full((num_steps - 1,), last)))
            depths = torch.cat((torch.zeros(length - 1, dtype=torch.long), torch.arange(1, num_steps)))
            monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **sizes: (anchors, depths))
            monkeypatch.setattr(core, "compute_metrics", lambda **values: (torch.zeros(()), {}))
            theirs(states, tokens[:, 1:], documents, verifier_last_hidden_states=hidden[-1][:, :-1])
            expected = list(said[0][last : last + num_steps])
    found = ours[:, eagle_dialects.WORDS]
    for step in range(num_steps):
        torch.testing.assert_close(found[step], expected[step], atol=1e-5, rtol=0)


@every_setting
def test_the_format_is_that_of_speculators(
    settings: dict[str, object], saved_target: Path, tmp_path: Path
) -> None:
    """As far as vLLM's reader and the library's schema ask."""
    head = make_head(settings)
    head.save(tmp_path / "head", str(saved_target))
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3Speculator"]
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[flag] is settings.get(flag, False)
    assert config["draft_vocab_size"] == 24
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    described = config["speculators_config"]
    assert described["verifier"] == {"name_or_path": str(saved_target), "architectures": ["LlamaForCausalLM"]}
    (method,) = described["proposal_methods"]
    assert method["proposal_type"] == described["default_proposal_method"] == "greedy"
    assert method["speculative_tokens"] == head.num_steps
    layer = config["transformer_layer_config"]
    assert (layer["vocab_size"], layer["hidden_size"], layer["model_type"]) == (VOCAB_SIZE, WIDTH, "llama")
    assert layer["num_hidden_layers"] == settings.get("num_layers", 1)
    assert layer["max_position_embeddings"] == 128
    tensors = load_file(tmp_path / "head" / "model.safetensors")
    assert tensors["t2d"].dtype == torch.bool
    assert tensors["d2t"].dtype == torch.int64
    assert (tensors["d2t"] + torch.arange(24)).tolist() == tensors["t2d"].nonzero()[:, 0].tolist()
    assert tensors["fc.weight"].shape == (WIDTH, 3 * WIDTH)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * WIDTH
    names = {
        "layers.0.hidden_norm.weight",
        "layers.0.input_layernorm.weight",
        "norm.weight",
        "lm_head.weight",
    }
    assert names <= set(tensors)
    assert ("input_norm.weight" in tensors) == ("norm_before_fc" in settings)
    assert ("fc_norm.2.weight" in tensors) == ("fc_norm" in settings)
    assert torch.equal(tensors["embed_tokens.weight"], target_model(torch.float32).model.embed_tokens.weight)
