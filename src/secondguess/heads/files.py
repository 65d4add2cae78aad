"""Folders of trained drafters: lookup, provenance, configuration and weights.

A folder holds `config.json`, weights in safetensors (or, in published formats, a pickle of
tensors), a model card, and `secondguess.json` with the target, the training settings and the
results.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from secondguess.checkpoint.resolve import is_gguf
from secondguess.checkpoint.weight_files import (
    LFS_ADVICE,
    LFS_POINTER,
    count_parameters,
    is_lfs_pointer,
    tensor_files,
)
from secondguess.errors import CheckpointError, UnsupportedModelError
from secondguess.files import write_atomically
from secondguess.heads.gguf import GgufDrafter

CONFIG, WEIGHTS, PROVENANCE = "config.json", "model.safetensors", "secondguess.json"

MASK_EMBEDDING = "mask_embedding.pt"
"""File beside the weights of a block drafter, with the embedding of the mask token."""

NAMED = {"draft": "model"}
"""Drafter kind to write in `--drafter` by trained kind, for kinds whose two names differ."""


@dataclass(frozen=True)
class Provenance:
    """Provenance of a trained drafter."""

    kind: str  # as trained, such as `medusa`
    target: str  # name of the target it was trained for
    fingerprint: str  # hash of the target's weights (`checkpoint.weights`)
    training: Mapping[str, Any] = field(default_factory=dict)  # data, losses, budget, commit, machine
    figures: Mapping[str, Any] = field(default_factory=dict)  # results on held-out text

    def write(self, folder: Path) -> None:
        with write_atomically(folder / PROVENANCE) as stream:
            stream.write(json.dumps(asdict(self), indent=2).encode() + b"\n")


def read_provenance(folder: Path) -> Provenance | None:
    """Return the provenance of a folder; None for drafters that secondguess did not train."""
    path = folder / PROVENANCE
    if not path.is_file():
        return None
    try:
        return Provenance(**json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"expected a readable {PROVENANCE} in {folder}, got: {error}") from error


def config_file(folder: Path) -> Path:
    """Return the file with the configuration of a drafter: that of a folder, or a GGUF file itself."""
    return folder if is_gguf(folder) else folder / CONFIG


def read_config(folder: Path) -> dict[str, Any]:
    """Return the parsed `config.json` of a folder, which must be a JSON object, or what a GGUF file has in its place."""
    if is_gguf(folder):
        with config_errors(folder):
            return GgufDrafter(folder).config
    try:
        content = json.loads((folder / CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"expected a readable {CONFIG} in {folder}, got: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"expected a JSON object in {folder / CONFIG}, got {type(content).__name__}")
    return content


@contextmanager
def config_errors(folder: Path) -> Iterator[None]:
    """Convert errors raised while reading a `config.json` into a `CheckpointError` with its path."""
    try:
        yield
    except UnsupportedModelError as error:
        if str(folder) in str(error):
            raise
        raise UnsupportedModelError(f"{config_file(folder)}: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"expected the field {error} in {config_file(folder)}, got none") from error
    except (TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"expected a drafter that fits in {config_file(folder)}, got: {error}"
        ) from error


def whole_number(config: Mapping[str, Any], key: str, least: int = 1) -> int:
    """Return an integer field of at least `least`; call it inside `config_errors`."""
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{key} of {value!r}, which should be a whole number from {least} on")
    return value


def require_same(what: str, found: int, expected: int, folder: Path) -> None:
    """Raise a `CheckpointError` if a drafter was trained for a target of another size, `what`."""
    if found != expected:
        raise CheckpointError(
            f"expected a drafter for a target with a {what} of {expected}, got one for {found} in {folder}; "
            "use the target that it was trained for"
        )


def require_layers(layers: Sequence[int], num_layers: int, folder: Path) -> None:
    """Raise a `CheckpointError` if a drafter reads states outside 0 to `num_layers`."""
    if not all(0 <= layer <= num_layers for layer in layers):
        raise CheckpointError(
            f"expected a head in {folder} that reads states 0 to {num_layers} of the target, got {list(layers)}; it was "
            "trained for another target"
        )


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Return all tensors of a folder, on the CPU: of `*.safetensors`, or else of `*.pt` and `*.bin`."""
    tensors = read_named_tensors(find_tensors(folder))
    pickles = [] if tensors else sorted([*folder.glob("*.pt"), *folder.glob("*.bin")])
    for path in pickles:
        if path.name != MASK_EMBEDDING:
            tensors |= read_pickle(path)
    if not tensors:
        raise CheckpointError(f"expected weights (safetensors, .pt or .bin) in {folder}, got none")
    return tensors


