"""`secondguess train layer-skip`, from a prompt file to a drafter that generates."""

import json


def test_what_the_command_finds_can_be_used(tiny_checkpoint, tmp_path, secondguess_command):
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):", "import os")))
    out = tmp_path / "skip"
    done = secondguess_command(
        "train", "layer-skip", "--model", str(tiny_checkpoint), "--data", str(data), "--out", str(out),
        "--max-tokens", "24", "--length", "64", "--num-prompts", "2",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert json.loads((out / "config.json").read_text())["skipped"]
    spoken = secondguess_command(
        "generate", "def f(x):", "--model", str(tiny_checkpoint), "--drafter", f"layer-skip:{out}",
        "--max-tokens", "8", "--json",
    )  # fmt: skip
    assert spoken.code == 0, spoken.err


def test_a_file_for_a_folder_is_refused(tiny_checkpoint, tmp_path, secondguess_command):
    file = tmp_path / "file"
    file.write_text("")
    done = secondguess_command("train", "layer-skip", "--model", str(tiny_checkpoint), "--out", str(file))
    assert done.code == 2
    assert "expected a folder for --out" in done.err
