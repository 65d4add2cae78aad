"""Parts of Transformers' modules that the kernels run: linear layers, recurrences, convolutions."""

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from checkpoints import random_llama
from families import (
    FAMILIES,
    LLAMA_LIKE,
    RECURRENT,
    assert_near,
    needs_kernels,
    plain_model,
    random_tokens,
    row_of,
    write_checkpoint,
)
from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.core import Draft
from secondguess.errors import UnsupportedModelError
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.cpu.recurrence import StatesByToken, delta_rule, state_space
from secondguess.runtime.cpu.weights import Arena
from secondguess.runtime.modules import scans
from secondguess.runtime.modules.packing import pack_linears, quantise_linears
from secondguess.runtime.modules.scans import Convolution, recording
from secondguess.runtime.modules.transformers import TransformersRuntime
from secondguess.runtime.weight_format import BFLOAT16, INT4, INT8, INT8_GROUPS

pytestmark = needs_kernels
NUM_TOKENS = 5


@pytest.fixture(autouse=True)
def without_bfloat16_instructions(monkeypatch):
    """As if oneDNN could not pack for this processor."""
    monkeypatch.setattr(scans, "can_pack", lambda dtype, device: False)


def random_values(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 7), (200, 100)])
def test_a_row_of_a_linear_layer_does_not_depend_on_others(num_inputs, num_outputs):
    linear = nn.Linear(num_inputs, num_outputs).to(torch.bfloat16)
    layer = KernelLinear(linear, Arena())
    values = random_values(2, 20, num_inputs).to(torch.bfloat16)
    with torch.inference_mode():
        found = layer(values)
        alone = torch.cat([layer(row[None]) for row in values.flatten(0, 1)])
        expected = functional.linear(values.float(), linear.weight.float(), linear.bias.float())
    assert torch.equal(found.flatten(0, 1), alone)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-5)
    assert torch.equal(layer.plain_weight(), linear.weight)


