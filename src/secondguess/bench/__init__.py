"""Benchmarks of several systems in turn on the same prompts, with measured and predicted speed."""

from secondguess.bench.config import BenchConfig
from secondguess.bench.harness import run_bench
from secondguess.bench.measurement import Progress
from secondguess.bench.report import Report
from secondguess.bench.writing import as_markdown, save_report

__all__ = ["BenchConfig", "Progress", "Report", "as_markdown", "run_bench", "save_report"]
