"""Loading of models from their plans."""

from __future__ import annotations

import copy
import logging
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.memory import check_memory, return_freed_memory
from secondguess.checkpoint.plan import Checkpoint, require_torchao
from secondguess.checkpoint.progress import report_bytes
from secondguess.checkpoint.source import ONLY_FILES, GgufSource, Source
from secondguess.checkpoint.verdicts import Verdict, read_verdict, verdict_file, write_verdict
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.runtime.cached import CachedRuntime
from secondguess.runtime.coverage import missing_kernels_reason
from secondguess.runtime.cpu import library
from secondguess.runtime.cpu.check import check_decoder
from secondguess.runtime.cpu.decoder import NativeDecoder
from secondguess.runtime.cpu.linear import KernelLinear
from secondguess.runtime.cpu.runtime import NativeRuntime
from secondguess.runtime.decoder.families import missing_weights, weight_shapes
from secondguess.runtime.decoder.fused_decoder import FusedDecoder
from secondguess.runtime.decoder.products import can_pack
from secondguess.runtime.decoder.stored import StoredModel
from secondguess.runtime.modules.packing import pack_linears, quantise_linears
from secondguess.runtime.system.exclusive import one_at_a_time
from secondguess.runtime.system.machine import autocast_dtype, without_defaults_of_caller
from secondguess.runtime.system.quiet import quiet
from secondguess.runtime.weight_format import BFLOAT16, QUANTIZATIONS, WeightFormat

LAYER_NUMBER = re.compile(r"(?P<before>.+?)\.(?P<number>\d+)\.(?P<after>.+)")
"""Name of a tensor in a list of layers."""
TEXT = """The committee met on Tuesday morning to discuss the budget for the new library, which opens in 2027. "We have
enough for books," said Ana Petrovic, "but not for the roof."

def median(numbers):
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2

| city | population | rain (mm) |
|------|-----------:|----------:|
| Oslo | 709,037 | 763 |
"""
"""Ordinary text of several kinds, on which runtimes are compared."""
CHECKED_ROWS, CHECKED_TOKENS = 2, 20

logger = logging.getLogger(__name__)


@one_at_a_time()
def load_model(plan: Checkpoint) -> LoadedModel:
    """Return a model with its tokenizer, on the first of the plan's runtimes that reproduces its logits.

    Raises:
        CheckpointError: if weights or tokenizer are missing or broken.
        UnsupportedModelError: if the requested runtime, other than `native`, does not reproduce the model's logits.
        OutOfMemoryError: if weights and cache would not fit; nothing has been allocated.
    """
    plan.files.require_weights()
    check_memory([plan.memory()], plan.device)
    tokenizer = plan.tokenizer
    if plan.device.type == "cpu" and not library.units() and not plan.drafts:
        logger.warning(
            "torch computes %s, several times slower than the compiled kernels: %s",
            plan.name,
            missing_kernels_reason(),
        )
    attempts = [
        (name, weight_format)
        for name in plan.runtimes
        for weight_format in (plan.weight_formats if name == "native" else [BFLOAT16])
    ]
    for number, (name, weight_format) in enumerate(attempts):
        if number:
            return_freed_memory()  # of the runtime that failed its check
            # the weights must fit as they are, not in the encoding that was tried first
            check_memory([replace(plan, runtime="transformers").memory()], plan.device)
        try:
            runtime = _make_runtime(plan, name, weight_format)
        except FloatingPointError as error:
            raise CheckpointError(
                f"expected weights that give numbers as logits in {plan.path}, got NaN; copy or download the checkpoint again"
            ) from error
        if runtime is not None:
            if plan.dtype_needs_kernels and name != "native":
                del runtime
                return load_model(replace(plan, dtype=torch.float32, dtype_needs_kernels=False))
            plan.files.close()
            return LoadedModel(plan, runtime, tokenizer, find_end_tokens(plan, tokenizer))
    raise plan.not_covered()


def _make_runtime(plan: Checkpoint, name: str, weight_format: WeightFormat) -> CachedRuntime | None:
    """Return a runtime of a model; None if it does not reproduce the module's logits.

    Args:
        plan: the model.
        name: name of the runtime.
        weight_format: encoding of the weights for the kernels.
    """
    if name == "native":
        return _native_runtime(plan, weight_format)
    return module_runtime(plan, name, module_of(plan))


