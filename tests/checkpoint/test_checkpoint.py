"""Loading a checkpoint into a runtime, and its errors."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from checkpoints import write_llama
from families import (
    FAMILIES,
    LLAMA_LIKE,
    assert_near,
    needs_kernels,
    plain_logits,
    plain_model,
    row_of,
    write_checkpoint,
)
from secondguess import load
from secondguess.checkpoint import loader, memory
from secondguess.checkpoint.description import describe
from secondguess.checkpoint.loader import load_model, reference_module, wrap_model
from secondguess.checkpoint.plan import Checkpoint
from secondguess.checkpoint.resolve import RUNTIMES
from secondguess.core import Draft
from secondguess.errors import BadInputError, CheckpointError, OutOfMemoryError, UnsupportedModelError
from secondguess.runtime.cpu.library import processor_supports, units
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.decoder.families import undescribed_reason
from secondguess.runtime.modules.support import cached_layers, cached_values_per_token, context_length_of

TOKENS = [5, 6, 7, 8, 9]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(FAMILIES["llama"](), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copied(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


def score(loaded, tokens=TOKENS):
    row = row_of(tokens)
    loaded.runtime.begin([row])
    return loaded.runtime.score([row], Draft.empty(1)).logits[0, 0]


def shard(folder):
    """Replace the weights by shards with an index."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "left",
    [
        "older weights",
        "shards",
        "an index",
        "older weights next to shards",
        "an adapter",
        "older weights next to others that are named",
    ],
)
def test_only_the_files_that_transformers_reads_are_read(copied, tmp_path, left, dtype):
    expected = score(load_model(Checkpoint.resolve(copied, dtype=dtype, device="cpu")))
    size = Checkpoint.resolve(copied, dtype=dtype).memory().weights
    weights = copied / "model.safetensors"
    others = {name: tensor * 0 for name, tensor in load_file(weights).items()}
    if left == "older weights":
        save_file(others, copied / "model_old.safetensors", {"format": "pt"})
    elif left == "older weights next to shards":
        shard(copied)
        save_file(others, copied / "weights.safetensors", {"format": "pt"})
    elif left == "older weights next to others that are named":
        weights.rename(copied / "custom.safetensors")
        save_file(others, weights, {"format": "pt"})
        config = json.loads((copied / "config.json").read_text())
        (copied / "config.json").write_text(
            json.dumps(config | {"transformers_weights": "custom.safetensors"})
        )
    elif left == "an adapter":
        torch.save(load_file(weights), copied / "pytorch_model.bin")
        weights.unlink()
        save_file({"lora": torch.zeros(3)}, copied / "adapter_model.safetensors")
    else:
        kept = shutil.copy(weights, tmp_path / "kept")
        save_file(others, weights, {"format": "pt"})
        shard(copied)
        shutil.copy(kept, weights)
        for each in copied.glob("model-*.safetensors") if left == "an index" else ():
            each.unlink()
    found = Checkpoint.resolve(copied, dtype=dtype, device="cpu")
    torch.testing.assert_close(score(load_model(found)), expected)
    if left != "an adapter":  # of pickles the size is estimated
        assert found.memory().weights == size


def test_the_chosen_dtype_device_and_runtime_are_described(checkpoint):
    loaded = load_model(Checkpoint.resolve(checkpoint, dtype="float32", device="cpu"))
    assert (loaded.name, loaded.path, loaded.dtype) == (str(checkpoint), str(checkpoint), "float32")
    assert (loaded.device, loaded.checkpoint.quantize, loaded.end_tokens) == ("cpu", None, frozenset({0}))
    assert loaded.tokenizer.decode(loaded.encode("def f(x):")) == "def f(x):"
    assert loaded.runtime.context_length == LLAMA_LIKE["max_position_embeddings"]
    assert loaded.runtime.vocab_size == 300


