"""Write the tables of docs/results.md from the stored results.

    python benchmarks/results_page.py

A line `<!-- results: PATTERN ... -->` of the page is followed by tables of the files in benchmarks/results whose names match,
up to `<!-- end -->`. Of files whose names differ in nothing but the date, the latest counts. What a file contains
decides on its tables: reports of `secondguess bench`, and results of `released.py`, `peers/compare.py`,
`best_mode.py`, `never_slower.py`, `server_load.py` and `gpu.py`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "released"))

from released_models import RELEASES, ROOT

from secondguess.bench.tables import table

PAGE, RESULTS = ROOT / "docs" / "results.md", ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- results: (.*?) -->\n).*?(<!-- end -->)", re.DOTALL)
PLAIN_SPEEDS = {"plain tokens/s": ".0f", "prefill of 512 tokens/s": ".0f", "prefill of 4000 tokens/s": ".0f"}
"""Measures of `released.py`, and how they are shown."""
LEVELS = {"avx2": "AVX2", "avx512": "AVX-512"}
"""Words in the names of files, and the instruction sets that they stand for."""

Row = dict[str, str]
"""Cells by the heads of their columns."""


def ranged(found: dict[str, float], low: str, middle: str, high: str, form: str, unit: float = 1) -> str:
    return f"{unit * found[middle]:{form}} ({unit * found[low]:{form}} to {unit * found[high]:{form}})"


def speed_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    for model, forms in data["speed"].items():
        for form, found in forms.items():
            row = {"plain decoding of": RELEASES[model].title, "form": form}
            for what, unit in PLAIN_SPEEDS.items():
                medians = [
                    found[name][what]["median"]
                    for name in ("ours", "llama.cpp")
                    if what in found.get(name, {})
                ]
                row[f"{what}: ours / llama.cpp"] = " / ".join(f"{value:{unit}}" for value in medians)
            passes = [key for key in found["ours"] if key.startswith("v(")]
            row[" / ".join(passes)] = " / ".join(f"{found['ours'][key]:.2f}" for key in passes)
            yield row | {"share of the limit": f"{found['share of the limit']:.2f}"}


def best_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    for model, found in data["models"].items():
        form = ", folder" if "folder" in name else ""
        row = {"tokens/s of": f"{RELEASES[model].title}{form}", "drafter": f"`{found['drafter']}`"}
        for cell in found["table"]:
            ratio = ranged(cell["over_plain"], "least", "median", "largest", ".2f")
            text = f"{cell['tokens_per_second']['ours']:.0f}, {ratio}, tau {cell['tokens_per_pass']:.1f}"
            if "speed" in cell:
                text += f"; {cell['speed']['over_best']['median']:.2f}x {cell['speed']['best']}"
            row[f"{cell['kind']}, T={cell['temperature']:g}"] = text
        yield row


def load_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    for model, times in data["load"].items():
        seconds = {what: f"{time:.1f}" for what, time in times.items()}
        yield {"seconds to the first output": RELEASES[model].title} | seconds


def accuracy_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    for model, encodings in data["accuracy"].items():
        row = {f"KL divergence: {' / '.join(next(iter(encodings.values())))}": RELEASES[model].title}
        for encoding, texts in encodings.items():
            if not encoding.startswith("file, int"):  # a file has few bits already
                cells = [f"{found['kl']:.4f}".lstrip("0") for found in texts.values()]
                row[", ".join(encoding.split(", ")[:2])] = " / ".join(cells)
        yield row


def bench_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    rows: dict[str, Row] = {}
    for result in data["results"]:
        method = result["system"].removeprefix("secondguess ")
        cell = f"{result['tokens_per_second']:.1f}"
        if ratio := result["against"].get(f"{result['family']} plain"):
            cell += f", {ratio['of_medians']:.2f}x, worst {ratio['worst']:.2f}x"
        if result["speculates"] and result["rounds"]:
            cell += f", tau {result['rounds']['acceptance_length']:.1f}"
        batch = f", {result['batch_size']} rows" if result["batch_size"] > 1 else ""
        row = rows.setdefault(method, {"tokens/s in": name, "method": method})
        row[f"T={result['temperature']:g}{batch}"] = cell
    yield from (row for method, row in rows.items() if " fixed:" not in method)  # those are left to the file


def peer_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    """Yield a row per temperature with the plain decoding and the best draft of each engine."""
    for temperature, results in data["results"].items():
        best: dict[str, dict[bool, str]] = {}
        for result in sorted(results, key=lambda result: result["tokens_per_second"]):
            method = result["system"].removeprefix(result["family"]).strip()
            found = best.setdefault(result["family"].split()[0], {})
            found[result["speculates"]] = f"{result['tokens_per_second']:.3g}, {method}"
        cells = {engine: "; ".join(found[key] for key in sorted(found)) for engine, found in best.items()}
        yield {"tokens/s in": name, "T": temperature, "secondguess": ""} | cells


def table_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    yield from (cell_rows if "drafter" in data["table"][0] else server_rows)(data, name)


def cell_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    """Yield a row per drafter, kind of prompts and batch size, with the speed over plain decoding."""
    rows: dict[tuple[str, ...], Row] = {}
    for cell in data["table"]:
        if cell["drafter"] == "again":  # plain decoding once more, which shows the noise
            continue
        place = {
            "over plain in": name,
            "drafter": f"`{cell['drafter']}`",
            "prompts": cell["kind"],
            "rows": str(cell["batch_size"]),
        }
        row = rows.setdefault(tuple(place.values()), place)
        row[f"T={cell['temperature']:g} (worst batch)"] = f"{cell['median']:.2f} ({cell['worst']:.2f})"
    yield from rows.values()


def server_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    rows: dict[int, Row] = {}
    for result in data["table"]:
        row = {"tokens/s in": name, "clients": str(result["clients"]), "plain": ""}
        first = f"first after {1000 * result['first_token_median']:.0f} ms"
        cells = rows.setdefault(result["clients"], row)
        cells[result["system"]] = f"{result['tokens_per_second']:.0f}, {first}"
    yield from rows.values()


def single_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    rows: dict[str, Row] = {}
    for temperature, systems in data["single"].items():
        for system, found in systems.items():
            cell = f"{ranged(found, 'low', 'seconds', 'high', '.2f', 1000)}, tau {found['tau']:.1f}"
            cell += f", {found['seconds_ratio']:.2f}x" if system.startswith("secondguess") else ""
            cell += f" (predicted {found['predicted']:.2f}x)" if "predicted" in found else ""
            rows.setdefault(system, {"ms per token in": name, "method": system})[temperature] = cell
    yield from rows.values()


def batches_rows(data: dict[str, Any], name: str) -> Iterator[Row]:
    rows: dict[str, Row] = {}
    for size, found in data["batches"].items():
        count, context = size.split(" x ")
        speeds = {key.removesuffix(" tokens/s"): found[key] for key in found if key.endswith(" tokens/s")}
        row = rows.setdefault(count, {"tokens/s in": name, "rows": count})
        row[f"context {context}: {' / '.join(speeds)}"] = " / ".join(
            f"{speed:,.0f}" for speed in speeds.values()
        )
    yield from rows.values()


TABLES = {
    "speed": speed_rows, "models": best_rows, "load": load_rows, "accuracy": accuracy_rows, "schema": bench_rows,
    "conditions": peer_rows, "table": table_rows, "single": single_rows, "batches": batches_rows,
}  # fmt: skip
"""Keys of stored results, and functions that make the rows of a table from a file with that key and its name."""


def provenance_of(path: Path, data: dict[str, Any]) -> Row:
    about = data["provenance"]
    levels = [level for word, level in LEVELS.items() if word in path.stem.split("-")]
    processor = data.get("gpu") or ", ".join([about["processor"], f"{about['num_cores']} cores", *levels])
    commit = f"{about['commit'][:8]}{'+' if about['dirty'] else ''}"
    return {"processor": processor, "commit": f"[{commit}](../benchmarks/results/{path.name})"}


def tables_of(paths: Sequence[Path]) -> str:
    """Return the tables of stored results; files of the same kind share one."""
    latest = {path.stem[11:]: path for path in sorted(paths)}  # by the name after the date
    files = {path: json.loads(path.read_text(encoding="utf-8")) for path in latest.values()}
    for path, data in files.items():
        if not TABLES.keys() & data.keys():
            raise SystemExit(f"expected one of {', '.join(TABLES)} in {path.name}; narrow the pattern")
    blocks = []
    for key, rows_of in TABLES.items():
        rows = [
            (row, provenance_of(path, data))
            for path, data in files.items()
            for row in (rows_of(data, path.stem[11:]) if key in data else ())
        ]
        header = [*dict.fromkeys(name for row, _ in rows for name in row), "processor", "commit"]
        blocks.append(
            table(header, [[(row | about).get(name, "") for name in header] for row, about in rows])
        )
    return "\n\n".join(filter(None, blocks))


def filled(page: str, folder: Path = RESULTS) -> str:
    """Return the page with the tables of the files that its patterns match."""

    def tables(match: re.Match[str]) -> str:
        paths = [path for pattern in match[2].split() for path in folder.glob(pattern)]
        if not paths:
            raise SystemExit(f"expected results that match {match[2]}, got none; mend the pattern")
        return f"{match[1]}\n{tables_of(paths)}\n\n{match[3]}"

    return BLOCK.sub(tables, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
