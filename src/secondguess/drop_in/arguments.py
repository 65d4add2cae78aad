"""Arguments of `model.generate`: supported, without effect, or refused by name.

A setting added by a later version of Transformers is in none of these lists, and is therefore
refused until it is classified.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, equal
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig

from secondguess.core import ImageInputs
from secondguess.errors import BadInputError
from secondguess.images import MODELS_WITH_IMAGES
from secondguess.runtime.modules.support import CACHE_PARAMETERS

# Read here, or by Transformers when it prepares prompt, lengths, processors and criteria.
SUPPORTED = frozenset({
    "bos_token_id", "do_sample", "eos_token_id", "max_length", "max_new_tokens", "min_length", "min_new_tokens", "min_p",
    "num_return_sequences", "pad_token_id", "repetition_penalty", "return_dict_in_generate", "stop_strings",
    "temperature", "top_k", "top_p",
})  # fmt: skip
"""Fields of `GenerationConfig` whose values are all either applied or refused."""

NO_EFFECT = frozenset(
    {
        "decoder_start_token_id",  # encoder-decoders only
        "disable_compile",  # nothing is compiled here
        "early_stopping",  # beam search only
        "length_penalty",  # beam search only
        "transformers_version",
    }
)
"""Fields that do not change the text, mostly because the models or the search that read them are refused."""

SAMPLING_ONLY = frozenset({"epsilon_cutoff", "eta_cutoff", "top_h", "typical_p"})
"""Unsupported fields that Transformers does not read unless `do_sample` is set."""

_OFF_VALUES = {"cache_implementation": "dynamic", "guidance_scale": 1.0, "penalty_alpha": 0.0}
"""Values that disable a field although they are neither its default nor empty."""

_PASSED_THROUGH = frozenset({
    "self", "inputs", "generation_config", "logits_processor", "stopping_criteria", "streamer", "custom_generate",
    "kwargs",
})  # fmt: skip
"""Parameters of `GenerationMixin.generate` that reach `custom_generate` or are read by it."""

_ADVICE = dict.fromkeys(("assistant_model", "assistant_tokenizer"), "give drafter='model:PATH' instead")
"""Advice on arguments that are refused, where it is not to leave them out."""

_FORWARD_ONLY = ("logits_to_keep", "cache_position")
"""Model inputs that affect Transformers' own forward passes but not the text."""
_IMAGE_INPUTS = ("mm_encoder_outputs", "mm_token_type_ids", "token_type_ids", "position_ids")
"""Model inputs for a prompt with images, which Transformers encodes before it calls `custom_generate`."""


def arguments_of_generate(model: Any) -> dict[str, Any]:
    """Return the arguments of the running `model.generate` by name, or {} without such a call.

    Transformers 5 does not pass `streamer`, `tokenizer`, `assistant_model` and a few others to a
    function given as `custom_generate`: it collects them and then overwrites the collection with
    the function's own parameters. They are therefore read from the stack: from the frame of
    `GenerationMixin.generate`, and from that of the `torch.no_grad` decorator around it, which
    still holds the keyword arguments as given. There may be more decorators around this one.
    """
    generate = inspect.unwrap(GenerationMixin.generate)
    decorated = inspect.unwrap(
        GenerationMixin.generate, stop=lambda outer: vars(outer)["__wrapped__"] is generate
    )
    code = generate.__code__
    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    assert caller is not None
    frame = caller.f_back
    while frame is not None and not (frame.f_code is code and frame.f_locals.get("self") is model):
        # Behind another call of the same function are the arguments of that call.
        frame = None if frame.f_code is caller.f_code else frame.f_back
    if frame is None:
        return {}
    arguments = {
        name: frame.f_locals.get(name) for name in inspect.signature(GenerationMixin.generate).parameters
    }
    arguments |= arguments.get("kwargs") or {}
    decorator = frame.f_back
    if decorator is not None and decorator.f_code is decorated.__code__:
        arguments = (decorator.f_locals.get("kwargs") or {}) | arguments
    return arguments


