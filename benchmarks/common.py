"""Options and the output file that the scripts have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def make_parser(doc: str | None, *, output: bool = True) -> argparse.ArgumentParser:
    """Return a parser with a script's documentation, and with `--output` for scripts that store results."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if output:
        parser.add_argument("--output", type=Path, help="a JSON file for results and provenance")
    return parser


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
    """Write a report with its provenance to the file of `--output`, if it is given."""
    # Only here: the other installation of `against_commit.py` may not have this module.
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
    text = json.dumps({"provenance": about.as_dict(), **report}, indent=1)
    options.output.write_text(text + "\n", encoding="utf-8")
