"""Options, the time limit and the output file that the scripts have in common."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def make_parser(doc: str | None, *, output: bool = True) -> argparse.ArgumentParser:
    """Return a parser with a script's documentation, and with `--output` for scripts that store results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output:
        parser.add_argument("--output", type=Path, help="a JSON file for results and provenance")
    return parser


class TimeLimit:
    """Limit of a part of a run, in seconds from now."""

    def __init__(self, seconds: float) -> None:
        self._start, self._seconds = time.monotonic(), seconds

    def is_over(self, share: float = 1.0) -> bool:
        """Return True if a share of the time has passed."""
        return time.monotonic() - self._start > share * self._seconds


def show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a Markdown table, without values that are lists or objects; the first row has all columns."""
    # Only here: see `store`.
    from secondguess.bench.tables import table

    columns = [name for name, value in rows[0].items() if not isinstance(value, list | dict)]
    values = [[row.get(name, "") for name in columns] for row in rows]
    cells = [
        [f"{value:.4g}" if isinstance(value, float) else str(value) for value in line] for line in values
    ]
    print(table(columns, cells), flush=True)


def store(
    options: argparse.Namespace,
    report: Mapping[str, Any],
    *,
    num_threads: int,
    dtype: str = "auto",
    device: str = "cpu",
    seed: int = 0,
    models: Mapping[str, Path] | None = None,
    runtimes: Mapping[str, str] | None = None,
) -> None:
    """Write a report with its provenance to the file of `--output`, if it is given.

    The load average tells whether the machine was quiet: about the number of threads, if nothing else ran.
    """
    # Only here: the other installation of `against_commit.py` may not have these modules.
    from secondguess.workloads.provenance import collect_provenance

    if options.output is None:
        return
    about = collect_provenance(
        num_threads=num_threads,
        device=device,
        dtype=dtype,
        seed=seed,
        models=models or {},
        runtimes=runtimes or {},
    )
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    machine = {
        "instructions": [name for name in INSTRUCTIONS if name in flags],
        "load_average": [round(load, 2) for load in os.getloadavg()],
    }
    text = json.dumps({"provenance": {**about.as_dict(), **machine}, **report}, indent=1)
    options.output.write_text(text + "\n", encoding="utf-8")
