"""`examples/digits.py` with models trained for a few steps: what its pictures and its drawing show."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.py"


def rings() -> torch.Tensor:
    """Return pictures of a bright ring on a dark ground, in several shades."""
    picture = torch.zeros(8, 8, dtype=torch.long)
    picture[2:6, 2:6] = 1
    picture[3:5, 3:5] = 0
    return torch.stack([picture.flatten() * shade for shade in range(8, 16)])


@pytest.fixture(scope="module")
def example() -> Any:
    spec: Any = importlib.util.spec_from_file_location("digits", EXAMPLE)
    module: Any = importlib.util.module_from_spec(spec)
    sys.modules["digits"] = module
    spec.loader.exec_module(module)
    module.SIZES = {"target": (16, 1), "drafter": (16, 1)}
    module.NUM_STEPS = {"target": 20, "drafter": 20}
    module.LEARNING_RATE = 2e-2
    module.load_systems = cache(module.load_systems)
    return module


@pytest.fixture(scope="module")
def folder(example: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("digits")
    with torch.random.fork_rng():
        example.main(["--folder", str(place), "--output", str(place / "drawn.png"), "--pictures", "1"], rings)
    return place


def test_the_drawing_shows_equal_pictures_and_tints_what_was_drafted(example: Any, folder: Path) -> None:
    drawn = Image.open(folder / "drawn.png").convert("RGB")
    names = list(example.load_systems(folder, None))
    step = example.SIDE * example.SCALE + example.MARGIN
    assert drawn.size == (step + example.MARGIN, len(names) * step + example.MARGIN)
    shades: dict[str, list[int]] = {name: [] for name in names}
    num_tinted = dict.fromkeys(names, 0)
    for top, name in enumerate(names):
        for y, x in itertools.product(range(example.SIDE), repeat=2):
            centre = example.MARGIN + example.SCALE // 2
            place = centre + x * example.SCALE, centre + top * step + y * example.SCALE
            red, green, blue = drawn.getpixel(place)
            assert red == blue
            num_tinted[name] += green > red
            shades[name].append(round(red * (8 / 5 if green > red else 1) * 15 / 255))
    assert any(shades["plain"])
    assert [name for name in names if shades[name] != shades["plain"]] in ([], ["small model, block"])
    assert [name for name in names if not num_tinted[name]] == ["plain"]


def test_pictures_come_pixel_by_pixel_in_the_terminal(example: Any, folder: Path) -> None:
    pixels = list(example.live(example.load_systems(folder, None)["coupled Jacobi"], 0))
    assert len(pixels) == 64
    assert "".join(pixels).count("\n") == 8


def test_the_measurement_counts_passes_and_equal_pictures(
    example: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "digit_classifier", lambda: lambda pictures: pictures.double().mean(1))
    example.main(["--folder", str(folder), "--pictures", "2", "--measure", str(folder / "measured.json")])
    record = json.loads((folder / "measured.json").read_text())
    systems = record["systems"]
    assert systems["plain"]["passes_per_picture"] == 64
    assert systems["small model"]["fewer_passes"] > 1
    for name, each in systems.items():
        assert each["same_pictures"] == 2 or "block" in name
        assert each["statistics"]["share_of_ink"][0] > 0
    assert record["provenance"]["model_sha256"].keys() == {"target", "drafter"}