@pytest.mark.parametrize(("has_it", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_on_processors_with_bfloat16_products(checkpoint, monkeypatch, has_it, expected):
    monkeypatch.setattr("secondguess.checkpoint.plan.has_bfloat16", lambda _: has_it)
    assert Checkpoint.resolve(checkpoint, device="cpu", runtime="fused").dtype is expected


@needs_kernels
def test_auto_is_bfloat16_where_the_kernels_run_the_model(monkeypatch, tmp_path):
    monkeypatch.setattr("secondguess.checkpoint.plan.has_bfloat16", lambda _: False)
    for name, expected in (("llama", torch.bfloat16), ("gpt2", torch.float32)):
        path = write_checkpoint(FAMILIES[name](), tmp_path / name)
        assert Checkpoint.resolve(path, device="cpu").dtype is expected


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_requested_dtype_is_used(checkpoint, dtype):
    loaded = load_model(Checkpoint.resolve(checkpoint, dtype=dtype, device="cpu"))
    assert loaded.dtype == dtype
    assert reference_module(loaded).dtype == getattr(torch, dtype)
    assert_near(score(loaded).float(), plain_logits(plain_model(checkpoint), TOKENS)[-1], tolerance=0.2)
    assert loaded.runtime.cache.values[0].dtype == getattr(torch, dtype)


@needs_kernels
def test_the_module_of_a_model_whose_layers_the_kernels_run_is_one_that_torch_computes(checkpoint):
    loaded = load_model(
        Checkpoint.resolve(checkpoint, dtype="bfloat16", device="cpu", runtime="transformers")
    )
    assert type(loaded.runtime.model.lm_head) is KernelLinear
    assert type(reference_module(loaded).lm_head) is torch.nn.Linear


@needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_quantised_module_is_no_reference(checkpoint, dtype):
    loaded = load_model(
        Checkpoint.resolve(checkpoint, dtype=dtype, device="cpu", runtime="transformers", quantize="int8")
    )
    with pytest.raises(UnsupportedModelError, match="weights in 8 bits"):
        reference_module(loaded)


@pytest.mark.parametrize("by_kernels", [True, False])
def test_int8_logits_are_near_the_exact_ones(by_kernels, checkpoint, monkeypatch):
    if not by_kernels:
        pytest.importorskip("torchao")
        monkeypatch.setattr("secondguess.checkpoint.plan.can_quantise", lambda device: False)
    exact = load_model(Checkpoint.resolve(checkpoint, dtype="float32", device="cpu"))
    rounded = load_model(Checkpoint.resolve(checkpoint, dtype="float32", device="cpu", quantize="int8"))
    assert rounded.checkpoint.quantize == "int8"
    difference = (score(rounded) - score(exact)).abs().max()
    assert 0 < difference < 0.05 * score(exact).abs().max()


def test_int8_without_torchao_names_the_package_to_install(checkpoint, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setattr("secondguess.checkpoint.plan.can_quantise", lambda device: False)
    with pytest.raises(BadInputError, match=r"secondguess\[quant\]"):
        load_model(Checkpoint.resolve(checkpoint, quantize="int8", runtime="transformers"))


@pytest.mark.parametrize(
    ("option", "value"),
    [("dtype", "float8"), ("device", "abacus"), ("device", "cuda:99"), ("quantize", "int1")],
)
def test_unknown_options_are_refused(checkpoint, option, value):
    with pytest.raises(BadInputError, match=f"{option}.*{value}"):
        load_model(Checkpoint.resolve(checkpoint, **{option: value}))


def tiny(config_class, **sizes):
    common = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    return config_class(**(common | sizes))


REFUSED = {
    "recurrent": (
        lambda: transformers.RwkvConfig(vocab_size=300, hidden_size=16, num_hidden_layers=2),
        "rwkv.*takes no KV cache",
    ),
    "encoder-decoder": (
        lambda: transformers.T5Config(vocab_size=300, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2),
        "t5.*encoder-decoder",
    ),
    "bidirectional": (lambda: tiny(transformers.BertConfig, intermediate_size=16), "bidirectional"),
    "no cache": (
        lambda: transformers.OpenAIGPTConfig(vocab_size=300, n_embd=16, n_layer=1, n_head=2, n_positions=32),
        "openai-gpt.*takes no KV cache",
    ),
    "compressed cache": (
        lambda: tiny(
            transformers.LlamaConfig, intermediate_size=16, layer_types=["full_attention", "compressed_sparse_attention"]
        ),
        "llama.*summaries of several tokens",
    ),
    "cache of the last loop": (
        lambda: tiny(transformers.LlamaConfig, intermediate_size=16, recurrent_kv_cache_mode="last_loop"),
        "llama.*first loops read the cache of the last one",
    ),
}  # fmt: skip


def test_a_model_of_images_is_refused_in_one_line(tmp_path):
    transformers.ViTConfig().save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected a causal language model.*vit") as refused:
        Checkpoint.resolve(tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", REFUSED)
def test_unsupported_models_are_refused_by_name(kind, tmp_path):
    make_config, words = REFUSED[kind]
    config = make_config()
    if kind == "encoder-decoder":
        transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    else:
        write_checkpoint(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match=f"(?s){words}"):
        load_model(Checkpoint.resolve(tmp_path))


def test_weights_without_a_language_model_are_refused(copied):
    base = plain_model(copied).model
    base.save_pretrained(copied)
    with pytest.raises(CheckpointError, match="LlamaModel"):
        load_model(Checkpoint.resolve(copied))


def test_an_unknown_name_is_refused():
    with pytest.raises(CheckpointError, match="absent/model"):
        load_model(Checkpoint.resolve("absent/model"))


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_model(Checkpoint.resolve(tmp_path))


@pytest.mark.parametrize("name", ["num_hidden_layers", "max_position_embeddings"])
def test_a_configuration_without_layers_or_positions_is_refused(copied, name):
    for number in (0, -1):
        config = json.loads((copied / "config.json").read_text()) | {name: number}
        (copied / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError, match=f"{name} is {number}"):
            Checkpoint.resolve(str(copied))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"", b'{"model_type": "nonsense"}'])
def test_a_broken_configuration_is_refused(copied, content):
    (copied / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=str(copied)):
        load_model(Checkpoint.resolve(copied))


@pytest.mark.parametrize("kept", [0, 6, 500, -100])
def test_truncated_weights_are_refused(copied, kept):
    file = copied / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(Checkpoint.resolve(copied))


def test_missing_weights_are_refused(copied):
    (copied / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=str(copied)):
        load_model(Checkpoint.resolve(copied))


@pytest.mark.parametrize("content", [None, b"{"])
def test_a_missing_or_broken_tokenizer_is_refused(copied, content):
    (copied / "tokenizer.json").unlink()
    if content is not None:
        (copied / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="tokenizer"):
        load_model(Checkpoint.resolve(copied))


def test_a_folder_without_any_file_of_a_tokenizer_is_named(copied):
    for file in copied.glob("*token*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json; copy"):
        load_model(Checkpoint.resolve(copied))


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("unable to mmap 9 bytes: Cannot allocate memory (12)")]
)
def test_memory_that_the_system_does_not_give_is_named(checkpoint, monkeypatch, error):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr(loader, "NativeDecoder", refuse)
    monkeypatch.setattr(loader, "_loader_of", lambda _: SimpleNamespace(from_pretrained=refuse))
    with pytest.raises(OutOfMemoryError, match="expected memory for weights of"):
        load_model(Checkpoint.resolve(str(checkpoint)))


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_code_of_a_checkpoint_is_not_run(copied, part, monkeypatch, capfd):
    """Transformers would ask on the standard input."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    (copied / "own.py").write_text("raise SystemExit('run')")
    if part == "config.json":
        edit_json(copied / part, model_type="of_its_own", auto_map={"AutoConfig": "own.Config"})
    else:
        edit_json(copied / part, tokenizer_class="Own", auto_map={"AutoTokenizer": ["own.Own", None]})
    with pytest.raises(
        CheckpointError, match=r"got: one that needs code of the checkpoint; use a checkpoint"
    ):
        load_model(Checkpoint.resolve(str(copied)))
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(("ends", "expected"), [(3, {3}), ([3, 5], {3, 5}), (-1, set()), ([3, -1], {3})])
def test_negative_end_tokens_stand_for_none(copied, ends, expected):
    edit_json(copied / "generation_config.json", eos_token_id=ends)
    assert load_model(Checkpoint.resolve(str(copied))).end_tokens == expected


@pytest.mark.parametrize("ends", ["<|end|>", 3.0, [[3]], [3, "x"]])
def test_end_tokens_that_are_no_ids_are_refused(copied, ends):
    edit_json(copied / "generation_config.json", eos_token_id=ends)
    with pytest.raises(CheckpointError, match="expected eos_token_id to be a token id or a list"):
        load_model(Checkpoint.resolve(str(copied)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_that_the_configuration_leaves_out_are_refused(copied, dtype):
    config, file = json.loads((copied / "config.json").read_text()), copied / "model.safetensors"
    last = config["num_hidden_layers"] - 1
    assert last > 0
    (copied / "config.json").write_text(json.dumps(config | {"num_hidden_layers": last}))
    with pytest.raises(CheckpointError, match=rf"model\.layers\.{last}, while num_hidden_layers is {last}"):
        load_model(Checkpoint.resolve(copied, dtype=dtype))
    # With a tensor that no layer has it is another module, such as one that predicts later tokens.
    extra = {f"model.layers.{last}.eh_proj.weight": torch.zeros(1)}
    save_file(load_file(file) | extra, file, metadata={"format": "pt"})
    load_model(Checkpoint.resolve(copied, dtype=dtype))


def test_left_out_layers_are_told_from_other_tensors():
    """The kept layers differ, as in a mixture of experts whose first layer is dense; an image encoder has layers, too."""
    kept = [
        "layers.0.a",
        "layers.0.b",
        "layers.1.a",
        "layers.1.c",
        "layers.1.mlp.experts.0.w",
        "tower.blocks.0.a",
    ]
    model = SimpleNamespace(
        config=SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=2)),
        state_dict=lambda: dict.fromkeys(kept),
    )

    def check(*names: str) -> None:
        loader._check_complete(model, {"missing_keys": [], "unexpected_keys": names})

    # of a layer that shares it with another one, of the encoder, of another module, and not in any list
    check("layers.1.b", "tower.blocks.1.a", "tower.blocks.2.a", "layers.2.a", "layers.2.other", "rest")
    with pytest.raises(ValueError, match=r"layers\.3"):
        check("layers.3.a", "layers.3.c", "layers.3.mlp.experts.5.w")


def test_too_little_memory_is_reported_before_loading(checkpoint, monkeypatch):
    monkeypatch.setattr("secondguess.checkpoint.loader.module_of", lambda _: pytest.fail("weights were read"))
    monkeypatch.setattr(memory, "available_memory", lambda _: 1000)
    with pytest.raises(OutOfMemoryError, match=r"weights.*cache"):
        load_model(Checkpoint.resolve(checkpoint))


def test_the_estimate_equals_the_memory_of_model_and_cache(checkpoint):
    need = Checkpoint.resolve(checkpoint, dtype="float32").memory(256)
    loaded = load_model(Checkpoint.resolve(checkpoint, dtype="float32", device="cpu", runtime="transformers"))
    assert need.weights == sum(weight.nbytes for weight in loaded.runtime.model.parameters())
    score(loaded)
    cache = loaded.runtime.cache
    assert cache.capacity == 256
    assert need.cache == sum(block.nbytes for block in (*cache.keys, *cache.values))


def test_available_memory_is_read_from_the_system():
    assert memory.available_memory(torch.device("cpu")) > 2**20


def test_differently_padded_vocabularies_are_compatible(checkpoint, tmp_path):
    padded = transformers.LlamaConfig(**(LLAMA_LIKE | {"vocab_size": 320}))
    write_checkpoint(padded, tmp_path)
    target, drafter = (Checkpoint.resolve(path) for path in (checkpoint, tmp_path))
    assert (target.config.vocab_size, drafter.config.vocab_size) == (300, 320)
    assert target.has_same_tokenizer(drafter)


def test_another_tokenizer_is_noticed(checkpoint, copied):
    file = copied / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["!"], vocabulary["#"] = vocabulary["#"], vocabulary["!"]
    file.write_text(json.dumps(content))
    target, drafter = (Checkpoint.resolve(path) for path in (checkpoint, copied))
    assert not target.has_same_tokenizer(drafter)


def test_a_borrowed_model_is_restored(checkpoint):
    model = plain_model(checkpoint)
    with wrap_model(model) as loaded:
        assert (loaded.dtype, loaded.device, loaded.path) == ("float32", "cpu", str(checkpoint))
        assert loaded.end_tokens == {0}
        assert_near(score(loaded), plain_logits(plain_model(checkpoint), TOKENS)[-1])
    assert model.config._attn_implementation == "eager"


def test_the_folder_of_a_borrowed_model_is_found_by_its_name(checkpoint, monkeypatch):
    """The folder of a model loaded by its name is that in the cache; without cached files the name is kept."""
    cached = {"org/tiny": str(checkpoint / "config.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, _: cached.get(name))
    model = plain_model(checkpoint)
    for name, path in (("org/tiny", str(checkpoint)), ("org/gone", "org/gone"), ("", "")):
        model.name_or_path = name
        with wrap_model(model) as loaded:
            assert (loaded.name, loaded.path) == (name, path)


@pytest.mark.parametrize(
    ("rope", "expected"),
    [({"rope_type": "default", "rope_theta": 1e4}, 96),
     ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 48}, 48)],
)  # fmt: skip
def test_the_context_ends_where_rope_frequencies_depend_on_other_rows(rope, expected):
    assert context_length_of(transformers.LlamaConfig(**LLAMA_LIKE, rope_parameters=rope)) == expected


@pytest.mark.parametrize(("original", "limit", "expected"), [(32, 32, 128), (32, 40, 128), (32, 160, 160)])
@pytest.mark.parametrize("by_layer_type", [False, True])
def test_yarn_extends_the_context(original, limit, expected, by_layer_type):
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": original,
    }
    settings = LLAMA_LIKE | {"max_position_embeddings": limit}
    if by_layer_type:
        others = {"rope_type": "default", "rope_theta": 1e4}
        parts = {"full_attention": rope, "sliding_attention": others}
        config = transformers.Olmo3Config(**settings, rope_parameters=parts)
    else:
        config = transformers.Qwen3Config(**settings, rope_parameters=rope)
    assert context_length_of(config) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("runtime", ["auto", "transformers"])
def test_text_beyond_the_positions_of_training_is_that_of_transformers_with_yarn(dtype, runtime, tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    folder = write_llama(tmp_path, seed=0, max_position_embeddings=64, rope_parameters=rope)
    loaded = load_model(Checkpoint.resolve(folder, dtype=dtype, device="cpu", runtime=runtime))
    tokens = torch.randint(10, 300, (250,), generator=torch.Generator().manual_seed(1)).tolist()
    found, expected = score(loaded, tokens), plain_logits(plain_model(folder), tokens)[-1]
    assert loaded.runtime.context_length == 256
    assert (found.float() - expected).norm() < (1e-4 if dtype == "float32" else 0.03) * expected.norm()


def test_the_context_of_command_r_is_that_of_its_card():
    settings = LLAMA_LIKE | {"max_position_embeddings": 64, "model_max_length": 512}
    assert context_length_of(transformers.CohereConfig(**settings)) == 512


def test_the_context_ends_where_doge_drops_keys():
    assert context_length_of(transformers.DogeConfig(**LLAMA_LIKE, keep_window_size=40)) == 40
    assert context_length_of(transformers.DogeConfig(**LLAMA_LIKE)) == LLAMA_LIKE["max_position_embeddings"]


def test_the_context_ends_where_the_positions_of_a_layer_type_change():
    rope = {
        "full_attention": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "factor": 2.0,
            "original_max_position_embeddings": 48,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = transformers.Olmo3Config(**LLAMA_LIKE, rope_parameters=rope)
    assert context_length_of(config) == 48 < LLAMA_LIKE["max_position_embeddings"]


def test_a_configuration_of_which_no_model_can_be_made_is_one_error(copied):
    config = json.loads((copied / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "magic", "rope_theta": 1e4}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="got: no 'magic'"):
        describe(Checkpoint.resolve(copied, dtype="float32"))


@pytest.mark.parametrize("name", ["../model.safetensors", "/model.safetensors"])
def test_weights_outside_of_the_folder_are_refused(copied, name):
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
    with pytest.raises(CheckpointError, match="to be a file in it"):
        load_model(Checkpoint.resolve(copied))


@needs_kernels
@pytest.mark.parametrize("name", ["gptq_model-4bit-128g.safetensors", "model.fp16.safetensors"])
def test_weights_with_a_name_that_transformers_does_not_know_are_read_by_the_kernels(copied, name):
    expected = score(load_model(Checkpoint.resolve(copied)))
    (copied / "model.safetensors").rename(copied / name)
    assert torch.equal(score(load_model(Checkpoint.resolve(copied))), expected)


def test_a_directory_may_be_named_like_a_file(checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model.gguf")
    assert load_model(Checkpoint.resolve(folder, dtype="float32")).runtime.vocab_size == 300


def test_kernels_are_built_on_supported_systems():
    """A build that fails is only a warning of the installer, and without kernels their tests are skipped."""
    if platform.machine() not in ("x86_64", "aarch64") or sys.platform != "linux" or not shutil.which("c++"):
        pytest.skip("no kernels are built on this system")
    expected = {kind for kind in ("avx512", "avx2", "neon") if processor_supports(kind)}
    if not expected:
        pytest.skip("this processor lacks what the kernels are compiled for")
    assert expected <= {unit.name for unit in units()}, (
        "expected kernels next to library.py; run `pip install -v -e .` to see why not"
    )


def test_inspect_describes_every_runtime():
    described = import_module("secondguess.cli.inspect").RUNTIMES
    assert set(described) == set(RUNTIMES) - {"auto"}


@pytest.mark.parametrize(
    ("config", "expected"),
    [(transformers.MptConfig(max_seq_len=64), 64), (transformers.WhisperConfig(max_target_positions=48), 48)],
)
def test_the_context_is_read_under_a_name_of_the_types_own(config, expected):
    assert context_length_of(config) == expected


@pytest.mark.parametrize(
    ("settings", "num_values"),
    [
        ({"multi_query": True}, 2 * 8),
        ({"multi_query": False}, 2 * 32),
        ({"new_decoder_architecture": True}, 2 * 32),
    ],
)
def test_falcon_caches_one_key_head_if_all_query_heads_share_it(settings, num_values):
    config = transformers.FalconConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=2, **settings)
    assert [cached_values_per_token(layer) for layer in cached_layers(config)] == [num_values] * 2


def test_layers_with_a_sliding_window_may_have_other_key_heads():
    config = transformers.LlamaConfig(**LLAMA_LIKE)
    config.layer_types = ["sliding_attention", *["full_attention"] * (config.num_hidden_layers - 1)]
    config.swa_num_key_value_heads, config.swa_head_dim = 4, 32
    first, *others = [cached_values_per_token(layer) for layer in cached_layers(config)]
    assert first == 2 * 4 * 32
    assert all(each == 2 * config.num_key_value_heads * config.head_dim for each in others)


def test_values_may_be_smaller_than_keys():
    config = transformers.MiMoV2FlashConfig(
        num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=24, v_head_dim=16,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )  # fmt: skip
    config.swa_num_key_value_heads, config.swa_head_dim, config.swa_v_head_dim = 4, 12, 8
    assert [cached_values_per_token(layer) for layer in cached_layers(config)] == [80, 80, 80]


def test_parameters_of_all_layer_types_beside_those_of_each_are_no_layer_type():
    """As in a configuration that was written before layer types had parameters of their own."""
    config = transformers.Olmo3Config(
        **LLAMA_LIKE, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    assert undescribed_reason(config) is None


def test_threads_that_load_at_the_same_time_leave_transformers_as_it_was(tmp_path):
    """Transformers replaces functions of its own and of torch while it loads a model."""
    paths = [write_llama(tmp_path / str(seed), seed) for seed in range(2)]
    before = transformers.PreTrainedModel.tie_weights, torch.linspace, list(warnings.filters)
    with ThreadPoolExecutor() as pool:
        loads = [
            pool.submit(load, path, "none", dtype=dtype)
            for _ in range(5)
            for path, dtype in zip(paths, ("float32", "bfloat16"), strict=True)
        ]
        assert all(each.result() for each in loads)
    after = transformers.PreTrainedModel.tie_weights, torch.linspace, list(warnings.filters)
    assert after == before
    assert torch.get_default_dtype() == torch.float32
