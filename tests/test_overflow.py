"""Texts whose activations overflow: they are refused, and no other text is affected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import write_llama
from secondguess.api import LLM, Generation, load
from secondguess.errors import NonFiniteLogitsError

OVERFLOWING = 250
PROMPT = [7, 8, 9, 7, 8, 9, 20, 21]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose activations overflow in float16 at one token."""
    path = write_llama(
        tmp_path_factory.mktemp("overflow"),
        1,
        hidden_size=64,
        intermediate_size=128,
        tie_word_embeddings=False,
    )
    weights = load_file(path / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, 3] = 0
    embedding[OVERFLOWING] = 0
    embedding[OVERFLOWING, 3] = 60.0
    weights["model.layers.0.self_attn.o_proj.weight"][3] = 0
    for part in ("up", "gate"):
        weights[f"model.layers.0.mlp.{part}_proj.weight"][:, 3] *= 700
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module", params=["fused", "transformers"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> LLM:
    return load(checkpoint, "suffix", dtype="float16", runtime=request.param, controller="fixed:4")


def test_a_text_that_overflows_is_refused_and_leaves_nothing_behind(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=12).token_ids
    with pytest.raises(NonFiniteLogitsError, match="another dtype"):
        llm.generate([20] * 30 + [OVERFLOWING] * 40, max_tokens=12)
    assert llm.generate(PROMPT, max_tokens=12).token_ids == expected
    assert llm.generate([PROMPT, PROMPT[:5]], max_tokens=12)[0].token_ids == expected


@pytest.mark.parametrize("runtime", ["fused", "transformers"])
def test_a_draft_model_forgets_a_text_that_overflows(checkpoint: Path, runtime: str) -> None:
    llm = load(checkpoint, f"model:{checkpoint}", dtype="float16", runtime=runtime, controller="fixed:4")
    with pytest.raises(NonFiniteLogitsError):
        llm.generate([20] * 3 + [OVERFLOWING] * 40, max_tokens=12)
    after = llm.generate(PROMPT[::-1], max_tokens=12).stats
    assert after.num_drafted == after.num_accepted > 0


@pytest.mark.filterwarnings("ignore::secondguess.errors.MismatchWarning")
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 1.0}, {"temperature": 1.0, "repetition_penalty": 1.1}]
)
@pytest.mark.parametrize("tree", ["", ",tree=2x1"])
def test_a_text_at_which_only_the_draft_model_overflows_is_generated(
    checkpoint: Path, tmp_path: Path, settings: dict[str, float], tree: str
) -> None:
    target = write_llama(tmp_path, 2, hidden_size=64, intermediate_size=128)
    llm = load(target, f"model:{checkpoint}{tree}", dtype="float16", controller="fixed:4")
    prompts = [[*PROMPT, OVERFLOWING, 9], PROMPT]
    expected = llm.generate(prompts, max_tokens=12, seed=3, draft_length=0, **settings)
    found = llm.generate(prompts, max_tokens=12, seed=3, **settings)
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]
    assert found[1].stats.num_drafted
    unseeded = llm.generate(prompts, max_tokens=12, ignore_eos=True, **settings)
    assert all(each.stats.num_tokens == 12 for each in unseeded)


def test_a_text_that_is_given_up_before_its_logits_were_seen_leaves_nothing_behind(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=12).token_ids
    batch, settings = llm.shared_batch._batch, [llm.sampling(max_tokens=4)]
    rows = Generation(llm, [[20] * 3 + [OVERFLOWING] * 40], settings).group.rows
    batch.add(rows)
    batch.prefill(rows)
    batch.remove(rows)
    assert llm.generate(PROMPT, max_tokens=12).token_ids == expected


@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "seed": 3}])
def test_a_draft_that_overflows_does_not_change_the_text(llm: LLM, settings: dict[str, float]) -> None:
    expected = llm.generate(PROMPT, max_tokens=12, draft_length=0, **settings).token_ids
    prediction = (*expected[:2], *[OVERFLOWING] * 4)
    found = llm.generate(PROMPT, max_tokens=12, prediction=prediction, **settings)
    assert found.token_ids == expected
    assert llm.generate(PROMPT, max_tokens=12, **settings).token_ids == expected


def test_a_draft_that_overflows_does_not_stop_another_row(llm: LLM) -> None:
    expected = llm.generate(PROMPT, max_tokens=12, draft_length=0).token_ids
    guarded = llm.sampling(max_tokens=12, prediction=(*expected[:2], OVERFLOWING, OVERFLOWING))
    found = llm.generate([PROMPT, PROMPT], [llm.sampling(max_tokens=12), guarded])
    assert [each.token_ids for each in found] == [expected, expected]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_the_default_dtype_of_torch_has_no_effect(dtype: torch.dtype, quantize: str | None) -> None:
    """Transformers changes it while it loads a model, perhaps in another thread."""
    settings = {"max_tokens": 24, "temperature": 1.0, "seed": 3}
    expected = load(quantize=quantize, dtype="bfloat16").generate("def add(", **settings).token_ids
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found = load(quantize=quantize, dtype="bfloat16").generate("def add(", **settings)
    finally:
        torch.set_default_dtype(before)
    assert found.token_ids == expected
    assert found.stats.num_drafted
