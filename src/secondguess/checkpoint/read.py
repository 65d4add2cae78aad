"""Reading of a checkpoint's configuration, tokenizer and module. Never accesses the network."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from torch import nn

from secondguess.checkpoint.experts import stored_experts
from secondguess.checkpoint.gguf import GgufWeights
from secondguess.checkpoint.gguf_config import is_known, is_of_gpt_oss, read_gguf_config
from secondguess.checkpoint.quantised import (
    CPU,
    Encoding,
    JoinedExperts,
    StoredWeights,
    encoding_error,
    read_encoding,
    require_unquantised,
)
from secondguess.checkpoint.resolve import how_to_complete
from secondguess.checkpoint.weights import (
    LFS_ADVICE,
    LFS_POINTER,
    is_gguf,
    is_lfs_pointer,
    tensor_files,
    weight_files,
)
from secondguess.errors import (
    BadInputError,
    CheckpointError,
    OutOfMemoryError,
    SecondGuessError,
    UnsupportedModelError,
)
from secondguess.runtime.exclusive import loading
from secondguess.runtime.quiet import no_progress_bars, quiet
from secondguess.runtime.stored import StoredLinear, WeightSource
from secondguess.runtime.support import check_class, check_config, takes_masks

with quiet():
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoProcessor,
        AutoTokenizer,
        GenerationConfig,
        ProcessorMixin,
        TokenizersBackend,
    )
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    from transformers.quantizers import AutoHfQuantizer
    from transformers.utils.chat_template_utils import render_jinja_template

MAX_REASON_LENGTH = 300
"""Characters of a library's error that are shown."""
LOADED_WHOLE = frozenset({"emu3"})
"""Vision-language types in whose checkpoints Transformers does not find the text part alone."""
TOKENIZER_FILES = ("tokeniz*", "*vocab*", "*.model", "*.tiktoken", "merges.txt", "tekken.json")
"""Patterns of the names of a tokenizer's files."""
DEQUANTISED = ("fp8", "compressed-tensors", "mxfp4")
"""Encodings that Transformers dequantises when it loads a checkpoint, at least on some machines."""
LAYER_NUMBER = re.compile(r"(?P<before>.+?)\.(?P<number>\d+)\.(?P<after>.+)")
"""Name of a tensor in a list of layers."""
_ONLY_FILES = {"local_files_only": True, "trust_remote_code": False}
"""Arguments of `from_pretrained`. If `trust_remote_code` is left out, Transformers asks on the standard input."""
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of `generation_config.json` that are sampling settings."""
CAUSAL_SUFFIXES = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Return a context that one thread at a time is in.

    While it loads a model, Transformers replaces functions of its own and of torch, and the default dtype. A fork
    waits until it has restored them.
    """
    with loading:
        yield


@contextmanager
def _reading(part: str, path: str) -> Iterator[None]:
    """Suppress the output of Transformers, and turn its errors into one that names the part.

    An unreadable part raises exceptions of many libraries and kinds, some of them bare.
    """
    try:
        with one_at_a_time(), no_progress_bars():
            yield
    except SecondGuessError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        advice = "copy or download the checkpoint again"
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            raise OutOfMemoryError(
                f"expected memory for {part} of {path}, got none from the system; use a smaller model or dtype, or allow "
                "this process more"
            ) from error
        if (pointer := _find_pointer(Path(path))) is not None:
            reason, advice = f"{pointer.name}, {LFS_POINTER}", LFS_ADVICE
        elif "ignore_mismatched_sizes" in reason:
            reason = "weights of other shapes than the configuration says"
        elif isinstance(error, PermissionError):
            advice = "allow this user to read it"
        elif isinstance(error, ImportError):
            advice = "install the package, or use another model"
        elif isinstance(error, KeyError):
            reason = f"no {reason}"
        elif "trust_remote_code" in reason:
            reason, advice = (
                "one that needs code of the checkpoint",
                "use a checkpoint without, because it is not run",
            )
        elif "does not recognize this architecture" in reason:
            reason, advice = reason.partition(". ")[0], "update Transformers, or use another model"
        raise CheckpointError(
            f"expected {part} that can be read in {path}, got: {shorten(reason, MAX_REASON_LENGTH, placeholder=' ...')}; "
            f"{advice}"
        ) from error


def _find_pointer(folder: Path) -> Path | None:
    """Return a file that is read for the model, and for which Git LFS has left a pointer; None if there is none."""
    others = (file for name in ("config.json", *TOKENIZER_FILES) for file in folder.glob(name))
    return next(filter(is_lfs_pointer, [*weight_files(folder), *others]), None)