@pytest.mark.parametrize("weight_format", [INT8, INT4], ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_row_of_a_quantised_layer_does_not_depend_on_others(dtype, weight_format):
    linear = nn.Linear(200, 100).to(dtype)
    layer = KernelLinear(linear, Arena(), weight_format)
    values = random_values(2, 20, 200).to(dtype)
    with torch.inference_mode():
        found = layer(values)
        alone = torch.cat([layer(row[None]) for row in values.flatten(0, 1)])
        expected = linear(values)
    assert torch.equal(found.flatten(0, 1), alone)
    assert found.dtype == dtype
    error = (found - expected).float().norm() / expected.float().norm()
    assert error < (0.02 if weight_format is INT8 else 0.12)


def test_a_layer_in_float32_is_rounded_in_its_inputs_only():
    linear = nn.Linear(200, 100)
    values = random_values(3, 200).to(torch.bfloat16).float()
    with torch.inference_mode():
        found = KernelLinear(linear, Arena())(values)
        expected = functional.linear(values, linear.weight.to(torch.bfloat16).float(), linear.bias)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weight_format", [BFLOAT16, INT8, INT4], ids=lambda each: each.name)
def test_inputs_of_another_width_are_refused(weight_format):
    layer = KernelLinear(nn.Linear(200, 100).to(torch.bfloat16), Arena(), weight_format)
    for width in (199, 3000):
        with pytest.raises(RuntimeError, match=rf"inputs of 200 numbers, got \(2, {width}\)"):
            layer(torch.zeros(2, width, dtype=torch.bfloat16))


@pytest.mark.parametrize("unit", library.units(), ids=lambda unit: unit.name)
@pytest.mark.parametrize("weight_format", [BFLOAT16, INT8, INT4, INT8_GROUPS], ids=lambda each: each.name)
def test_inputs_that_are_undefined_give_outputs_that_are(weight_format, unit):
    layer = KernelLinear(nn.Linear(96, 40, bias=False).to(torch.bfloat16), Arena(), weight_format)
    layer._unit = unit
    values = random_values(2, 96).to(torch.bfloat16)
    values[1, 3] = torch.nan
    outputs = layer(values)
    assert outputs[0].isfinite().all()
    assert outputs[1].isnan().all()


def test_a_quantised_layer_has_neither_a_gradient_nor_a_state():
    linear = nn.Linear(48, 7).to(torch.bfloat16)
    plain, quantised = KernelLinear(linear, Arena()), KernelLinear(linear, Arena(), INT8)
    assert torch.equal(plain.state_dict()["weight"], linear.weight)
    with pytest.raises(UnsupportedModelError, match="one in 8 bits; load the model without quantize"):
        quantised.state_dict()
    with pytest.raises(UnsupportedModelError, match="one in 8 bits; load the model without quantize"):
        quantised(random_values(3, 48).to(torch.bfloat16).requires_grad_())


def test_a_linear_layer_has_a_gradient():
    linear = nn.Linear(48, 7).to(torch.bfloat16)
    values = random_values(3, 48).to(torch.bfloat16).requires_grad_()
    KernelLinear(linear, Arena())(values).sum().backward()
    expected = linear.weight.float().sum(0).expand(3, -1)
    torch.testing.assert_close(values.grad.float(), expected, rtol=0.02, atol=0.02)


class LinearOfItsOwn(nn.Linear):
    """A subclass, which may compute otherwise."""


def test_transposed_weights_are_read_as_they_are_meant():
    """In every way in which a layer is used: product, gradient, state."""
    layer = Conv1D(7, 48)
    nn.init.normal_(layer.bias)
    layer = layer.to(torch.bfloat16)
    found, values = KernelLinear(layer, Arena()), random_values(3, 48).to(torch.bfloat16)
    assert found.weight.shape == (7, 48)
    assert torch.equal(found.state_dict()["weight"], layer.weight)
    with torch.inference_mode():
        torch.testing.assert_close(found(values), layer(values), rtol=0.02, atol=0.02)
    values.requires_grad_()
    found(values).sum().backward()
    torch.testing.assert_close(
        values.grad.float(), layer.weight.float().sum(1).expand(3, -1), rtol=0.02, atol=0.02
    )


def tiny_gpt2():
    return transformers.AutoModelForCausalLM.from_config(FAMILIES["gpt2"]()).to(torch.bfloat16).eval()


def tiny_llama():
    model = random_llama(vocab_size=96, initializer_range=0.1, tie_word_embeddings=True, attention_bias=True)
    model = model.to(torch.bfloat16)
    model.model.layers[0].mlp.register_module("unused", nn.Linear(2, 2))  # in float32
    model.model.layers[1].self_attn.q_proj.__class__ = LinearOfItsOwn
    return model


def logits(model):
    with torch.inference_mode():
        return model(input_ids=torch.arange(7)[None] + 5, use_cache=False).logits


def test_the_kernels_run_the_linear_layers_of_a_module():
    model = tiny_llama()
    expected = logits(model)
    assert pack_linears(model)
    torch.testing.assert_close(logits(model), expected, rtol=0.05, atol=0.05)
    kinds = {type(module) for name, module in model.named_modules() if "proj" in name or "head" in name}
    assert kinds == {KernelLinear, LinearOfItsOwn}
    assert type(model.model.layers[0].mlp.unused) is nn.Linear


def test_layers_whose_weight_is_no_plain_tensor_are_left_alone():
    """torchao's quantised weights are tensors of classes of their own, in `nn.Linear`."""
    model = random_llama(0).bfloat16().eval()
    own = model.model.layers[0].mlp.up_proj
    own.weight = nn.Parameter(own.weight.detach().as_subclass(OwnTensor))
    assert pack_linears(model)
    assert model.model.layers[0].mlp.up_proj is own
    assert isinstance(model.model.layers[0].mlp.down_proj, KernelLinear)


class OwnTensor(torch.Tensor):
    """Tensor with a class of its own."""


@pytest.mark.parametrize("make", [tiny_llama, tiny_gpt2])
def test_a_module_that_the_kernels_would_change_is_restored(make, monkeypatch):
    model = make()
    expected = logits(model)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    forward = KernelLinear.forward
    monkeypatch.setattr(KernelLinear, "forward", lambda self, values: 1.1 * forward(self, values))
    assert not pack_linears(model)
    assert torch.equal(logits(model), expected)
    assert not any(isinstance(module, KernelLinear) for module in model.modules())
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    assert model.lm_head.weight is model.get_input_embeddings().weight


def test_a_hybrid_is_loaded_with_the_kernels_linear_layers(tmp_path):
    path = write_checkpoint(RECURRENT["lfm2"](), tmp_path)
    model = load_model(Checkpoint.resolve(path, dtype="bfloat16", device="cpu")).runtime.model
    assert type(model.lm_head) is KernelLinear
    model = load_model(Checkpoint.resolve(path, dtype="float32", device="cpu")).runtime.model
    assert type(model.lm_head) is nn.Linear


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["lfm2", "falcon-h1", "gemma4", "gptj", "gpt2"])
def test_modules_run_with_quantised_linear_layers(name, dtype, quantize, tmp_path):
    path = write_checkpoint((FAMILIES | RECURRENT)[name](), tmp_path)
    checkpoint = Checkpoint.resolve(path, dtype=dtype, device="cpu", quantize=quantize)
    loaded = load_model(checkpoint)
    bits = {"int8": 8, "int4": 4}[quantize]
    assert loaded.runtime_description.startswith("transformers")
    assert loaded.runtime_description.endswith(f"weights in {bits} bits")
    kinds = {
        each.weight_format.bits for each in loaded.runtime.model.modules() if isinstance(each, KernelLinear)
    }
    assert kinds == {8, bits}  # the head has 8
    exact = load_model(Checkpoint.resolve(path, dtype="float32", device="cpu", runtime="transformers"))
    tokens, found = random_tokens(9, seed=2), []
    for each in (loaded, exact):
        row = row_of(tokens)
        each.runtime.begin([row])
        found.append(each.runtime.score([row], Draft.chains([tokens[:3]])).logits[0].float())
    error = (found[0] - found[1]).norm() / found[1].norm()
    assert 0 < error < (0.1 if quantize == "int8" else 0.6)


