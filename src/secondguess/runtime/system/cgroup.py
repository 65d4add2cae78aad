"""Limits of the control group that the process runs in, such as those of a container."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def cpu_quota(root: Path = ROOT) -> float | None:
    """Return the number of processors whose time the process may use, or None without a limit.

    `root` holds the folders `proc` and `sys`.
    """
    return min(_each_quota(root), default=None)


def memory_left(root: Path = ROOT) -> int | None:
    """Return the bytes that the process can still allocate, or None without a limit; `root` as in `cpu_quota`.

    Pages of files count as free: the system drops them when memory is needed.
    """
    return min(_each_memory_left(root), default=None)


def _each_quota(root: Path) -> Iterator[float]:
    for folder in _folders(root, "cpu"):
        found = _read(folder / "cpu.max") or [
            *_read(folder / "cpu.cfs_quota_us"),
            *_read(folder / "cpu.cfs_period_us"),
        ]
        if len(found) == 2 and found[0] not in ("max", "-1"):
            yield int(found[0]) / int(found[1])


def _each_memory_left(root: Path) -> Iterator[int]:
    for folder in _folders(root, "memory"):
        for prefix, limit_name, used_name in (
            ("", "memory.max", "memory.current"),
            ("total_", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, used = _read(folder / limit_name), _read(folder / used_name)
            if limit and used and limit != ["max"]:
                words = _read(folder / "memory.stat")
                statistics = dict(zip(words[::2], words[1::2], strict=False))
                file_bytes = sum(
                    int(statistics.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive")
                )
                yield max(0, int(limit[0]) - max(0, int(used[0]) - file_bytes))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of a controller's group and of all groups around it, which limit it too.

    A container may see the host's path of its group without the folders on that path. Its own
    limits are then those of the outermost folder.
    """
    mounted = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        group = PurePosixPath(path.lstrip("/"))
        for name in {controllers, controller} if controllers else {""}:
            for each in (group, *group.parents):
                yield mounted / name / each


def _read(file: Path) -> list[str]:
    """Return the words of a file, none if it cannot be read."""
    try:
        return file.read_text().split()
    except OSError:
        return []