def check_adapters(model: Any) -> None:
    """Refuse a model called by a PEFT model that puts learned vectors before the prompt or in the cache.

    PEFT adds them in `prepare_inputs_for_generation`, which it replaces during `generate`.
    """
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise BadInputError(
            "cannot generate with prompt tuning, prefix tuning or p-tuning: custom_generate would leave their vectors out. "
            "Use adapters that change the layers, such as LoRA, or generate without custom_generate."
        )


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse unsupported arguments of `generate` that are set and that it does not pass to `custom_generate`."""
    parameters = inspect.signature(GenerationMixin.generate).parameters
    not_carried_out = {*parameters, "assistant_tokenizer", *CACHE_PARAMETERS} - _PASSED_THROUGH
    for name in sorted(not_carried_out):
        if not _is_off(name, arguments.get(name), {}):
            raise not_supported(name)


def check_generation_config(config: Any) -> None:
    """Refuse fields of the generation config that are set but not supported."""
    defaults = config._get_default_generation_params()
    accepted = SUPPORTED | NO_EFFECT | (frozenset() if config.do_sample else SAMPLING_ONLY)
    for name in vars(GenerationConfig()):
        if name not in accepted and not name.startswith("_"):
            value = getattr(config, name, None)
            if not _is_off(name, value, defaults):
                raise not_supported(name, value)


def take_images(
    config: PreTrainedConfig, input_ids: Tensor, model_kwargs: dict[str, Any], positions: Any
) -> ImageInputs | None:
    """Remove the inputs for the images of a prompt from `model_kwargs` and return them; None without images.

    Videos, other kinds of models, several rows, padding, and positions that the user gave are refused.
    """
    encoded = model_kwargs.get("mm_encoder_outputs")
    if not encoded:
        return None
    if config.model_type not in MODELS_WITH_IMAGES or encoded.keys() != {"image"}:
        raise BadInputError(
            f"expected text, or images for one of {', '.join(sorted(MODELS_WITH_IMAGES))}, got {' and '.join(encoded)} "
            f"inputs for {config.model_type}; generate without custom_generate"
        )
    if len(input_ids) != 1:
        raise BadInputError(
            f"expected one prompt and one sample per call with images, got {len(input_ids)} rows; call generate once "
            "per prompt, or load the model with secondguess.load, which takes batches"
        )
    mask = model_kwargs.get("attention_mask")
    if positions is not None or not (mask is None or bool((mask == 1).all())):
        raise BadInputError(
            "expected no position_ids and no padding together with images, got some; leave position_ids out, and give the "
            "prompt as the processor makes it"
        )
    given = {name: model_kwargs.pop(name, None) for name in _IMAGE_INPUTS}
    return {name: value for name, value in given.items() if value is not None}


def prompt_mask(config: PreTrainedConfig, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> Tensor:
    """Return the `[row, position]` bool mask of prompt tokens that are not padding.

    The keyword arguments for the model's forward pass are an empty cache, the default positions, the mask where there
    is padding, and the user's own inputs. Those that would change the text, empty prompts and padding that is not on
    the left are refused.
    """
    inputs = dict(model_kwargs)
    caches = [inputs.pop(name, None) for name in CACHE_PARAMETERS]
    mask, positions = (inputs.pop(name, None) for name in ("attention_mask", "position_ids"))
    if inputs.pop("use_cache", True) is False:
        raise not_supported("use_cache", False)
    for name, value in inputs.items():
        is_off = _is_off(name, value, {}) or _marks_text_only(config, name, value)
        if name not in _FORWARD_ONLY and not is_off:
            raise not_supported(name)
    for name, cache in zip(CACHE_PARAMETERS, caches, strict=True):
        if cache is not None and not _is_empty(cache):
            raise not_supported(name)
    if input_ids.ndim != 2 or not input_ids.numel():
        raise BadInputError(
            f"expected input_ids [row, position] with at least one token per row, got shape {list(input_ids.shape)}; "
            "give each prompt a token, such as the model's bos_token_id"
        )
    mask = input_ids.new_ones(input_ids.shape) if mask is None else mask
    _check_mask(mask, input_ids)
    _check_positions(positions, mask)
    return mask.bool()


def _marks_text_only(config: PreTrainedConfig, name: str, value: object) -> bool:
    """Return whether an input tells a vision-language model that all tokens of a prompt are text.

    Processors return it for every prompt. Models of text alone may have embeddings for `token_type_ids`.
    """
    has_images = config.get_text_config() is not config
    if not isinstance(value, Tensor) or not has_images or name not in ("token_type_ids", "mm_token_type_ids"):
        return False
    return not value.any()


def _is_empty(cache: Any) -> bool:
    try:
        return bool(cache.get_seq_length() == 0)
    except ValueError:  # it has no layers with attention
        return not cache.has_previous_state()


def _check_mask(mask: Tensor, input_ids: Tensor) -> None:
    if mask.shape != input_ids.shape:
        raise BadInputError(
            f"expected attention_mask of shape {list(input_ids.shape)} as input_ids, got {list(mask.shape)}; "
            "give the mask that the tokenizer made"
        )
    if not ((mask == 0) | (mask == 1)).all():
        raise BadInputError(
            "expected attention_mask of zeros and ones, got other values; use 1 for tokens that count"
        )
    mask = mask.bool()
    padded_elsewhere = ~mask[:, -1] | (mask[:, :-1] & ~mask[:, 1:]).any(-1)
    if padded_elsewhere.any():
        row = int(padded_elsewhere.nonzero()[0])
        raise BadInputError(
            f"expected padding on the left of each row only, got a masked token to the right of a prompt's first one in "
            f"row {row} of attention_mask; tokenize with padding_side='left', or, if that is the prompt's own token and "
            "no padding, give attention_mask=torch.ones_like(input_ids)"
        )


def _check_positions(positions: Tensor | None, mask: Tensor) -> None:
    """Require positions that count each row's tokens from 0, the default of Transformers.

    Vision-language models have several positions per token, `[axis, row, position]`, equal ones for text.
    """
    usual = mask.long().cumsum(-1) - 1
    if positions is None:
        return
    axes = positions if positions.ndim == 3 else positions[None]
    if axes.ndim != 3 or axes.shape[2] != mask.shape[1] or axes.shape[1] not in (1, len(mask)):
        raise not_supported("position_ids")
    kept = mask.bool()
    if not all(equal(axis.expand_as(usual)[kept], usual[kept]) for axis in axes):
        raise BadInputError(
            "expected position_ids that count each row's tokens from 0, got others; leave them out "
            "or generate without custom_generate"
        )


def _is_off(name: str, value: object, defaults: Mapping[str, object]) -> bool:
    """Return whether a value has no effect on generation."""
    if value is None:
        return True
    if defaults.get(name) is not None:
        return bool(value == defaults[name])
    if isinstance(value, bool | int | float | str) and value == _OFF_VALUES.get(name):
        return True
    return value is False or (isinstance(value, list | tuple | dict | str) and not value)


def not_supported(name: str, value: object = None) -> BadInputError:
    """Return the error for an unsupported argument."""
    got = "" if value is None else f", got {value!r}"
    return BadInputError(
        f"expected {name} to be unset{got}: custom_generate does not support it; "
        f"{_ADVICE.get(name, 'leave it out')} or generate without custom_generate"
    )