def test_a_module_of_joint_experts_is_not_quantised(tmp_path):
    config = RECURRENT["qwen3-next"]()
    config.vocab_size = 6000  # its head has most weights, and is a linear layer
    path = write_checkpoint(config, tmp_path)
    with pytest.raises(
        UnsupportedModelError,
        match=r"most of whose weights are those of linear layers, got .* with 11,584 of",
    ):
        Checkpoint.resolve(path, device="cpu", quantize="int4")
    with pytest.raises(
        UnsupportedModelError, match=r"most of whose weights are those of linear layers, got Qwen3Next"
    ):
        quantise_linears(plain_model(path), INT4)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("name", ["gemma4", "lfm2", "gptj", "gpt2"])
def test_memory_is_that_of_the_layers_that_are_quantised(name, quantize, tmp_path):
    config = (FAMILIES | RECURRENT)[name]()
    config.vocab_size = config.vocab_size_per_layer_input = 6000
    checkpoint = Checkpoint.resolve(
        write_checkpoint(config, tmp_path), dtype="bfloat16", device="cpu", quantize=quantize
    )
    model = load_model(checkpoint).runtime.model
    layers = [each for each in model.modules() if isinstance(each, KernelLinear)]
    packed = sum(each.weight.numel() * each.weight_format.bytes_per_weight for each in layers)
    held = packed + sum(each.nbytes for each in model.parameters())
    assert abs(checkpoint.memory(0).weights / held - 1) < 0.02


@pytest.mark.parametrize("broken", ["overflows", "is wrong"])
def test_a_module_that_quantised_layers_would_break_is_refused(broken, monkeypatch):
    model = tiny_llama()
    if broken == "overflows":
        forward = KernelLinear.forward
        monkeypatch.setattr(KernelLinear, "forward", lambda self, values: forward(self, values) / 0)
    else:
        monkeypatch.setattr(
            KernelLinear,
            "forward",
            lambda self, values: values.new_zeros(*values.shape[:-1], len(self.weight)),
        )
    with pytest.raises(UnsupportedModelError, match=r"LlamaForCausalLM.*load it without quantize"):
        quantise_linears(model, INT8)


