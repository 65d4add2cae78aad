"""Reading of images for prompts of vision-language models; needs Pillow."""

from __future__ import annotations

from io import BytesIO
from typing import Any

from secondguess.errors import BadInputError

MODELS_WITH_IMAGES = frozenset({"gemma3", "llava", "qwen3_vl"})
"""Model types whose images are tested. Others may keep states of an image that our cache does not have."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_PIXELS = 2**25
"""Pixels of an image, or of all images of a request; each takes three bytes."""


def read_image(content: bytes, name: str, max_pixels: int = MAX_PIXELS) -> Any:
    """Return an image of PIL in RGB, as its camera held it, from the content of a file.

    Args:
        content: bytes in one of `FORMATS`.
        name: name of the image, for messages.
        max_pixels: size up to which it is decoded.

    Raises:
        BadInputError: Pillow is missing, or bytes that are no image, broken or too large.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise BadInputError(f"expected Pillow to read {name}, found none; run `pip install pillow`") from None
    try:
        image = Image.open(BytesIO(content), formats=FORMATS)
        width, height = image.size
        if width * height <= max_pixels:
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # the content can come from anywhere, and decoders raise anything
        raise BadInputError(
            f"expected {name} to be a whole image in {', '.join(FORMATS)}, got {len(content)} bytes that cannot be "
            f"read: {str(error).split(' <')[0]}; send another one"
        ) from None
    raise BadInputError(
        f"expected {name} of at most {max_pixels} pixels, got {width} x {height}; make it smaller"
    )
