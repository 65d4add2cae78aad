"""The benchmark of forecasts names the package that it lacks."""

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "forecasting.py"


def test_without_statsmodels_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    monkeypatch.syspath_prepend(BENCHMARK.parent)
    with pytest.raises(SystemExit, match=r"expected statsmodels.*\[bench\]"):
        runpy.run_path(str(BENCHMARK))["load_series"]("co2")