def reference_delta_rule(query, key, value, g, beta, normalises, state):
    """The recurrence in float64, head by head."""
    query, key, value, g, beta, state = (each.double() for each in (query, key, value, g, beta, state))
    if normalises:
        query, key = (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt() for each in (query, key))
    num_heads, group = value.shape[2], value.shape[2] // key.shape[2]
    outputs = torch.zeros_like(value)
    for head in range(num_heads):
        now = state[0, head]
        for token in range(value.shape[1]):
            k, q = key[0, token, head // group], query[0, token, head // group] / key.shape[-1] ** 0.5
            now = now * g[0, token, head].exp().reshape(-1, 1)
            now = now + torch.outer(k, beta[0, token, head] * (value[0, token, head] - k @ now))
            outputs[0, token, head] = q @ now
        state[0, head] = now
    return outputs, state


def reference_state_space(values, dt, a, b, c, d, dt_bias, state):
    values, dt, a, b, c, d, dt_bias, state = (
        each.double() for each in (values, dt, a, b, c, d, dt_bias, state)
    )
    group = values.shape[2] // b.shape[2]
    outputs = torch.zeros_like(values)
    for token in range(values.shape[1]):
        for head in range(values.shape[2]):
            step, x = functional.softplus(dt[0, token, head] + dt_bias[head]), values[0, token, head]
            added = torch.outer(step * x, b[0, token, head // group])
            state[0, head] = (step * a[head]).exp() * state[0, head] + added
            outputs[0, token, head] = state[0, head] @ c[0, token, head // group] + d[head] * x
    return outputs, state


def delta_rule_inputs(num_key_heads=2, num_heads=4, key_size=24, value_size=40, decays_each=False):
    shape = (1, NUM_TOKENS, num_heads)
    decays = -random_values(*shape, *([key_size] if decays_each else []), seed=4).abs()
    inputs = {
        "query": random_values(1, NUM_TOKENS, num_key_heads, key_size, seed=1),
        "key": random_values(1, NUM_TOKENS, num_key_heads, key_size, seed=2),
        "value": random_values(*shape, value_size, seed=3),
        "g": decays,
        "beta": random_values(*shape, seed=5).sigmoid(),
        "normalises": True,
    }
    return inputs, random_values(1, num_heads, key_size, value_size, seed=6)


def state_space_inputs(num_groups=2, num_heads=4, size=6, state_size=24):
    inputs = {
        "values": random_values(1, NUM_TOKENS, num_heads, size, seed=1),
        "dt": random_values(1, NUM_TOKENS, num_heads, seed=2),
        "a": -random_values(num_heads, seed=3).abs(),
        "b": random_values(1, NUM_TOKENS, num_groups, state_size, seed=4),
        "c": random_values(1, NUM_TOKENS, num_groups, state_size, seed=5),
        "d": random_values(num_heads, seed=6),
        "dt_bias": random_values(num_heads, seed=7),
    }
    return inputs, random_values(1, num_heads, size, state_size, seed=8)


RECURRENCES = {
    "delta rule": (delta_rule, reference_delta_rule, *delta_rule_inputs()),
    "delta rule, whole columns": (
        delta_rule, reference_delta_rule, *delta_rule_inputs(4, 4, 32, 64) ),
    "delta rule, a decay for each number": (
        delta_rule, reference_delta_rule, *delta_rule_inputs(4, 4, decays_each=True) ),
    "state space": (state_space, reference_state_space, *state_space_inputs()),
    "state space, one group": (state_space, reference_state_space, *state_space_inputs(1, 3, 4, 32)),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENCES)
def test_a_recurrence_equals_its_definition_and_its_single_steps(name):
    make, reference, inputs, before = RECURRENCES[name]
    recurrence, after = make(**inputs), torch.empty_like(before)
    outputs = recurrence.advance(before, after, NUM_TOKENS)
    expected, expected_after = reference(**inputs, state=before)
    assert_near(outputs.double(), expected, 1e-4)
    assert_near(after.double(), expected_after, 1e-4)
    states = StatesByToken(recurrence, before)
    assert len(states) == NUM_TOKENS - 1
    now = before
    for token in range(NUM_TOKENS):
        single = {
            key: each[:, token : token + 1] if isinstance(each, torch.Tensor) and each.dim() > 1 else each
            for key, each in inputs.items()
        }
        now = now.clone()
        output = make(**single).advance(now, now, 1)
        assert torch.equal(output[:, 0], outputs[:, token])
        assert torch.equal(now, states[token] if token < len(states) else after)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_convolution_in_our_passes_equals_that_of_torch(has_bias):
    weight, bias = random_values(6, 4), random_values(6, seed=1) if has_bias else None
    values, state = random_values(1, 6, 3, seed=2).bfloat16(), random_values(1, 6, 4, seed=3).bfloat16()
    weight, bias = weight.bfloat16(), None if bias is None else bias.bfloat16()
    whole = torch.cat((state, values), -1)
    expected = functional.conv1d(
        functional.pad(whole.float(), (3, 0)),
        weight.float()[:, None],
        None if bias is None else bias.float(),
        groups=6,
    )
    expected = functional.silu(expected.bfloat16())
    with recording(None):
        found = Convolution(None, updates=False)(whole, weight, bias, activation="silu")
        updated, steps = state.clone(), []
        for token in values.unbind(-1):
            step = Convolution(None, updates=True)
            steps.append(step(token[..., None], updated, weight, bias, "silu"))
    torch.testing.assert_close(found, expected)
    assert torch.equal(torch.cat(steps, -1), found[..., -3:])
    assert torch.equal(updated, whole[..., -4:])


def test_the_functions_of_a_module_are_unchanged_outside_of_our_passes():
    original = Convolution(lambda *_: "original", updates=False)
    with recording(None):
        assert original(random_values(1, 2, 3)) == "original"  # in float32
    assert original(random_values(1, 2, 3).bfloat16()) == "original"


def bfloat16_runtime(family):
    """A model without attention layers, whose numbers of heads suit the vectors of torch's own functions."""
    config = {
        "qwen3-next": lambda: transformers.Qwen3NextConfig(
            **LLAMA_LIKE, head_dim=8, layer_types=["linear_attention"] * 2, linear_num_key_heads=8,
            linear_num_value_heads=32, linear_key_head_dim=8, linear_value_head_dim=8, mlp_only_layers=[0, 1],
        ),
        "mamba2": RECURRENT["mamba2"],
        "lfm2": lambda: transformers.Lfm2Config(
            **LLAMA_LIKE, layer_types=["conv", "conv"], block_auto_adjust_ff_dim=False
        ),
    }[family]()  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    assert pack_linears(model)
    return TransformersRuntime(model)


@pytest.mark.parametrize("family", ["qwen3-next", "mamba2", "lfm2"])
def test_states_in_bfloat16_equal_those_after_single_tokens_to_the_last_bit(family):
    runtime, text = bfloat16_runtime(family), random_tokens(20, seed=1)
    single, drafted = row_of(text[:5]), row_of(text[:5])
    runtime.begin([single, drafted])
    logits = []
    while len(single.tokens) < 15:
        logits.append(runtime.score([single], Draft.empty(1)).logits[0, 0])
        runtime.keep([single], [[]])
        single.tokens.append(text[len(single.tokens)])
    for num_right, num_wrong in [(2, 2), (0, 3), (3, 0), (1, 4)]:
        start = len(drafted.tokens)
        right = text[start : start + num_right]
        found = runtime.score([drafted], Draft.chains([[*right, *[7] * num_wrong]])).logits[0]
        assert torch.equal(found[: num_right + 1], torch.stack(logits[start - 5 : start - 4 + num_right]))
        runtime.keep([drafted], [list(range(num_right))])
        drafted.tokens += text[start : start + num_right + 1]
    found, expected = (
        runtime.cache.states_at(state.slot, 14) for state in (runtime.slots[drafted], runtime.slots[single])
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(state, expected[key]) for key, state in found.items())
