"""Hash of the kernels' sources, to recognise kernels that were built from other ones.

`setup.py` runs this file by its path, without the package.
"""

import hashlib
from pathlib import Path


def hash_sources(folder: Path) -> str | None:
    """Return the SHA-256 of the headers in a folder, or None if there are none.

    All code of the kernels is in the headers.
    """
    headers = sorted(folder.glob("*.h"))
    if not headers:
        return None
    digest = hashlib.sha256()
    for header in headers:
        digest.update(header.name.encode() + b"\0" + header.read_bytes() + b"\0")
    return digest.hexdigest()
