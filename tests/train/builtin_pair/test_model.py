"""The training module: the exported Llama checkpoint has its logits and generates its text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from builtin_pair.evaluate import generate_rows
from builtin_pair.export import export_model, load_exported
from builtin_pair.model import Decoder, ModelShape
from builtin_pair.tokenizer import end_token_id, train_tokenizer
from secondguess.api import load
from secondguess.errors import CheckpointError

SHAPES = [
    ModelShape(3, 64, 4, 2, 96, 320),
    ModelShape(1, 48, 3, 1, 80, 320),
    ModelShape(2, 32, 2, 2, 64, 320),
]


def random_decoder(shape: ModelShape, seed: int = 0) -> Decoder:
    """A decoder in which every weight matters: nothing is zero or one."""
    decoder = Decoder(shape)
    decoder.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return decoder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(["def f(x):\n    return x\n" * 50], 300)


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda shape: f"{shape.num_heads} heads {shape.num_kv_heads} kv"
)
def test_the_exported_checkpoint_gives_the_logits_of_the_training_module(
    shape: ModelShape, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    decoder = random_decoder(shape)
    export_model(decoder, tokenizer, tmp_path, dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(decoder(tokens, torch.float32), model(tokens).logits, atol=2e-5, rtol=1e-5)
    text = "def é(x):\n    return  'x' .\n"
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert loaded.eos_token_id == model.config.eos_token_id == 0


def test_an_exported_model_is_loaded_unchanged(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = random_decoder(SHAPES[0])
    export_model(decoder, tokenizer, tmp_path, dtype=torch.float32)
    again = load_exported(tmp_path)
    assert again.shape == decoder.shape
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in decoder.state_dict().items())
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_gradients_reach_every_weight_and_match_finite_differences() -> None:
    decoder = random_decoder(SHAPES[0])
    tokens = torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(2))
    weights = torch.randn(2, 12, 320, generator=torch.Generator().manual_seed(3))
    (decoder(tokens, torch.float32) * weights).sum().backward()
    query = decoder.model.layers[1].self_attn.q_proj.weight
    assert query.grad is not None
    direction = torch.randn(query.shape, generator=torch.Generator().manual_seed(4))
    slope = float((query.grad * direction).sum())
    values = []
    with torch.no_grad():
        for step in (1e-3, -1e-3):
            query.add_(direction, alpha=step)
            values.append(float((decoder(tokens, torch.float32).double() * weights).sum()))
            query.add_(direction, alpha=-step)
    assert (values[0] - values[1]) / 2e-3 == pytest.approx(slope, rel=0.02)
    assert all(
        parameter.grad is not None and bool(parameter.grad.any()) for parameter in decoder.parameters()
    )


def test_generated_rows_are_those_of_the_training_module(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = random_decoder(replace(SHAPES[0], vocab_size=300))
    export_model(decoder, tokenizer, tmp_path, dtype=torch.float32)
    llm = load(str(tmp_path), "none", dtype="float32")
    prompts = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(5))
    made = generate_rows(llm, prompts, 16, 0.0, 0)
    with torch.no_grad():
        assert torch.equal(made[:, 7:], decoder(made, torch.float32)[:, 6:-1].argmax(-1))
    sampled = [generate_rows(llm, prompts, 16, 1.0, seed) for seed in (0, 0, 1)]
    assert torch.equal(sampled[0], sampled[1])
    assert not torch.equal(sampled[0], sampled[2])


def test_an_end_token_does_not_end_a_row(tokenizer: Tokenizer, tmp_path: Path) -> None:
    decoder = random_decoder(replace(SHAPES[0], vocab_size=300))
    with torch.no_grad():
        decoder.model.embed_tokens.weight.zero_()  # all tokens are equally probable; the first is the end token
    export_model(decoder, tokenizer, tmp_path, dtype=torch.float32)
    made = generate_rows(
        load(str(tmp_path), "none", dtype="float32"), torch.ones(2, 3, dtype=torch.long), 5, 0.0, 0
    )
    assert made[:, 3:].tolist() == [[end_token_id(tokenizer)] * 5] * 2


@pytest.mark.parametrize(("has_unit", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_products_use_bfloat16_if_the_processor_supports_it(
    has_unit: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtin_pair.model.has_bfloat16", lambda device: has_unit)
    decoder = Decoder(ModelShape(1, 32, 2, 1, 64, 300))
    decoder.initialise(0)
    assert decoder(torch.zeros(1, 3, dtype=torch.long)).dtype == expected
    assert decoder(torch.zeros(1, 3, dtype=torch.long), torch.float64).dtype == torch.float64


def test_a_folder_without_an_export_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model exported by"):
        load_exported(tmp_path)
