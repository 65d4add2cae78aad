"""Classes of Transformers for configurations. Imports the code of its models, which takes seconds."""

from __future__ import annotations

from typing import Any

import torch
from jinja2 import TemplateSyntaxError
from torch.overrides import TorchFunctionMode

from secondguess.errors import BadInputError
from secondguess.runtime.modules.support import takes_masks
from secondguess.runtime.system.quiet import quiet

with quiet():
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    )
    from transformers.utils.chat_template_utils import render_jinja_template

LOADED_WHOLE = frozenset({"emu3"})
"""Vision-language types in whose checkpoints Transformers does not find the text part alone."""
SMALL = 2**16
"""Largest number of elements of a tensor that `outline_with_buffers` allocates."""


def class_of(config: Any) -> Any:
    """Return the class of a causal or a vision-language model; None if there is none that we decode."""
    if is_causal(config):
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not has_text(config):
        return MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING[type(config)]
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
        return found if takes_masks(found, config) else None
    return None


def is_causal(config: Any) -> bool:
    """Return whether there is a class of a causal language model."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.model_type not in LOADED_WHOLE


def has_text(config: Any) -> bool:
    """Return False for models whose tokens are codes of pixels, which need no tokenizer."""
    return type(config) not in MODEL_FOR_CAUSAL_IMAGE_MODELING_MAPPING


def config_of_class(config: Any) -> Any:
    """Return the configuration that `class_of` is made from, as the automatic classes of Transformers choose it.

    For a class of text alone it is the text part of the configuration of a vision-language model.
    """
    found = class_of(config)
    is_of_text = found is not None and found.config_class is config.sub_configs.get("text_config")
    return config.get_text_config() if is_of_text else config


def outline_of(config: Any) -> Any:
    """Return the module of a configuration, without memory."""
    with torch.device("meta"):
        return class_of(config)(config_of_class(config))


class _LargeWithoutMemory(TorchFunctionMode):
    """Mode in which large tensors that are made without values have no memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.empty:
            shape = torch.Size(args[0] if args and not isinstance(args[0], int) else args)
            if shape.numel() > SMALL:
                kwargs = kwargs | {"device": "meta"}
        return function(*args, **kwargs)


def outline_with_buffers(config: Any) -> Any:
    """Return the module of a configuration in float32, without memory for weights but with its buffers."""
    with _LargeWithoutMemory():
        model = class_of(config)._from_config(config_of_class(config), dtype=torch.float32)
    return model.eval()


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