def _source(path: str) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for a directory or a GGUF file."""
    file = Path(path)
    if is_gguf(path):
        return {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name, **_ONLY_FILES}
    return {"pretrained_model_name_or_path": path, **_ONLY_FILES}


def read_config(path: str, device: torch.device = CPU) -> Any:
    """Return the configuration of a checkpoint directory.

    It has no `quantization_config` if the weights are decoded here for the device.

    Raises:
        CheckpointError: if it cannot be read.
    """
    with _reading("a configuration", path):
        if is_gguf(path):
            return read_gguf_config(Path(path))
        if not isinstance(json.loads((Path(path) / "config.json").read_bytes()), dict):
            raise ValueError("not a JSON object")
        config = AutoConfig.from_pretrained(**_source(path))
        for name in ("num_hidden_layers", "max_position_embeddings"):
            number = getattr(config.get_text_config(), name, None)
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}, not 1 or more")
        if read_encoding(Path(path), device) is not None:  # decoded here, not by Transformers
            del config.quantization_config
        return config


def check_loadable(config: Any, path: str, device: torch.device = CPU) -> None:
    """Check, before any weight is read, that a model is causal and can be decoded speculatively.

    Raises:
        CheckpointError: if it is not a causal language model.
        UnsupportedModelError: if it cannot be decoded speculatively.
    """
    name = f"{path} ({config.model_type})"
    check_config(config, name)
    _check_quantisation(config, path, device)
    model_class = class_of(config)
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


def _check_quantisation(config: Any, path: str, device: torch.device) -> None:
    """Check that Transformers can decode the weights of a quantised checkpoint that is not decoded here."""
    described = _described_quantisation(config)
    if not described:
        with _reading("a configuration", path):
            if read_encoding(Path(path), device) is None:
                require_unquantised(Path(path))
        return
    try:
        with quiet():
            AutoHfQuantizer.from_config(described).validate_environment(device_map=None, weights_only=True)
    except Exception as error:
        # libraries that are not installed, processors, and unknown names raise errors of many kinds
        names = ("quant_method", "quant_algo", "format")
        found = " ".join(str(described[key]) for key in names if described.get(key))
        unnamed = f"quantization_config {shorten(str(described), MAX_REASON_LENGTH, placeholder=' ...')}"
        raise encoding_error(found or unnamed, str(error).splitlines()[0]) from error


def kept_quantisation(config: Any) -> str | None:
    """Return the name of the encoding whose weights Transformers keeps quantised; None without one."""
    method = _described_quantisation(config).get("quant_method")
    return None if method is None or method in DEQUANTISED else str(method)


def check_dtype_of_torchao(config: Any, dtype: torch.dtype, name: str) -> None:
    """Check that torchao multiplies the weights of a checkpoint, if they are its own, in a dtype.

    Raises:
        UnsupportedModelError: if it does not.
    """
    needed = dtype_for_torchao(config, dtype)
    if needed != dtype:
        expected, found = (str(each).removeprefix("torch.") for each in (needed, dtype))
        raise UnsupportedModelError(
            f"expected dtype {expected} for {name}, whose weights torchao multiplies in no other, got {found}; load it with "
            f"dtype {expected}"
        )


def dtype_for_torchao(config: Any, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for a checkpoint with weights of torchao: a given one, or the only one in which it multiplies them.

    Weights in 8-bit integers take all, except float64 if inputs are quantised, too; others take that of their scales.
    """
    described = _described_quantisation(config)
    if described.get("quant_method") != "torchao" or not isinstance(config.dtype, torch.dtype):
        return dtype
    kinds = described.get("quant_type")
    default = kinds.get("default") if isinstance(kinds, dict) else None
    kind = str(default.get("_type")) if isinstance(default, dict) else str(kinds)
    takes_all = kind.startswith("Int8") and not (dtype == torch.float64 and "Dynamic" in kind)
    return dtype if takes_all else config.dtype


def _described_quantisation(config: Any) -> dict[str, Any]:
    described = getattr(config, "quantization_config", None) or {}
    return dict(described if isinstance(described, dict) else described.to_dict())


def class_of(config: Any) -> Any:
    """Return the class of a causal or a vision-language model; None if there is none that we decode."""
    if _is_causal(config):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not has_text(config):
        return MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING[type(config)]
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        return found if takes_masks(found, config) else None
    return None


def _is_causal(config: Any) -> bool:
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in LOADED_WHOLE


def has_text(config: Any) -> bool:
    """Return False for models whose tokens are codes of pixels, which need no tokenizer."""
    return type(config) not in MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING


