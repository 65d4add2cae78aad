"""Settings of the server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from secondguess.errors import BadInputError
from secondguess.images import MAX_PIXELS
from secondguess.validation import Count, Settings, Text

KEY_VARIABLE = "SECONDGUESS_API_KEYS"
"""Environment variable with API keys, separated by spaces or commas."""

Seconds = Annotated[float, Field(gt=0, le=86_400)]


class ServerSettings(Settings):
    """Names, keys and limits of a server. All limits hold per HTTP request."""

    model_names: tuple[Text, ...] = Field(
        default=(),
        description="names that requests may use; the first is in replies. Empty: the target's name",
    )
    api_keys: tuple[Text, ...] = Field(
        default=(), repr=False, description="accepted keys; empty: no key needed"
    )
    cors_origins: tuple[Text, ...] = Field(default=(), description="origins that browsers may call from")
    chat_template: Text | None = Field(default=None, description="Jinja template in place of the tokenizer's")
    generation_config: bool = Field(
        default=True,
        description="sampling settings of the model's generation_config.json hold where a request has none",
    )
    max_body_bytes: Count | None = Field(
        default=None,
        description="size of a request's body; None: 1 MiB and 16 bytes per token of the context, and 8 MiB for images",
    )
    max_samples: Count = Field(default=64, description="samples: prompts times n")
    max_stop_strings: Count = Field(default=16, description="stop strings, and stop token ids")
    max_logit_biases: Count = Field(default=1024, description="entries of logit_bias")
    max_schema_bytes: Count = Field(default=2**16, description="size of tools, schemas and grammars as JSON")
    max_output_tokens: Count | None = Field(
        default=None, description="output tokens; None: room in the context"
    )
    request_seconds: Seconds | None = Field(default=None, description="time after which a request ends")
    image_folder: Path | None = Field(default=None, description="folder of file: URLs; None: none is read")
    max_images: Count = Field(default=16, description="images")
    max_image_pixels: Count = Field(default=MAX_PIXELS, description="pixels of all images")
    num_threads: Count = Field(default=2, description="threads for templates and tokenization")


def read_api_keys(path: Path | None) -> tuple[str, ...]:
    """Return the keys in a file, one per line, and in the environment variable.

    A file without a key is refused: it would leave the server open.
    """
    keys = os.environ.get(KEY_VARIABLE, "").replace(",", " ").split()
    if path is not None:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInputError(f"expected a readable file of API keys, got {path}: {error}") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise BadInputError(f"expected at least one API key in {path}, got none; write one key per line")
        keys += found
    return tuple(dict.fromkeys(keys))
