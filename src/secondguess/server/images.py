"""Images in messages: `data:` URLs, and files below one folder if the operator allows it."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from secondguess.errors import BadInputError
from secondguess.images import MODELS_WITH_IMAGES, read_image
from secondguess.server.errors import ApiError, check_limit, refused
from secondguess.server.served_model import ServedModel
from secondguess.server.settings import ServerSettings


class ImageReader:
    """Reader of the images of one request.

    Addresses are never fetched: a client could have the server read from the server's own network.
    """

    def __init__(self, target: ServedModel, settings: ServerSettings) -> None:
        self._target = target
        self._folder = settings.image_folder
        self._max_images, self._num_images = settings.max_images, 0
        self._pixels_left = settings.max_image_pixels

    def read(self, url: str) -> Any:
        """Return the image of PIL at a URL, if the model and the limits of a request allow it."""
        if not self._target.takes_images:
            raise _invalid(
                f"expected messages of text for {self._target.name}, got an image; images are taken by "
                f"{', '.join(sorted(MODELS_WITH_IMAGES))}"
            )
        self._num_images += 1
        check_limit("messages", self._num_images, self._max_images, "images")
        try:
            image = read_image(self._content(url), f"the image {url[:40]!r}", self._pixels_left)
        except BadInputError as error:
            raise _invalid(str(error)) from None
        self._pixels_left -= image.width * image.height
        return image

    def _content(self, url: str) -> bytes:
        scheme, _, rest = url.partition(":")
        if scheme == "data":
            head, _, data = rest.partition(",")
            try:
                return base64.b64decode(data if head.endswith(";base64") else "?", validate=True)
            except (binascii.Error, ValueError):
                raise _invalid(f"expected image data in base64 after ;base64, got {url[:40]!r}") from None
        if scheme == "file" and self._folder is not None:
            return self._file(self._folder.resolve(), unquote(rest.removeprefix("//")))
        files = "" if self._folder is None else " or a file: URL below the server's folder of images"
        raise _invalid(
            f"expected an image as a data: URL{files}, got {url[:40]!r}, which this server does not read; "
            "send the image itself, as data:image/png;base64,..."
        )

    def _file(self, folder: Path, name: str) -> bytes:
        try:
            path = (folder / name).resolve()
            if path.is_relative_to(folder) and path.is_file():
                return path.read_bytes()
        except (OSError, ValueError):
            pass
        raise _invalid(f"expected a file below the server's folder of images, got {name[:60]!r}")


def _invalid(message: str) -> ApiError:
    return refused("messages", message, "invalid_value")
