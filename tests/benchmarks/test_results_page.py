"""The page of results is written from the stored files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from results_page import PAGE, RESULTS, filled

LOADING = {"smollm2": {"first, file": 4.05}}
ABOUT = {"processor": "a processor", "num_cores": 2, "commit": "0123456789", "dirty": False}
BLOCK = "before\n<!-- results: *-load-*.json -->\n<!-- end -->\nafter\n"


def write(path: Path, **found: object) -> None:
    path.write_text(json.dumps({"provenance": ABOUT, "load": LOADING} | found))


def test_the_page_is_what_the_script_writes() -> None:
    """Otherwise run benchmarks/results_page.py."""
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page
    assert len(page.splitlines()) <= 300


def test_each_row_has_its_processor_and_a_link_to_its_file() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    data = [row for row in rows if not re.match(r"\| ---", row) and "| commit " not in row]
    assert len(data) > 40
    for row in data:
        *_, processor, commit, _ = (cell.strip() for cell in row.split("|"))
        name = re.fullmatch(r"\[[0-9a-f]{8}\+?\]\(\.\./benchmarks/results/(.*)\)", commit)
        assert name, row
        assert processor.startswith(("AMD", "Intel", "NVIDIA"))
        assert (RESULTS / name[1]).exists()


def test_a_file_that_a_pattern_matches_is_added_and_a_newer_one_replaces_it(tmp_path: Path) -> None:
    write(tmp_path / "2026-01-01-load-avx2.json")
    page = filled(BLOCK, tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if "|" in line]
    assert rows[0] == ["seconds to the first output", "first, file", "processor", "commit"]
    link = "[01234567](../benchmarks/results/2026-01-01-load-avx2.json)"
    assert rows[2:] == [["SmolLM2-135M-Instruct, Q4_1", "4.0", "a processor, 2 cores, AVX2", link]]
    assert page.startswith("before\n<!-- results: *-load-*.json -->\n\n|")
    assert page.endswith("|\n\n<!-- end -->\nafter\n")
    write(tmp_path / "2026-01-02-load-avx2.json", gpu="a GPU", provenance=ABOUT | {"dirty": True})
    page = filled(page, tmp_path)
    assert "| a GPU     | [01234567+](../benchmarks/results/2026-01-02-load-avx2.json) |" in page
    assert "2026-01-01" not in page
    write(tmp_path / "2026-01-01-load-cuda.json")
    assert "2026-01-01-load-cuda" in filled(page, tmp_path)


def test_patterns_without_files_and_files_without_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"expected results that match \*-load-\*\.json, got none"):
        filled(BLOCK, tmp_path)
    (tmp_path / "2026-01-01-load-x.json").write_text('{"other": 1}')
    with pytest.raises(SystemExit, match=r"expected one of speed, .* in 2026-01-01-load-x\.json"):
        filled(BLOCK, tmp_path)