def module_runtime(plan: Checkpoint, name: str, model: Any) -> CachedRuntime | None:
    """Return a runtime of a Transformers module; None if it does not reproduce the module's logits.

    Args:
        plan: description of the module.
        name: name of the runtime, not `native`.
        model: the module, in evaluation mode; it must not be used by the caller afterwards.
    """
    if name in ("fused", "graphs"):
        from secondguess.runtime.cuda.runtime import to_graphs
        from secondguess.runtime.decoder.fused import FusedRuntime, fuse, fuse_for_kernels

        if name == "fused":
            fused = fuse(model, can_pack(plan.dtype, plan.device))
            return None if fused is None else FusedRuntime(fused)
        checked = fuse_for_kernels(model)
        return to_graphs(checked) if checked else None
    from secondguess.runtime.modules.transformers import TransformersRuntime

    if plan.quantises_linears:
        quantise_linears(model, QUANTIZATIONS[str(plan.quantize)])
    elif plan.quantize is not None:
        _quantise_by_torchao(model)
    elif plan.is_packed:
        pack_linears(model)
    return TransformersRuntime(model)


def _native_runtime(plan: Checkpoint, weight_format: WeightFormat) -> NativeRuntime | None:
    """Return a runtime of the kernels with weights in an encoding; None if its check has refused it."""
    kept = verdict_file(plan, weight_format)
    verdict = read_verdict(kept)
    if verdict is not None and not verdict.passes and plan.runtime == "auto":
        _log_refusal(plan, weight_format, verdict)
        return None
    decoder, read = _packed_decoder(plan, weight_format)
    return_freed_memory()
    if verdict is None:
        report_bytes(
            _num_bytes(plan), _num_bytes(plan), f"checking the kernels, once for {_short_name(plan)}"
        )
        outline, tokens = _outline(plan), _checked_tokens(plan)
        try:
            verdict = Verdict.of_parts(check_decoder(NativeRuntime(decoder), outline, read, tokens))
            write_verdict(kept, verdict)
        except (AttributeError, KeyError, TypeError, RuntimeError) as error:  # of code that is not ours
            verdict = Verdict(f"a check that failed with {type(error).__name__} ({error})", math.nan, 0.0)
    if not verdict.passes:
        _log_refusal(plan, weight_format, verdict)
        if plan.runtime == "auto":
            return None
    return NativeRuntime(decoder)