def read_processor(path: str) -> Any:
    """Return the processor in a checkpoint directory, which turns images into inputs of the model.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    with _reading("a processor for images", path):
        processor = AutoProcessor.from_pretrained(path, **_ONLY_FILES)
        if not isinstance(processor, ProcessorMixin):
            raise ValueError(f"a {type(processor).__name__} alone; add the processor's files of the original")
        return processor


def read_tokenizer(path: str) -> Any:
    """Return the tokenizer in a checkpoint directory.

    Raises:
        CheckpointError: if there is none, or it cannot be read.
    """
    if not is_gguf(path) and not any(next(Path(path).glob(name), None) for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"expected a tokenizer in {path}, got none of its files, such as tokenizer.json; {how_to_complete(path)}"
        )
    with _reading("a tokenizer", path):
        # AutoTokenizer reads the configuration, too
        is_of_its_own = is_gguf(path) and is_of_gpt_oss(Path(path))
        tokenizer_class = TokenizersBackend if is_of_its_own else AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(**_source(path))
        if len(tokenizer.get_vocab()) <= len(tokenizer.get_added_vocab()):
            raise ValueError("it has no tokens of its own")
        return tokenizer


def read_module(
    path: str, dtype: torch.dtype, layer_by_layer: bool = False, device: torch.device = CPU
) -> Any:
    """Return the Transformers module of a checkpoint directory, with its weights.

    Args:
        path: the directory.
        dtype: dtype of the module.
        layer_by_layer: whether linear layers become `StoredLinear`, where the format allows it.
        device: device on which the module, which is returned on the CPU, will run.

    Raises:
        CheckpointError: if weights are missing or cannot be read.
    """
    with _reading("a generation configuration", path):
        if (file := Path(path) / "generation_config.json").is_file():
            json.loads(file.read_bytes())
    with _reading("weights", path):
        config = read_config(path, device)
        encoding = read_encoding(Path(path), device)
        if encoding is not None or (layer_by_layer and (is_gguf(path) or tensor_files(Path(path)))):
            return _read_stored(Path(path), config, encoding, dtype, layer_by_layer)
        if is_gguf(path) and is_of_gpt_oss(Path(path)):
            raise UnsupportedModelError(
                "expected a runtime with our kernels for a GGUF file of gpt-oss, which Transformers does not read, got "
                "another one or another dtype than bfloat16; use the safetensors checkpoint, which has the same weights"
            )
        if is_gguf(path) and is_known(Path(path)):
            # refuses weights that Transformers would leave out
            GgufWeights(Path(path), outline_of(config, path))
        auto_class = AutoModelForCausalLM if _is_causal(config) else AutoModelForImageTextToText
        loader = auto_class if has_text(config) else class_of(config)  # pixels have no automatic class
        model, found = loader.from_pretrained(
            **_source(path), config=config, dtype=dtype, output_loading_info=True, **_experts_option(dtype)
        )
        _check_complete(model, found)
        if getattr(config, "quantization_config", None) is not None:
            _convert_others(model, dtype)
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


def _read_stored(
    path: Path, config: Any, encoding: Encoding | None, dtype: torch.dtype, layer_by_layer: bool
) -> Any:
    """Return a module from weights that are read one by one."""
    model_class, outline = class_of(config), outline_of(config, str(path))
    weights = _open_weights(path, outline, encoding, layer_by_layer)
    linears = {f"{name}.weight": each for name, each in outline.named_modules() if type(each) is nn.Linear}
    experts, in_experts = stored_experts(weights, outline, dtype) if layer_by_layer else ({}, set())
    tensors, stored = {}, {}
    for layer_name in experts:
        for name, joined in outline.get_submodule(layer_name).named_parameters():
            tensors[f"{layer_name}.{name}"] = torch.zeros((), dtype=dtype).expand(joined.shape)
    for name in weights.names:
        if name in in_experts:
            continue
        linear = linears.get(name)
        is_tied_head = linear is not None and _is_tied_head(outline, linear)
        if layer_by_layer and linear is not None and (not is_tied_head or weights.quantises(name)):
            stored[name] = linear.in_features, linear.out_features
            if not is_tied_head:
                tensors[name] = torch.zeros((), dtype=dtype).expand(linear.weight.shape)  # takes no memory
        else:
            found = weights.read(name)
            tensors[name] = found.to(dtype) if weights.quantises(name) else found
    model, info = model_class.from_pretrained(
        None,
        config=config_of_class(config),
        state_dict=tensors,
        dtype=dtype,
        output_loading_info=True,
        **_experts_option(dtype),
    )
    _check_complete(model, info)
    for name, sizes in stored.items():
        module_name = name.removesuffix(".weight")
        bias = model.get_submodule(module_name).bias
        model.set_submodule(module_name, StoredLinear(weights, name, *sizes, bias, dtype))
    for layer_name, module in experts.items():
        model.set_submodule(layer_name, module)
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path)
    return model


def check_chat_template(source: str, name: str) -> None:
    """Check the syntax of a chat template.

    Raises:
        BadInputError: it is not in Jinja; the message has the name and the line.
    """
    try:
        render_jinja_template([[{"role": "user", "content": ""}]], chat_template=source)
    except TemplateSyntaxError as error:
        raise BadInputError(
            f"expected a chat template in Jinja, got {name} with an error in line {error.lineno}: {error.message}; correct it"
        ) from None
    except Exception:  # it may need variables of the tokenizer, or refuse this conversation
        return


def outline_of(config: Any, path: str) -> Any:
    """Return the module of a configuration, without memory.

    Raises:
        CheckpointError: if Transformers cannot make it; names the path.
    """
    with _reading("a model of a configuration", path), torch.device("meta"):
        return class_of(config)(config_of_class(config))


def config_of_class(config: Any) -> Any:
    """Return the configuration that `class_of` is made from, as the automatic classes of Transformers choose it.

    For a class of text alone it is the text part of the configuration of a vision-language model.
    """
    found = class_of(config)
    is_of_text = found is not None and found.config_class is config.sub_configs.get("text_config")
    return config.get_text_config() if is_of_text else config


def _open_weights(path: Path, outline: Any, encoding: Encoding | None, by_expert: bool) -> WeightSource:
    if is_gguf(path):
        return GgufWeights(path, outline)
    if encoding is not None and encoding.joins_experts:
        return JoinedExperts(path, encoding, by_expert)
    return StoredWeights(tensor_files(path), encoding)


def _experts_option(dtype: torch.dtype) -> dict[str, str]:
    """Return the argument of `from_pretrained` with which mixtures of experts run in this dtype.

    torch multiplies grouped matrices in all but float64.
    """
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}


def _is_tied_head(model: Any, linear: Any) -> bool:
    return linear is model.get_output_embeddings() and ties_embeddings(model.config)


def ties_embeddings(config: Any) -> bool:
    """Return whether the head shares the weights of the input embeddings.

    Transformers reads the outermost configuration of a vision-language model.
    """
    return bool(getattr(config, "tie_word_embeddings", False))


def _check_complete(model: Any, loading_info: Any) -> None:
    """Check that no tensor of the module is missing, and that the module has all layers with weights."""
    if missing := sorted(loading_info["missing_keys"]):
        raise ValueError(f"{len(missing)} tensors are missing, such as {missing[0]}")
    num_layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    kept, left_out = _tensors_by_layer(model.state_dict()), _tensors_by_layer(loading_info["unexpected_keys"])
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
        advice = "; torch finds no CUDA device: see nvidia-smi, or install a CUDA build of torch"
        shown = advice if "cuda" in device and not num_cuda else ""
        raise BadInputError(f"expected device auto, {', '.join(known)}, got {device!r}{shown}")
    return torch.device(name)


def read_recommended_sampling(path: str) -> dict[str, Any]:
    """Return the sampling settings in a checkpoint's `generation_config.json`; none without that file.

    Raises:
        CheckpointError: if it cannot be read.
    """
    file = Path(path) / "generation_config.json"
    if not file.is_file():
        return {}
    with _reading("a generation configuration", path):
        values = json.loads(file.read_bytes())
        return {name: values[name] for name in RECOMMENDED if values.get(name) is not None}


def find_end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Return a model's end-of-sequence tokens, without negative ones, which stand for none; `tokenizer` may be None.

    Raises:
        CheckpointError: if they are not token ids.
    """
    candidates = [
        model.generation_config.eos_token_id,
        getattr(model.config.get_text_config(), "eos_token_id", None),
    ]
    if tokenizer is not None:
        candidates.append(tokenizer.eos_token_id)
    ends = next((found for found in candidates if found is not None), ())
    ids = ends if isinstance(ends, list | tuple | set) else [ends]
    if not all(type(each) is int for each in ids):
        raise CheckpointError(
            f"expected eos_token_id to be a token id or a list of them, got {ends!r:.60}; correct it in "
            "generation_config.json or config.json"
        )
    return frozenset(each for each in ids if each >= 0)


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
