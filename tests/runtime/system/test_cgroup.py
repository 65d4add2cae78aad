"""Limits of control groups of both versions, read from files."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest
import torch

from secondguess.checkpoint.memory import available_memory
from secondguess.runtime.system import machine
from secondguess.runtime.system.cgroup import cpu_quota, memory_left

V1 = "5:memory:/docker/a\n3:cpu,cpuacct:/docker/a\n1:name=systemd:/\n0::/\n"
NO_LIMIT_IN_V1 = 2**63 - 4096


def write(root: Path, groups: str, files: dict[str, str]) -> Path:
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


QUOTAS = {
    "none": ("0::/\n", {}, None),
    "unlimited": ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    "version 2": ("0::/\n", {"cpu.max": "150000 100000\n"}, 1.5),
    "group around it": ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2.0),
    "smallest": ("0::/a/b\n", {"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "50000 100000\n"}, 0.5),
    "version 1": (
        V1,
        {
            "cpu,cpuacct/docker/a/cpu.cfs_quota_us": "300000\n",
            "cpu,cpuacct/docker/a/cpu.cfs_period_us": "100000\n",
        },
        3.0,
    ),
    "path of the host": (V1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "50000\n"}, 1.0),
    "unlimited in version 1": (
        V1,
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_quota(case, tmp_path):
    groups, files, expected = QUOTAS[case]
    write(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert cpu_quota(tmp_path) == expected


def test_nothing_is_limited_without_control_groups(tmp_path):
    assert cpu_quota(tmp_path) is None
    assert memory_left(tmp_path) is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 6), (0.2, 1), (1.5, 2), (2.0, 2), (16.0, 6)])
def test_threads_do_not_exceed_the_quota(quota, expected, monkeypatch):
    monkeypatch.setattr(machine, "cpu_quota", lambda: quota)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    machine._num_processors_of_cgroup.cache_clear()
    try:
        assert machine.num_threads() == expected
    finally:
        machine._num_processors_of_cgroup.cache_clear()


def test_a_forked_process_has_its_parents_threads_until_torch_is_given_several(monkeypatch):
    monkeypatch.setattr(machine, "_num_processors_of_cgroup", lambda: 9)
    monkeypatch.setattr(machine, "_threads_of_parent", None)
    threads = [6]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[0])
    machine.keep_num_threads()
    found = []
    for threads[0] in (1, 3):
        found.append(machine.num_threads())
    machine.keep_num_threads()  # of a child of the child
    for threads[0] in (1, 2):
        found.append(machine.num_threads())
    assert found == [6, 3, 3, 2]


STATISTICS = "anon 500\ninactive_file 200\nactive_file 100\n"
LIMITS = {
    "none": ("0::/\n", {}, None),
    "unlimited": ("0::/\n", {"memory.max": "max\n", "memory.current": "700\n"}, None),
    "version 2": ("0::/\n", {"memory.max": "1000\n", "memory.current": "700\n"}, 300),
    "pages of files": (
        "0::/\n",
        {"memory.max": "1000\n", "memory.current": "900\n", "memory.stat": STATISTICS},
        400,
    ),
    "used up": ("0::/\n", {"memory.max": "1000\n", "memory.current": "1001\n"}, 0),
    "group around it": (
        "0::/a/b\n",
        {
            **{"a/b/memory.max": "1000\n", "a/b/memory.current": "100\n"},
            **{"a/memory.max": "2000\n", "a/memory.current": "1900\n"},
        },
        100,
    ),
    "version 1": (
        V1,
        {
            "memory/docker/a/memory.limit_in_bytes": "1000\n",
            "memory/docker/a/memory.usage_in_bytes": "900\n",
            "memory/docker/a/memory.stat": "inactive_file 1\ntotal_inactive_file 50\ntotal_active_file 25\n",
            "memory/memory.limit_in_bytes": f"{NO_LIMIT_IN_V1}\n",
            "memory/memory.usage_in_bytes": "900\n",
        },
        175,
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_memory(case, tmp_path):
    groups, files, expected = LIMITS[case]
    write(tmp_path, groups, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert memory_left(tmp_path) == expected


def test_available_memory_is_the_smaller_of_the_machines_and_the_groups(tmp_path):
    cpu = torch.device("cpu")
    limit, used = "sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"
    root = write(
        tmp_path, "0::/\n", {"proc/meminfo": "MemAvailable: 5 kB\n", limit: "9000\n", used: "5000\n"}
    )
    assert available_memory(cpu, root) == 4000
    (root / limit).write_text("max\n")
    assert available_memory(cpu, root) == 5 * 1024


def test_available_memory_is_bounded_by_the_limit_of_the_process(tmp_path, monkeypatch):
    page = os.sysconf("SC_PAGE_SIZE")
    root = write(tmp_path, "0::/\n", {"proc/meminfo": "MemAvailable: 500 kB\n", "proc/self/statm": "10 1\n"})
    for limit, expected in ((12 * page, 2 * page), (5 * page, 0), (resource.RLIM_INFINITY, 500 * 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert available_memory(torch.device("cpu"), root) == expected
