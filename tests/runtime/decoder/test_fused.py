"""The fused runtime: equality with the module, memory, and the cases in which it is not used."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from checkpoints import read_module
from families import (
    COVERED,
    DENSE,
    FAMILIES,
    GRAPHS_DEVICE,
    KINDS,
    SIMILAR,
    assert_near,
    plain_logits,
    plain_model,
    random_tokens,
    row_of,
    runtime_of,
    write_checkpoint,
    write_varied,
)
from secondguess.checkpoint.loader import load_model, reference_module
from secondguess.checkpoint.plan import Checkpoint
from secondguess.core import Draft
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.runtime.coverage import unsupported_reason
from secondguess.runtime.decoder import families, fused_decoder, rotary
from secondguess.runtime.decoder.families import undescribed_reason
from secondguess.runtime.decoder.fused import FusedRuntime, fuse
from secondguess.runtime.decoder.products import can_pack
from secondguess.runtime.decoder.scores import masked_attention
from secondguess.runtime.modules.row_by_row import RowByRowForward

PROMPT = random_tokens(20, seed=8)
NODES = random_tokens(7, seed=9)


def test_numbers_that_modules_of_earlier_releases_have_are_the_defaults():
    """Configurations of gpt-oss have no `swiglu_alpha` before Transformers 5.19."""
    assert families.FAMILIES["gpt_oss"].gate_clamp(SimpleNamespace(swiglu_limit=3.0)) == families.GateClamp(
        1.702, 3.0
    )
    assert families.FAMILIES["gpt_oss"].gate_clamp(SimpleNamespace()) == families.GateClamp(1.702, 7.0)
    assert families.FAMILIES["llama"].gate_clamp(SimpleNamespace()) is None


@pytest.fixture(scope="module", params=[*COVERED, *SIMILAR])
def checkpoint(request, tmp_path_factory):
    return write_varied(request.param, tmp_path_factory.mktemp("fused"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return write_varied("llama", tmp_path_factory.mktemp("fused"))


def load(path, runtime, dtype):
    loaded = load_model(Checkpoint.resolve(path, runtime=runtime, dtype=dtype, device="cpu"))
    assert loaded.kind == runtime
    return loaded.runtime


def scores(runtime, num_nodes=4):
    row = row_of(PROMPT)
    runtime.begin([row])
    return runtime.score([row], Draft.chains([NODES[:num_nodes]])).logits[0]


def test_bfloat16_logits_are_bit_identical_to_the_module(checkpoint, monkeypatch):
    """Both with packed weights where there are bfloat16 products, else both without.

    Modules that run row by row have torch's own attention, which may add in another order, as do torch's
    grouped products of experts, and products with the transposed weights of gpt-oss.
    """
    monkeypatch.setattr(
        "secondguess.checkpoint.loader._experts_option", lambda _: {"experts_implementation": "eager"}
    )
    monkeypatch.setattr("secondguess.checkpoint.plan.can_quantise", lambda _: False)
    module = load(checkpoint, "transformers", "bfloat16")
    found, expected = scores(load(checkpoint, "fused", "bfloat16")), scores(module)
    if isinstance(module.forward, RowByRowForward):
        assert_near(found, expected, 2**-6)
    elif module.model.config.model_type == "gpt_oss":
        assert_near(found, expected, 2**-5)
    else:
        assert torch.equal(found, expected)


@pytest.mark.parametrize("runtime", KINDS)
@pytest.mark.parametrize("num_kv_heads", [1, 2])
@pytest.mark.parametrize("name", COVERED)
def test_a_tokens_bits_do_not_depend_on_the_number_of_scored_tokens(name, num_kv_heads, runtime, tmp_path):
    """The condition for identical text in bfloat16, for widths that are multiples of 64.

    Without whole key blocks it fails at every multiple of 16, without company for a lone query where no heads
    share keys.
    """
    if runtime == "graphs":
        if GRAPHS_DEVICE == "cpu" or name not in DENSE:
            pytest.skip("CUDA graphs need a CUDA device, and run no mixtures of experts")
    elif not can_pack(torch.bfloat16, torch.device("cpu")):
        pytest.skip("no bfloat16 products here")
    if name == "gpt-neox" and runtime not in ("native", "graphs"):
        pytest.skip("the exact GELU of torch rounds a row by the number of rows in bfloat16")
    config = FAMILIES[name]()
    for field, value in {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "head_dim": 32,
        "num_key_value_heads": num_kv_heads,
    }.items():  # fmt: skip
        setattr(config, field, value)
    path = write_checkpoint(config, tmp_path)
    model = runtime_of(path, runtime, dtype="bfloat16")
    tokens = random_tokens(90, seed=3)
    for place in (1, 10, 27, 29, 31, 47, 63):
        row, neighbour = row_of(tokens[:place]), row_of(tokens[:5])
        model.begin([row])
        alone = []
        for token in tokens[place : place + 12]:
            alone.append(model.score([row], Draft.empty(1)).logits[0, 0])
            row.tokens.append(token)
        del row.tokens[place:]
        for num_nodes in (1, 2, 5, 8, 11):
            drafted = tokens[place : place + num_nodes]
            model.rewind([row], [place - 1])
            single = model.score([row], Draft.chains([drafted])).logits[0]
            twin = row_of(tokens[:place])
            model.begin([neighbour, twin])
            together = model.score([neighbour, twin], Draft.chains([[5], drafted])).logits[1]
            model.release(neighbour)
            model.release(twin)
            for node in range(num_nodes + 1):
                assert torch.equal(single[node], alone[node])
                assert torch.equal(together[node], alone[node])
        model.release(row)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_other_dtypes_differ_by_rounding(checkpoint, dtype):
    tolerance = {"float32": 1e-5, "float64": 1e-5, "float16": 0.02}[dtype]
    torch.testing.assert_close(
        scores(load(checkpoint, "fused", dtype)),
        scores(load(checkpoint, "transformers", dtype)),
        rtol=0,
        atol=tolerance,
    )


def test_weights_are_held_once(llama):
    model = plain_model(llama)
    released = [weakref.ref(model.model.layers[0]), weakref.ref(model.model.layers[1].mlp.down_proj.weight)]
    decoder = fuse(model, packed=False)
    gc.collect()
    assert decoder is not None
    assert all(reference() is None for reference in released)


def test_a_token_reads_the_experts_that_it_selects(tmp_path):
    decoder = fuse(plain_model(write_checkpoint(SIMILAR["qwen3-moe-mixed"](), tmp_path)), packed=False)
    dense, mixture = decoder.layers
    attention = dense.qkv.weight.numel() + dense.output.weight.numel()
    assert dense.num_active_parameters == attention + 3 * 32 * 48
    router, expert = 40 * 32, 3 * 32 * 24
    assert mixture.num_active_parameters == attention + router + 3 * expert  # of 40


def test_a_wrong_family_description_is_not_used(llama, monkeypatch):
    monkeypatch.setattr(fused_decoder, "rotate", lambda states, *_: states)
    loaded = load_model(Checkpoint.resolve(llama, dtype="float32", device="cpu"))
    assert loaded.kind == "transformers"
    with pytest.raises(UnsupportedModelError, match="use runtime auto or transformers"):
        load_model(Checkpoint.resolve(llama, runtime="fused", dtype="float32", device="cpu"))


def test_a_wrong_rope_scaling_is_detected(tmp_path, monkeypatch):
    """A wrong frequency shows only far from the start."""
    config = FAMILIES["llama"]()
    config.max_position_embeddings = 4096
    path = write_checkpoint(config, tmp_path)
    made = rotary.Rotary.__init__

    def slightly_off(self, *arguments):
        made(self, *arguments)
        self.frequencies = self.frequencies * 1.001

    monkeypatch.setattr(rotary.Rotary, "__init__", slightly_off)
    assert load_model(Checkpoint.resolve(path, dtype="float32", device="cpu")).kind == "transformers"


@pytest.mark.parametrize(
    ("name", "foreign"),
    [
        ("llama", {"sliding_window": 24}),
        ("llama", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}),
        ("mistral", {"sliding_window": 24}),
    ],
)
def test_sliding_windows_are_read_from_the_module(name, foreign, tmp_path):
    """Wider than what the probe sees, so only the description can be right."""
    config = FAMILIES[name]()
    for field, value in foreign.items():
        setattr(config, field, value)
    path = write_checkpoint(config, tmp_path)
    runtime = runtime_of(path, runtime="fused")
    row = row_of(random_tokens(60, seed=4))
    runtime.begin([row])
    assert_near(
        runtime.score([row], Draft.empty(1)).logits[0], plain_logits(plain_model(path), row.tokens)[-1:]
    )


def test_modified_layers_use_the_module(llama):
    """An adapter shows its base weights under the same name."""

    class Adapted(torch.nn.Linear):
        def forward(self, values):
            return super().forward(values) + 0.001

    model = plain_model(llama)
    model.model.layers[1].mlp.down_proj.__class__ = Adapted
    assert fuse(model, packed=False) is None
    assert model.model.layers[0].mlp.down_proj.weight.numel()  # nothing was taken apart


def test_quantised_or_wrapped_layers_use_the_module():
    config = FAMILIES["llama"]()
    assert not undescribed_reason(config)
    config.quantization_config = {"quant_method": "torchao"}
    assert undescribed_reason(config)
    assert unsupported_reason("fused", FAMILIES["llama"](), torch.float32, torch.device("cuda"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"use_bidirectional_attention": True}),
        ("llama", {"hidden_act": "relu"}),
        ("phi", {"qk_layernorm": True}),
        ("stablelm", {"qk_layernorm": True}),
        ("stablelm", {"use_parallel_residual": True}),
        (
            "olmo3",
            {
                "rope_parameters": {
                    kind: {"rope_type": "longrope"} for kind in ("full_attention", "sliding_attention")
                }
            },
        ),
    ],
)
def test_undescribed_features_use_the_module(name, changes):
    """A soft cap, for one, hardly shows in the small logits of a probe."""
    config = (FAMILIES | SIMILAR)[name]()
    assert not undescribed_reason(config)
    for field, value in changes.items():
        setattr(config, field, value)
    assert undescribed_reason(config)


def test_fields_of_newer_versions_use_the_module():
    """Whatever a field means, a module may read it in a way that a probe does not see."""

    class Newer(type(FAMILIES["llama"]())):
        num_new_features: int = 0

    assert not undescribed_reason(Newer())
    assert "num_new_features" in undescribed_reason(Newer(num_new_features=2))


def test_undescribed_families_use_the_module(tmp_path):
    path = write_checkpoint(FAMILIES["gpt2"](), tmp_path)
    assert load_model(Checkpoint.resolve(path, dtype="float32", device="cpu")).kind == "transformers"
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        load_model(Checkpoint.resolve(path, runtime="fused", dtype="float32", device="cpu"))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "rope_theta": 1e4, "factor": 4.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_scalings_equal_the_module(rope, tmp_path):
    config = FAMILIES["llama"]()
    config.rope_parameters = rope
    path = write_checkpoint(config, tmp_path)
    torch.testing.assert_close(
        scores(load(path, "fused", "float32")),
        scores(load(path, "transformers", "float32")),
        rtol=1e-5,
        atol=1e-5,
    )


def test_length_dependent_rope_is_used_up_to_its_switch(tmp_path):
    config = FAMILIES["llama"]()
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    path = write_checkpoint(config, tmp_path)
    runtime = runtime_of(path, runtime="fused")
    tokens = random_tokens(runtime.context_length, seed=5)
    row = row_of(tokens)
    runtime.begin([row])
    assert_near(runtime.score([row], Draft.empty(1)).logits[0], plain_logits(plain_model(path), tokens)[-1:])


def test_an_unknown_runtime_is_refused(llama):
    with pytest.raises(BadInputError, match="auto, native, fused, graphs, transformers, got 'quick'"):
        load_model(Checkpoint.resolve(llama, runtime="quick"))


def test_int8_uses_the_module(llama):
    assert (
        load_model(Checkpoint.resolve(llama, dtype="float32", device="cpu", quantize="int8")).kind
        == "transformers"
    )


def test_the_reference_module_is_read_again(llama):
    loaded = load_model(Checkpoint.resolve(llama, dtype="float32", device="cpu"))
    assert isinstance(loaded.runtime, FusedRuntime)
    assert torch.equal(
        reference_module(loaded).model.layers[0].mlp.down_proj.weight,
        read_module(str(llama), torch.float32).model.layers[0].mlp.down_proj.weight,
    )
    assert isinstance(runtime_of(llama), FusedRuntime)


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no bfloat16 products here")
def test_the_rounding_of_a_query_does_not_depend_on_their_number():
    """Plain attention fails in some of these: a product with few rows uses other instructions."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape):
        return torch.randn(1, 2, *shape, generator=generator).bfloat16()

    for trial in range(100):
        num_keys = (32, 64, 160, 320)[trial % 4]
        keys, values, queries = numbers(num_keys, 64), numbers(num_keys, 64), numbers(5, 64)
        mask = torch.zeros(1, 1, 5, num_keys, dtype=torch.bfloat16)
        mask[..., num_keys - 7 :] = -torch.inf
        together = masked_attention(queries, keys, values, mask)
        for few in (1, 2, 3):
            alone = masked_attention(queries[:, :, :few], keys, values, mask[:, :, :few])
            assert torch.equal(alone, together[:, :, :few])
