"""EAGLE heads: published formats against a reference, refusals, and written files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from head_formats import Named, edit, named
from plain_layers import Tensors, layer_config, layer_tensors, plain_layer, plain_norm, random_tensors
from safetensors.torch import load_file, save_file
from torch import Tensor

from secondguess.drafters.eagle import EagleDrafter
from secondguess.errors import BadInputError, SecondGuessError, UnsupportedModelError
from secondguess.heads.base import DraftVocabulary, TargetModel
from secondguess.heads.eagle import Eagle1Head, EagleConfig, EagleHead, default_layers, load_eagle
from secondguess.heads.layer import LayerConfig
from secondguess.runtime.modules.transformers import TransformersRuntime
from unrolled_cases import (
    TEXT,
    VOCAB_SIZE,
    WIDTH,
    drafted_logits,
    fresh_head,
    target_model,
    target_of,
)

WORDS = [1, 2, 3, 5, 8, 9, 13, 21, 30]
OFFSETS = [1, 1, 1, 2, 4, 4, 7, 14, 22]
TARGET = target_of()
LAYERS = (1, 2, 3)


def write(folder: Path, config: dict[str, Any], tensors: Tensors, file: str = "model.safetensors") -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".bin"):
        torch.save(tensors, folder / file)
    else:
        save_file(tensors, folder / file)
    return folder


def eagle3_tensors(prefix: str) -> Tensors:
    marks = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    marks[WORDS] = True
    return {
        **layer_tensors(prefix, WIDTH, 2 * WIDTH),
        **random_tensors(
            {
                f"{prefix}input_layernorm.weight": (WIDTH,),
                f"{prefix}hidden_norm.weight": (WIDTH,),
                "fc.weight": (WIDTH, 3 * WIDTH),
                "norm.weight": (WIDTH,),
                "lm_head.weight": (len(WORDS), WIDTH),
            }
        ),
        "d2t": torch.tensor(OFFSETS),
        "t2d": marks,
    }


def raw3(folder: Path) -> Path:
    config = {
        **layer_config(WIDTH, VOCAB_SIZE),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(WORDS),
    }
    return write(folder, config, eagle3_tensors("midlayer."), "pytorch_model.bin")


def raw3_with_embeddings(folder: Path) -> Path:
    raw3(folder)
    (folder / "pytorch_model.bin").unlink()
    config = json.loads((folder / "config.json").read_text())
    embeddings = random_tensors({"embed_tokens.weight": (VOCAB_SIZE, WIDTH)})
    return write(folder, config, eagle3_tensors("midlayer.") | embeddings)


def speculators3(folder: Path, **settings: object) -> Path:
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "tiny", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer_config(WIDTH, VOCAB_SIZE),
        "draft_vocab_size": len(WORDS),
        **settings,
    }
    tensors = eagle3_tensors("layers.0.")
    if settings.get("norm_before_fc"):
        tensors |= random_tensors({"input_norm.weight": (3 * WIDTH,)})
    if settings.get("fc_norm"):
        tensors |= random_tensors({f"fc_norm.{index}.weight": (WIDTH,) for index in range(3)})
    return write(folder, config, tensors)


def raw1(folder: Path) -> Path:
    tensors = {
        **layer_tensors("layers.0.", WIDTH, WIDTH),
        **random_tensors({"fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)}),
        "embed_tokens.weight": target_model().model.embed_tokens.weight,
    }
    return write(folder, layer_config(WIDTH, VOCAB_SIZE), tensors, "pytorch_model.bin")


def read_back(folder: Path) -> tuple[dict[str, Any], Tensors]:
    files = [*folder.glob("*.safetensors")]
    tensors = load_file(files[0]) if files else torch.load(folder / "pytorch_model.bin")
    return json.loads((folder / "config.json").read_text()), tensors


def plain_eagle3(folder: Path, tokens: list[int], length: int, depth: int) -> Tensor:
    """Return logits over the draft vocabulary after `length + depth` tokens of which `depth` were drafted."""
    config, weights = read_back(folder)
    prefix = "midlayer." if "midlayer.hidden_norm.weight" in weights else "layers.0."
    model = target_model()
    states = model(torch.tensor([tokens[:length]]), output_hidden_states=True).hidden_states
    of_target = [states[layer][0, : length - 1] for layer in LAYERS]
    if config.get("fc_norm"):
        of_target = [
            plain_norm(each, weights[f"fc_norm.{index}.weight"]) for index, each in enumerate(of_target)
        ]
    joined = torch.cat(of_target, -1)
    if config.get("norm_before_fc"):
        joined = plain_norm(joined, weights["input_norm.weight"])
    features = joined @ weights["fc.weight"].T
    table = weights.get("embed_tokens.weight", model.model.embed_tokens.weight)
    for step in range(depth + 1):
        embedded = table[tokens[1 : length + step]]
        normed = plain_norm(features, weights[f"{prefix}hidden_norm.weight"])
        both = torch.cat([plain_norm(embedded, weights[f"{prefix}input_layernorm.weight"]), normed], -1)
        state = plain_layer(
            weights, prefix, normed if config.get("norm_before_residual") else features, both
        )[-1]
        normed_state = plain_norm(state, weights["norm.weight"])
        features = torch.cat([features, (normed_state if config.get("norm_output") else state)[None]])
    return normed_state @ weights["lm_head.weight"].T


def plain_eagle1(folder: Path, tokens: list[int], length: int, depth: int) -> Tensor:
    _, weights = read_back(folder)
    model = target_model()
    features = model.model(torch.tensor([tokens[:length]])).last_hidden_state[0, : length - 1]
    for step in range(depth + 1):
        embedded = model.model.embed_tokens.weight[tokens[1 : length + step]]
        joined = torch.cat([embedded, features], -1) @ weights["fc.weight"].T + weights["fc.bias"]
        state = plain_layer(weights, "layers.0.", joined, joined)[-1]
        features = torch.cat([features, state[None]])
    return state @ model.lm_head.weight.T


FORMATS: dict[str, Callable[[Path], Path]] = {
    "raw-3": raw3,
    "raw-3-with-embeddings": raw3_with_embeddings,
    "speculators": lambda folder: speculators3(folder, norm_before_residual=False),
    "speculators-normed-residual": lambda folder: speculators3(folder, norm_before_residual=True),
    "speculators-gpt-oss": lambda folder: speculators3(folder, norm_before_fc=True),
    "speculators-3.1": lambda folder: speculators3(folder, fc_norm=True, norm_output=True),
    "raw-1": raw1,
}
every_format = pytest.mark.parametrize("make", FORMATS.values(), ids=FORMATS)


def load(folder: Path) -> EagleHead | Eagle1Head:
    return load_eagle(folder, TARGET).double()


@every_format
def test_a_published_head_has_the_logits_of_its_paper(make: Callable[[Path], Path], tmp_path: Path) -> None:
    folder = make(tmp_path)
    found = drafted_logits(load(folder), TEXT[:6], TEXT[6:9])
    for depth in range(3):
        with torch.no_grad():
            if make is raw1:
                expected = plain_eagle1(folder, TEXT, 6, depth)
                logits = found[depth]
            else:
                expected = plain_eagle3(folder, TEXT, 6, depth)
                logits = found[depth, WORDS]
                assert found[depth].isfinite().nonzero()[:, 0].tolist() == WORDS
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-4)


@every_format
def test_a_written_head_is_read_back(make: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    head = load(make(tmp_path / "from"))
    head.save(tmp_path / "to", "tiny")
    again = load(tmp_path / "to")
    assert again.num_steps == head.num_steps
    assert torch.equal(drafted_logits(again, TEXT[:6], TEXT[6:9]), drafted_logits(head, TEXT[:6], TEXT[6:9]))


def test_missing_embeddings_are_those_of_the_target(tmp_path: Path) -> None:
    """Heads are written with them, as the library that reads them wants it."""
    (tmp_path / "other").mkdir()
    other = load(raw3_with_embeddings(tmp_path / "other"))
    other.save(tmp_path / "kept", "tiny")
    load(raw3(tmp_path)).save(tmp_path / "borrowed", "tiny")
    assert "embed_tokens.weight" in load(tmp_path / "kept").state_dict()
    assert "embed_tokens.weight" in load_file(tmp_path / "borrowed" / "model.safetensors")
    assert "embed_tokens.weight" not in load(tmp_path / "borrowed").state_dict()


@pytest.mark.parametrize("tree", ["", ",tree=2x1", ",tree=dynamic"])
def test_the_name_makes_a_drafter(tree: str, tmp_path: Path) -> None:
    drafter = named(f"eagle:{raw3(tmp_path)}{tree}", Named(TransformersRuntime(target_model())))
    assert isinstance(drafter, EagleDrafter)
    assert drafter.name.startswith(f"eagle:{tmp_path}{tree}")
    assert (drafter.shape is None) == (not tree)


def with_tensors(folder: Path, change: Callable[[Tensors], object]) -> Path:
    _, tensors = read_back(folder)
    change(tensors)
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (
        lambda at: with_tensors(raw3(at), lambda each: each.pop("norm.weight")),
        "missing norm.weight",
    ),
    "unknown": (lambda at: with_tensors(raw3(at), lambda each: each.update(x=torch.ones(1))), "unknown x"),
    "wrong shape": (
        lambda at: with_tensors(raw3(at), lambda each: each.update({"fc.weight": torch.ones(WIDTH, WIDTH)})),
        r"fc.weight of shape \[32, 32\] instead of \[32, 96\]",
    ),
    "no map": (
        lambda at: with_tensors(raw3(at), lambda each: each.pop("d2t")),
        "got no d2t",
    ),
    "ids for offsets": (
        lambda at: with_tensors(raw3(at), lambda each: each.update(d2t=torch.tensor(WORDS))),
        "how much larger",
    ),
    "another layer": (lambda at: edit(raw3(at), model_type="gpt_oss"), "got gpt_oss"),
    "scaled positions": (
        lambda at: edit(raw3(at), rope_scaling={"rope_type": "dynamic", "factor": 8.0}),
        r"config\.json: expected rotary positions without scaling or with one of .*yarn, got .*dynamic.*train",
    ),
    "half a scaling of positions": (
        lambda at: edit(raw3(at), rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "rejects: .*low_freq_factor",
    ),
    "a scaling of positions by 0": (
        lambda at: edit(raw1(at), rope_scaling={"type": "linear", "factor": 0}),
        r"config\.json, got: a scaling of rotary positions with finite frequencies",
    ),
    "a scaling of positions in words": (
        lambda at: edit(raw1(at), rope_scaling={"type": "linear", "factor": "large"}),
        "config.json",
    ),
    "another drafter": (lambda at: edit(speculators3(at), speculators_model_type="dflash"), "got 'dflash'"),
    "another vocabulary": (lambda at: edit(raw3(at), vocab_size=32), "vocabulary of 31, got one for 32"),
    "another width": (lambda at: edit(raw1(at), hidden_size=64), "width 32"),
    "a wider target": (lambda at: edit(raw3(at), target_hidden_size=64), "width of 32, got one for 64"),
    "a deeper target": (
        lambda at: edit(raw3(at), eagle_aux_hidden_state_layer_ids=[2, 16, 29]),
        r"states 0 to 4 of the target, got \[2, 16, 29\]",
    ),
    "no sizes": (
        lambda at: edit(raw3(at), intermediate_size=None),
        "expected the field 'intermediate_size' in",
    ),
    "sizes in words": (lambda at: edit(raw3(at), intermediate_size="large"), "config.json"),
    "both norms": (lambda at: edit(speculators3(at), norm_before_fc=True, fc_norm=True), "got both"),
    "no layer config": (
        lambda at: edit(speculators3(at), transformer_layer_config=None),
        "transformer_layer_config",
    ),
    "no json": (lambda at: (raw3(at) / "config.json").write_text("{"), "readable config.json"),
    "no weights": (lambda at: (raw3(at) / "pytorch_model.bin").unlink(), "got none"),
}


@pytest.mark.parametrize(("make", "message"), FAULTS.values(), ids=FAULTS)
def test_unusable_folders_are_refused_in_one_line(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(SecondGuessError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    if message in ("got gpt_oss", "got 'dflash'"):
        assert isinstance(caught.value, UnsupportedModelError)


def test_the_draft_vocabulary_has_the_most_frequent_tokens() -> None:
    counts = torch.tensor([5, 0, 9, 5, 1, 7])
    assert DraftVocabulary.most_frequent(counts, 3).select(torch.arange(6)).tolist() == [0, 2, 5]
    with pytest.raises(BadInputError, match="1 to 6 tokens, got 7"):
        DraftVocabulary.most_frequent(counts, 7)


def test_a_new_head_has_the_embeddings_of_the_target() -> None:
    vocabulary = DraftVocabulary.most_frequent(torch.arange(VOCAB_SIZE).flip(0), 4)
    head = EagleHead.fresh(TARGET, vocabulary=vocabulary)
    assert head.vocabulary.select(torch.arange(VOCAB_SIZE)).tolist() == [0, 1, 2, 3]
    torch.testing.assert_close(
        head.lm_head.weight.double(), target_model().lm_head.weight[:4], atol=1e-6, rtol=1e-6
    )
    same, other = (EagleHead.fresh(TARGET, seed) for seed in (0, 1))
    assert torch.equal(head.fc.weight, same.fc.weight)
    assert not torch.equal(head.fc.weight, other.fc.weight)


def test_a_new_head_of_the_whole_vocabulary_uses_the_lm_head_of_the_target(tmp_path: Path) -> None:
    """Its files contain a copy, as the library that reads them wants it."""
    head = EagleHead.fresh(TARGET).double()
    assert head.lm_head is None
    head.save(tmp_path, "tiny")
    assert "lm_head.weight" in load_file(tmp_path / "model.safetensors")
    again = load(tmp_path)
    assert again.lm_head is None
    assert torch.equal(drafted_logits(again, TEXT[:6], TEXT[6:9]), drafted_logits(head, TEXT[:6], TEXT[6:9]))


BIAS = torch.linspace(-3, 3, VOCAB_SIZE, dtype=torch.float64)


def biased(target: TargetModel) -> TargetModel:
    """Return a target whose LM head has a bias."""
    return replace(target, unembed=lambda states: target.unembed(states) + BIAS.to(states.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_lm_head_of_a_target_with_a_bias_is_used_in_every_dtype(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    target = biased(TARGET)
    EagleHead.fresh(target).double().save(tmp_path, "tiny")
    written = load_file(tmp_path / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(written, target_model().lm_head.weight)
    head = EagleHead.load(tmp_path, biased(target_of(dtype)))
    assert head.lm_head is None
    assert head.embed_tokens is None


def test_a_reduced_lm_head_starts_without_the_bias_of_the_target() -> None:
    head = EagleHead.fresh(biased(TARGET), vocabulary=DraftVocabulary(VOCAB_SIZE, torch.tensor(WORDS)))
    assert head.lm_head is not None
    torch.testing.assert_close(head.lm_head.weight, target_model().lm_head.weight[WORDS].float())


def test_copies_in_files_of_earlier_versions_are_recognised_by_their_values(tmp_path: Path) -> None:
    target = biased(TARGET)
    EagleHead.fresh(target).double().save(tmp_path, "tiny")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = (target_model().lm_head.weight.T + BIAS).T.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    edit(tmp_path, secondguess_target_weights=None)
    assert EagleHead.load(tmp_path, target).lm_head is None
    save_file(tensors | {"lm_head.weight": -tensors["lm_head.weight"]}, tmp_path / "model.safetensors")
    assert EagleHead.load(tmp_path, target).lm_head is not None


@pytest.mark.parametrize("words", [[], [1, 1, 2], [1, 2, 31], [-1, 2, 3]])
def test_invalid_draft_vocabularies_are_refused(words: list[int]) -> None:
    with pytest.raises(BadInputError, match="different tokens"):
        DraftVocabulary(VOCAB_SIZE, torch.tensor(words, dtype=torch.long))


@pytest.mark.parametrize("change", [{"num_layers": 0}, {"hidden_layers": ()}, {"num_steps": 0}])
def test_sizes_are_checked(change: dict[str, Any]) -> None:
    config = EagleConfig(LayerConfig(WIDTH, 2, 1, 16, 32), hidden_layers=(1,))
    with pytest.raises(BadInputError, match="expected"):
        EagleHead(replace(config, **change), TARGET)


@pytest.mark.parametrize("num_layers", range(1, 40))
def test_default_hidden_layers_exist_in_the_target(num_layers: int) -> None:
    layers = default_layers(num_layers)
    assert sorted(layers) == list(layers)
    assert layers[0] >= 0
    assert layers[-1] <= num_layers
    assert len(set(layers)) == min(3, num_layers + 1)
    if num_layers >= 7:
        assert layers == (2, num_layers // 2, num_layers - 3)


def test_several_layers_are_applied_in_sequence(tmp_path: Path) -> None:
    head = fresh_head("eagle3")
    assert isinstance(head, EagleHead)
    deep = EagleHead(replace(head.config, num_layers=2), TARGET, head.vocabulary).double()
    deep.save(tmp_path, "tiny")
    again = load(tmp_path)
    assert again.num_layers == 2
    assert torch.equal(drafted_logits(again, TEXT[:6], TEXT[6:8]), drafted_logits(deep, TEXT[:6], TEXT[6:8]))