def _packed_decoder(
    plan: Checkpoint, weight_format: WeightFormat
) -> tuple[NativeDecoder, Callable[[str], Tensor]]:
    """Return a decoder with the weights of a checkpoint, and a function that returns its vectors by their names."""
    source, config = plan.files, plan.config
    num_bytes = _num_bytes(plan)

    def report(num_packed: int) -> None:
        report_bytes(num_bytes * num_packed // plan.num_layers, num_bytes, f"loading {_short_name(plan)}")

    if source.has_single_weights:
        with source.reading("weights"):
            weights = source.weights(plan.device)
            if not missing_weights(config, weights):
                _refuse_layers(plan.num_layers, weight_shapes(config), weights.names)
                model = StoredModel(config, weights, torch.bfloat16)
                fused = FusedDecoder(model, packed=False)
                return NativeDecoder(fused, weight_format, report=report), weights.read
    module = module_of(plan)
    parameters = module.named_parameters()
    vectors = {name: weight.detach().clone() for name, weight in parameters if weight.dim() == 1}
    fused = FusedDecoder(module, packed=False)
    return NativeDecoder(fused, weight_format, report=report), vectors.__getitem__


def _num_bytes(plan: Checkpoint) -> int:
    return sum(file.stat().st_size for file in plan.files.weight_files)


def _short_name(plan: Checkpoint) -> str:
    return f"{Path(plan.name).name:.40}"


def _outline(plan: Checkpoint) -> Any:
    from secondguess.checkpoint.classes import outline_with_buffers

    with plan.files.reading("a model of a configuration"):
        return outline_with_buffers(copy.deepcopy(plan.config))


def _checked_tokens(plan: Checkpoint) -> Tensor:
    """Return the texts `[row, token]` on which runtimes are compared."""
    width = min(CHECKED_TOKENS, plan.context_length or CHECKED_TOKENS)
    try:
        tokens = plan.tokenizer(TEXT, verbose=False, add_special_tokens=True).input_ids
    except Exception:  # a tokenizer of a kind that is not ours; any tokens will do
        tokens = []
    limit = plan.config.get_text_config().vocab_size
    wanted = CHECKED_ROWS * width
    tokens = [token for token in tokens if token < limit]
    tokens += [token % limit for token in range(wanted - len(tokens))]
    return torch.tensor(tokens[:wanted]).view(CHECKED_ROWS, width)


def _log_refusal(plan: Checkpoint, weight_format: WeightFormat, verdict: Verdict) -> None:
    """Say that the kernels are not used, or are used although their check has failed."""
    role = "draft model" if plan.drafts else "model"
    found = f"in {plan.name} {verdict.description}"
    if plan.runtime == "native":
        logger.warning(
            "the kernels run the %s in %s although their check failed: %s", role, weight_format.name, found
        )
        return
    logger.warning(
        "the kernels do not run the %s in %s: %s; another runtime computes it, which may be slower or take more memory "
        "(runtime native runs the kernels all the same)",
        role,
        weight_format.name,
        found,
    )


@contextmanager
def wrap_model(model: Any) -> Iterator[LoadedModel]:
    """Wrap the user's own model as a `LoadedModel` and restore the model when the context ends.

    The model's passes run under the caller's `torch.autocast`; everything else in the context runs without.
    """
    from secondguess.runtime.modules.transformers import TransformersRuntime, remember

    dtype, restore = autocast_dtype(model.device), remember(model)
    try:
        with without_defaults_of_caller(model.device), TransformersRuntime(model) as runtime:
            runtime.forward.call.autocast_dtype = dtype
            plan = replace(Checkpoint.from_module(model), runtime="transformers")
            ends = _end_tokens([model.generation_config.eos_token_id, _eos_of(model.config)])
            yield LoadedModel(plan, runtime, None, ends)
    except BaseException:  # Ctrl-C may come before or after the runtime's own context
        restore()
        raise


def module_of(plan: Checkpoint) -> Any:
    """Return the Transformers module of a model with its weights, on the device; see `read_module`."""
    return read_module(plan.files, plan.config, plan.dtype, plan.device).to(plan.device).eval()


def reference_module(loaded: LoadedModel) -> Any:
    """Return the Transformers module whose distribution a loaded model's runtime reproduces.

    It is the module that the runtime runs, if torch computes all of it, or else a second copy loaded
    into memory.

    Raises:
        UnsupportedModelError: if the weights are quantised, which no module reproduces.
    """
    if (bits := loaded.quantised_bits) is not None:
        raise UnsupportedModelError(
            f"expected a model that a Transformers module computes, got {loaded.name} with weights in {bits} bits; "
            "load it without quantize, and a checkpoint that is stored quantised with runtime transformers"
        )
    model = loaded.runtime.module
    if model is None or any(isinstance(module, KernelLinear) for module in model.modules()):
        return module_of(loaded.checkpoint)
    return model


def read_module(source: Source, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return the Transformers module of a checkpoint on the CPU, with its weights.

    Args:
        source: files of the checkpoint.
        config: its configuration.
        dtype: dtype of the module.
        device: device on which the module will run.

    Raises:
        CheckpointError: if weights are missing or cannot be read.
    """
    from secondguess.checkpoint.classes import config_of_class

    with source.reading("weights"):
        encoding = source.encoding(device)
        if encoding is not None or (isinstance(source, GgufSource) and source.is_known):
            return _read_single_weights(source, config, dtype, device)
        model, found = _loader_of(config).from_pretrained(
            **_arguments_of(source),
            config=config_of_class(config) if isinstance(source, GgufSource) else config,
            dtype=dtype,
            output_loading_info=True,
            **_experts_option(dtype),
        )
        _check_complete(model, found)
        if getattr(config, "quantization_config", None) is not None:
            _convert_others(model, dtype)
    return_freed_memory()
    return model


def _loader_of(config: Any) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from secondguess.checkpoint.classes import class_of, has_text, is_causal

    if not has_text(config):  # pixels have no automatic class
        return class_of(config)
    return AutoModelForCausalLM if is_causal(config) else AutoModelForImageTextToText


def _arguments_of(source: Source) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a directory or a GGUF file."""
    if isinstance(source, GgufSource):
        folder, name = str(source.path.parent), source.path.name
        return {"pretrained_model_name_or_path": folder, "gguf_file": name, **ONLY_FILES}
    return {"pretrained_model_name_or_path": str(source.path), **ONLY_FILES}


def _read_single_weights(source: Source, config: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a module from weights that are read one by one."""
    from transformers import GenerationConfig

    from secondguess.checkpoint.classes import class_of, config_of_class

    if isinstance(source, GgufSource) and config.model_type == "gpt_oss":
        raise UnsupportedModelError(
            "expected a runtime with our kernels for a GGUF file of gpt-oss, which Transformers does not read, got "
            "another one or another dtype than bfloat16; use the safetensors checkpoint, which has the same weights"
        )
    weights = source.weights(device, by_expert=False)
    tensors = {}
    for name in weights.names:
        found = weights.read(name)
        tensors[name] = found.to(dtype) if weights.quantises(name) else found
    model, info = class_of(config).from_pretrained(
        None,
        config=config_of_class(config),
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        **_experts_option(dtype),
    )
    _check_complete(model, info)
    if source.generation_values:
        model.generation_config = GenerationConfig.from_dict(dict(source.generation_values))
    return model


def _convert_others(model: Any, dtype: torch.dtype) -> None:
    """Convert what was not quantised to the dtype of dequantised weights: Transformers leaves it as in the file."""
    for parameter in model.parameters():
        if type(parameter.data) is torch.Tensor and parameter.dtype in (
            torch.float32,
            torch.bfloat16,
            torch.float16,
        ):
            parameter.data = parameter.data.to(dtype)


def _experts_option(dtype: torch.dtype) -> dict[str, str]:
    """Return the argument of `from_pretrained` with which mixtures of experts run in this dtype.

    torch multiplies grouped matrices in all but float64.
    """
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def _check_complete(model: Any, loading_info: Any) -> None:
    """Check that no tensor of the module is missing, and that the module has all layers with weights."""
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    _refuse_layers(num_layers, model.state_dict(), loading_info["unexpected_keys"])


def _refuse_layers(num_layers: int, used: Iterable[str], others: Iterable[str]) -> None:
    """Refuse tensors of layers beyond those of the configuration, by names that are used and others."""
    kept, left_out = _tensors_by_layer(used), _tensors_by_layer(others)
    for (before, number), tensors in sorted(left_out.items()):
        # Not the layers of an image encoder, nor tensors that a layer does not use, such as keys that it shares.
        if number < num_layers or (before, num_layers - 1) not in kept or (before, number) in kept:
            continue
        # A module for the prediction of later tokens (MTP) is stored as a layer, with more tensors than one.
        if any(tensors <= kept[before, index] for index in range(num_layers)):
            raise ValueError(f"weights of {before}.{number}, while num_hidden_layers is {num_layers}")


def _tensors_by_layer(names: Iterable[str]) -> dict[tuple[str, int], set[str]]:
    """Return the names within each layer of its tensors, except those of single experts, by list and number."""
    by_layer: dict[tuple[str, int], set[str]] = defaultdict(set)
    for name in names:
        if (found := LAYER_NUMBER.fullmatch(name)) and ".experts." not in name:
            by_layer[found["before"], int(found["number"])].add(found["after"])
    return by_layer


def find_end_tokens(plan: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """Return a model's end-of-sequence tokens: those of its generation settings, configuration or tokenizer.

    Raises:
        CheckpointError: if they are not token ids.
    """
    named = plan.source.generation_values.get("eos_token_id") if plan.source is not None else None
    return _end_tokens([named, _eos_of(plan.config), tokenizer.eos_token_id])


def _eos_of(config: Any) -> Any:
    return getattr(config.get_text_config(), "eos_token_id", None)


def _end_tokens(candidates: Iterable[Any]) -> frozenset[int]:
    """Return the first end-of-sequence tokens that there are, without negative ones, which stand for none."""
    ends = next((found for found in candidates if found is not None), ())
    ids = ends if isinstance(ends, list | tuple | set) else [ends]
    if not all(type(token) is int for token in ids):
        raise CheckpointError(
            f"expected eos_token_id to be a token id or a list of them, got {ends!r:.60}; correct it in "
            "generation_config.json or config.json"
        )
    return frozenset(token for token in ids if token >= 0)


def _quantise_by_torchao(model: Any) -> None:
    """Quantise weights to int8 with one scale per output channel, except a tied head."""
    require_torchao()
    with quiet():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        shared = model.get_input_embeddings().weight
        quantize_(
            model,
            Int8WeightOnlyConfig(),
            filter_fn=lambda module, _: isinstance(module, nn.Linear) and module.weight is not shared,
        )
