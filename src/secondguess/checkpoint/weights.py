"""Weight files of a model: their number of parameters, and their SHA-256 fingerprint.

A fingerprint tells a model that was measured from one that was retrained since.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from secondguess.errors import CheckpointError

BYTES_OF_DTYPES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
EXPERT = re.compile(r"\.experts\.\d+\.")
"""Part of the names of the weights of one expert."""
LFS_POINTER = "a pointer of Git LFS"
LFS_ADVICE = "run `git lfs pull` in its folder, or download the file itself"


def is_gguf(path: str | Path) -> bool:
    """Return whether a path, as `find_checkpoint` returns it, is that of a GGUF file."""
    return Path(path).suffix.lower() == ".gguf" and not Path(path).is_dir()


def tensor_files(folder: Path) -> list[Path]:
    """Return the safetensors files from which a model is loaded; empty for weights in another format.

    They are those from which Transformers loads it. Other files in the folder, such as adapters, older weights or a copy
    in another format, are not read. Only where Transformers finds none, as with names of other programs, all are.

    Raises:
        CheckpointError: if the index is broken.
    """
    if is_gguf(folder):
        return []
    named = _named_weights(folder)
    whole, index = folder / (named or "model.safetensors"), folder / (named or "model.safetensors.index.json")
    if whole.suffix == ".safetensors" and whole.is_file():
        return [whole]
    if index.suffix != ".json" or not index.is_file():
        return [] if any(folder.glob("pytorch_model*.bin")) else sorted(folder.glob("*.safetensors"))
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"expected a weight_map in {index}, got: {error!r}; copy or download the checkpoint again"
        ) from error
    return [folder / name for name in names]


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files of a model or of drafter heads, sorted by name.

    The path of a GGUF file is that of its only file. Pickles are returned if there is no other format.

    Raises:
        CheckpointError: if the index is broken.
    """
    return [folder] if is_gguf(folder) else tensor_files(folder) or pickle_files(folder)


def pickle_files(folder: Path) -> list[Path]:
    """Return the files of a model's weights in the older pickle format, not those of an optimizer or a trainer."""
    whole = folder / "pytorch_model.bin"
    return [whole] if whole.is_file() else sorted(folder.glob("pytorch_model*.bin"))


def _named_weights(folder: Path) -> str | None:
    """Return the name of the file with the weights, or their index, if the configuration gives one.

    Raises:
        CheckpointError: a name outside of the folder.
    """
    named = None
    with suppress(OSError, ValueError, AttributeError):
        named = json.loads((folder / "config.json").read_bytes()).get("transformers_weights")
    if not isinstance(named, str):
        return None
    if Path(named).is_absolute() or ".." in Path(named).parts:
        raise CheckpointError(
            f"expected transformers_weights in {folder} to be a file in it, got {named!r}; correct config.json"
        )
    return named


def count_parameters(folder: Path, suffix: str = "") -> int:
    """Return a model's number of parameters, from the headers of its weight files.

    With `suffix`, only tensors are counted whose names end with it. For weights in the older pickle
    format it is estimated from the size of the files and the dtype in `config.json`.

    Raises:
        CheckpointError: if a file is not safetensors or is truncated.
    """
    files = [folder] if is_gguf(folder) else tensor_files(folder)
    if not files:
        return sum(file.stat().st_size for file in pickle_files(folder)) // _size_in_pickles(folder)
    return sum(_count_in_file(file, lambda name: name.endswith(suffix)) for file in files)


def count_in_experts(folder: Path) -> int:
    """Return the number of weights of experts that safetensors files hold one by one; arguments as of `count_parameters`."""
    return sum(
        _count_in_file(file, lambda name: EXPERT.search(name) is not None) for file in tensor_files(folder)
    )


def _size_in_pickles(folder: Path) -> int:
    """Return the bytes of a weight in the dtype that the configuration names; 2, of which none takes fewer, without."""
    config: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError):
        config = dict(json.loads((folder / "config.json").read_bytes()))
    text = config.get("text_config") or {}
    named = next(
        (each[key] for each in (config, text) for key in ("dtype", "torch_dtype") if each.get(key)), ""
    )
    return BYTES_OF_DTYPES.get(str(named).removeprefix("torch."), 2)


def _count_in_file(file: Path, is_counted: Callable[[str], bool]) -> int:
    if is_gguf(file):
        tensors = gguf_reader(file).tensors
        return sum(int(tensor.n_elements) for tensor in tensors if is_counted(tensor.name))
    with _open_tensors(file) as tensors:
        names = filter(is_counted, tensors.keys())
        return sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)


def stored_dtypes(folder: Path) -> dict[str, str]:
    """Return the dtype of each tensor in a model's safetensors files, such as `BF16`, from their headers.

    Raises:
        CheckpointError: if a file is not safetensors or is truncated.
    """
    found = {}
    for file in tensor_files(folder):
        with _open_tensors(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a dictionary
                found[name] = tensors.get_slice(name).get_dtype()
    return found


@contextmanager
def _open_tensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="numpy") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        reason, advice = str(error), "copy or download the checkpoint again"
        if is_lfs_pointer(file):
            reason, advice = LFS_POINTER, LFS_ADVICE
        elif isinstance(error, PermissionError):
            advice = "allow this user to read it"
        raise CheckpointError(
            f"expected whole safetensors weights in {file}, got: {reason}; {advice}"
        ) from error


def is_lfs_pointer(file: Path) -> bool:
    """Return whether a file is the small one that Git LFS leaves in place of a large one."""
    start = b"version https://git-lfs"
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(start)) == start
    return False


def gguf_reader(file: Path) -> Any:
    """Return the reader of a GGUF file, with its fields and its memory-mapped tensors.

    Raises:
        CheckpointError: if the file is broken.
    """
    stat = file.stat()
    return _gguf_reader(file, stat.st_size, stat.st_mtime_ns)


def forget_gguf_readers() -> None:
    """Drop the readers of GGUF files: the fields of a large vocabulary take half a gigabyte."""
    _gguf_reader.cache_clear()


@lru_cache(maxsize=1)
def _gguf_reader(file: Path, size: int, modified: int) -> Any:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
    except (ValueError, IndexError, KeyError, OSError) as error:
        reason, advice = str(error), "copy or download it again"
        if is_lfs_pointer(file):
            reason, advice = LFS_POINTER, LFS_ADVICE
        raise CheckpointError(f"expected a whole GGUF file in {file}, got: {reason}; {advice}") from error
    if (count := reader.fields.get("split.count")) and count.contents() > 1:
        raise CheckpointError(
            f"expected a GGUF file with the whole model, got {file}, one of {count.contents()} parts; "
            "join them with `llama-gguf-split --merge FIRST_PART OUT`"
        )
    return reader


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 over a model's weight files, in the order of their names.

    Reads all weights, about a second per gigabyte. The result is cached in the process for as long
    as the sizes and modification times of the files stay the same.
    """
    found = [(file.resolve(), file.stat()) for file in weight_files(folder)]
    return _hash_files(tuple((path, stat.st_size, stat.st_mtime_ns) for path, stat in found))


@lru_cache(maxsize=64)
def _hash_files(stamps: tuple[tuple[Path, int, int], ...]) -> str:
    """Return the SHA-256 over files given as path, size and time of modification."""
    digest = hashlib.sha256()
    for path, _, _ in stamps:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
