"""Reading of saved reports, of the current and earlier schemas, for a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from secondguess.bench.report import SCHEMA
from secondguess.errors import BadInputError

CONDITIONS = {
    "machine": ("provenance", "processor"),
    "cores": ("provenance", "num_cores"),
    "threads": ("provenance", "num_threads"),
    "device": ("provenance", "device"),
    "dtype": ("provenance", "dtype"),
    "weights": ("provenance", "model_sha256"),
    "runtimes": ("provenance", "runtimes"),
    "libraries": ("provenance", "versions"),
    "workload": ("workbench", "workload_sha256"),
    "new tokens": ("workbench", "num_tokens"),
    "prompts cut": ("workbench", "num_prompts_cut"),
}
"""Conditions that two reports should share: their location in a report, by label."""

Key = tuple[str, float, int]
"""System, temperature, batch size."""


@dataclass(frozen=True)
class StoredResult:
    """Speeds of one system in one setting.

    Args:
        speeds: tokens/s of each batch, in the workload's order.
        tasks: the task of each batch; empty if the report has none.
    """

    speeds: tuple[float, ...]
    tasks: tuple[str, ...]


@dataclass(frozen=True)
class StoredReport:
    """Part of a report that a comparison needs.

    Args:
        label: file name.
        complete: False if the run was interrupted.
        conditions: values by the labels of `CONDITIONS`.
        results: by system, temperature and batch size.
    """

    label: str
    date: str
    commit: str | None
    complete: bool
    conditions: Mapping[str, Any]
    results: Mapping[Key, StoredResult]


def read_report(path: Path) -> StoredReport:
    """Read a report saved by `secondguess bench`.

    Raises:
        BadInputError: a missing file, or one with other content.
    """
    if not path.is_file():
        raise BadInputError(
            f"expected a report of secondguess bench at {path}, found none; give its JSON file"
        )
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise BadInputError(
            f"expected the JSON report of secondguess bench in {path.name}, got something else; give the .json "
            "file beside the page"
        ) from None
    schema = told.get("schema") if isinstance(told, dict) else None
    if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
        raise BadInputError(
            f"expected a report of secondguess bench in {path.name}, got JSON without its schema; give a file that "
            "secondguess bench has saved"
        )
    if schema > SCHEMA:
        raise BadInputError(
            f"expected a report of schema 1 to {SCHEMA} in {path.name}, got {schema}; update secondguess"
        )
    try:
        return _report_of(told, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadInputError(
            f"expected a whole report of secondguess bench in {path.name}, got one that is broken "
            f"({type(error).__name__}: {error}); save it anew"
        ) from None


def _report_of(told: Mapping[str, Any], path: Path) -> StoredReport:
    bench, about = told["workbench"], told["provenance"]
    # Schema 1 had no batches and no tasks; its `per_prompt` is `per_batch` at batch size 1, and
    # prompts that had to be truncated were refused.
    tasks_of = {int(size): tasks for size, tasks in bench.get("tasks", {}).items()}
    results = {}
    for each in told["results"]:
        batch_size = int(each.get("batch_size", 1))
        speeds = each["per_batch"] if "per_batch" in each else each["per_prompt"]
        key = (str(each["system"]), float(each["temperature"]), batch_size)
        results[key] = StoredResult(_checked(speeds), _tasks(tasks_of.get(batch_size, ()), len(speeds)))
    return StoredReport(
        label=path.name,
        date=str(about["date"]),
        commit=about["commit"],
        complete=bool(told["complete"]),
        conditions={
            word: told[part].get(name, 0 if name == "num_prompts_cut" else None)
            for word, (part, name) in CONDITIONS.items()
        },
        results=results,
    )


def _checked(speeds: Sequence[Any]) -> tuple[float, ...]:
    checked = tuple(float(speed) for speed in speeds)
    if not checked or not all(0 < speed < float("inf") for speed in checked):
        raise ValueError("speeds that are no positive numbers")
    return checked


def _tasks(tasks: Sequence[Any], count: int) -> tuple[str, ...]:
    if tasks and len(tasks) != count:
        raise ValueError(f"{len(tasks)} tasks for {count} speeds")
    return tuple(map(str, tasks))
