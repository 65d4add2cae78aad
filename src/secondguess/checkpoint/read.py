"""Reading of a checkpoint's configuration, tokenizer and module. Never accesses the network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from secondguess.errors import BadInputError, CheckpointError, SecondGuessError
from secondguess.runtime.quiet import quiet
from secondguess.runtime.support import check_class, check_config, takes_masks

with quiet():
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        ProcessorMixin,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    from transformers.utils import logging as transformers_logging

CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@contextmanager
def _reading(part: str, path: str) -> Iterator[None]:
    """Suppress the output of Transformers, and turn its errors into one that names the part.

    An unreadable part raises exceptions of many libraries and kinds, some of them bare.
    """
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with quiet():
            yield
    except SecondGuessError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise CheckpointError(f"expected a readable {part} in {path}, got: {lines[0]}") from error
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


def read_config(path: str) -> Any:
    """Return the configuration of a checkpoint directory.

    Raises:
        CheckpointError: if it cannot be read.
    """
    with _reading("configuration", path):
        if not isinstance(json.loads((Path(path) / "config.json").read_bytes()), dict):
            raise ValueError("not a JSON object")
        return AutoConfig.from_pretrained(path, local_files_only=True)


def check_loadable(config: Any, path: str) -> None:
    """Check, before any weight is read, that a model is causal and can be decoded speculatively.

    Raises:
        CheckpointError: if it is not a causal language model.
        UnsupportedModelError: if it cannot be decoded speculatively.
    """
    name = f"{path} ({config.model_type})"
    check_config(config, name)
    model_class = _class_of(config)
    if model_class is None:
        raise CheckpointError(
            f"expected a causal language model, got {name}, which Transformers cannot load as one"
        )
    check_class(model_class, name)
    architectures = config.architectures or [model_class.__name__]
    if model_class.__name__ not in architectures and not any(
        architecture.endswith(CAUSAL_SUFFIXES) for architecture in architectures
    ):
        raise CheckpointError(
            f"expected a causal language model, got {name} whose weights are those of {', '.join(architectures)}"
        )


def _class_of(config: Any) -> Any:
    """Return the class of a causal or a vision-language model; None if there is none that we decode."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        return found if takes_masks(found, config) else None
    return None


def read_processor(path: str) -> Any:
    """Return the processor in a checkpoint directory, which turns images into inputs of the model.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    with _reading("processor for images", path):
        processor = AutoProcessor.from_pretrained(path, local_files_only=True)
        if not isinstance(processor, ProcessorMixin):
            raise ValueError(f"a {type(processor).__name__} alone; add the processor's files of the original")
        return processor


def read_tokenizer(path: str) -> Any:
    """Return the tokenizer in a checkpoint directory.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    with _reading("tokenizer", path):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
            raise ValueError("it has no tokens of its own")
        return tokenizer


def read_module(path: str, dtype: torch.dtype) -> Any:
    """Return the Transformers module of a checkpoint directory, with its weights.

    Raises:
        CheckpointError: if weights are missing or cannot be read.
    """
    with _reading("weights", path):
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        auto_class = AutoModelForCausalLM if is_causal else AutoModelForImageTextToText
        model, found = auto_class.from_pretrained(
            path, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
        return model


def pick_device(device: str) -> torch.device:
    """Return the torch device of a name; `auto` is the first CUDA device, or the CPU without one.

    Raises:
        BadInputError: if the device does not exist.
    """
    num_cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    known = ["cpu", *(f"cuda:{index}" for index in range(num_cuda))]
    aliases = {"auto": known[min(num_cuda, 1)]} | ({"cuda": "cuda:0"} if num_cuda else {})
    name = aliases.get(device, device)
    if name not in known:
        raise BadInputError(f"expected device auto, {', '.join(known)}, got {device!r}")
    return torch.device(name)


def find_end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return a model's end-of-sequence tokens; `tokenizer` may be None."""
    candidates = [
        model.generation_config.eos_token_id,
        getattr(model.config.get_text_config(), "eos_token_id", None),
    ]
    if tokenizer is not None:
        candidates.append(tokenizer.eos_token_id)
    ends = next((found for found in candidates if found is not None), ())
    return frozenset([ends] if isinstance(ends, int) else ends)


def require_torchao() -> None:
    """Check that torchao is installed, which quantises modules that the kernels do not run.

    Raises:
        BadInputError: if it is not.
    """
    try:
        with quiet():
            import torchao  # noqa: F401 - only whether it is there
    except ImportError as error:
        raise BadInputError("quantize='int8' needs torchao; run `pip install secondguess[quant]`") from error


def quantize_to_int8(model: Any) -> None:
    """Quantise weights to int8 with one scale per output channel, except a tied head."""
    require_torchao()
    with quiet():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        shared = model.get_input_embeddings().weight
        quantize_(
            model,
            Int8WeightOnlyConfig(),
            filter_fn=lambda module, _: isinstance(module, torch.nn.Linear) and module.weight is not shared,
        )