def read_pickle(path: Path) -> Any:
    """Return the content of a pickle of tensors, on the CPU."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, EOFError, UnpicklingError) as error:
        raise _unreadable(path.parent, path, error) from error


def find_tensors(folder: Path) -> dict[str, Path]:
    """Return the safetensors file of each tensor in a folder, without reading the tensors; or the GGUF file."""
    if is_gguf(folder):
        return dict.fromkeys(GgufDrafter(folder).tensor_names, folder)
    files: dict[str, Path] = {}
    loaded = tensor_files(folder)  # by the target; they come last and replace those of other files
    for path in sorted(folder.glob("*.safetensors"), key=lambda path: (path in loaded, path)):
        try:
            with safe_open(path, "pt") as file:
                files |= dict.fromkeys(file.keys(), path)
        except (OSError, SafetensorError) as error:
            raise _unreadable(folder, path, error) from error
    return files


def count_weights(folder: Path) -> int:
    """Return the number of weights of a drafter, from headers."""
    return GgufDrafter(folder).num_weights if is_gguf(folder) else count_parameters(folder)


def tensor_names(folder: Path) -> set[str]:
    """Return the names of all tensors in a folder; those in `*.pt` and `*.bin` only if no file is of safetensors.

    Files of tensors are mapped, not read; pickles that cannot be mapped are left out.
    """
    names = set(find_tensors(folder))
    for path in [] if names else sorted([*folder.glob("*.pt"), *folder.glob("*.bin")]):
        with suppress(OSError, ValueError, RuntimeError, EOFError, UnpicklingError):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            names |= set(content) if isinstance(content, dict) else set()
    return names


def _unreadable(folder: Path, path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file of weights that cannot be read."""
    if is_lfs_pointer(path):
        reason = f"{path.name}, {LFS_POINTER}; {LFS_ADVICE}"
    else:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return CheckpointError(f"expected readable weights in {folder}, got: {reason}")


def read_named_tensors(files: Mapping[str, Path]) -> dict[str, Tensor]:
    """Read the named tensors from the files that `find_tensors` returned."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(set(files.values())):
        if is_gguf(path):
            tensors |= GgufDrafter(path).read(files.keys())
            continue
        with safe_open(path, "pt") as file:
            tensors |= {
                name: file.get_tensor(name) for name, tensor_path in files.items() if tensor_path == path
            }
    return tensors


def load_into(
    module: torch.nn.Module,
    tensors: Mapping[str, Tensor],
    folder: Path,
    name_in_file: Callable[[str], str] = str,
) -> None:
    """Load tensors into a module with exactly these names and shapes.

    The `CheckpointError` about a tensor that differs has its name in the file, from that in the module.
    """
    wanted = module.state_dict()
    problems = [f"missing {name_in_file(name)}" for name in sorted(set(wanted) - set(tensors))]
    problems += [f"unknown {name_in_file(name)}" for name in sorted(set(tensors) - set(wanted))]
    problems += [
        f"{name_in_file(name)} of shape {list(tensors[name].shape)} instead of {list(wanted[name].shape)}"
        for name in wanted
        if name in tensors and wanted[name].shape != tensors[name].shape
    ]
    if problems:
        source = "the header" if is_gguf(folder) else CONFIG
        raise CheckpointError(f"expected the weights that {source} describes in {folder}, got {problems[0]}")
    module.load_state_dict(dict(tensors))


def write_head(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write `config.json` and `model.safetensors` into a folder, created if missing.

    A file that cannot be written, for example on a full disk, raises an `OSError`; the previous one is kept.
    """
    folder.mkdir(parents=True, exist_ok=True)
    on_host = {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}
    # As bytes, because `save_file` reports a full disk with an error of its own.
    with write_atomically(folder / WEIGHTS) as stream:
        stream.write(save(on_host, metadata={"format": "pt"}))
    with write_atomically(folder / CONFIG) as stream:
        stream.write(json.dumps(config, indent=2).encode() + b"\n")
