"""The tracking example runs, saves passes and draws its picture."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "tracking.py"


def test_passes_are_saved_and_the_picture_shows_tracks(tmp_path, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    main = runpy.run_path(str(EXAMPLE))["main"]
    picture = tmp_path / "tracking.png"
    main(["--batches", "40", "--targets", "2", "--angles", "0", "120", "--picture", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert all(float(re.search(r"([\d.]+) steps per pass", line)[1]) > 1 for line in lines)
    assert all(float(line.rpartition(" ")[2]) > 0.005 for line in lines)
    pixels = pyplot.imread(picture)[..., :3]
    blue = (pixels[..., 2] - pixels[..., 0] > 0.1).mean()
    assert 0.005 < blue < 0.3
    assert (pixels.max(-1) < 0.2).mean() > 0.001
