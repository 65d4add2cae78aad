"""`secondguess train layer-skip`, from a prompt file to a drafter that generates."""

import json

import pytest


@pytest.fixture
def searching(tiny_checkpoint, tmp_path, secondguess_command):
    """Search with a few options more, into the same folder."""
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):", "import os")))

    def search(*arguments):
        return secondguess_command(
            "train", "layer-skip", "--model", tiny_checkpoint, "--data", data, "--out", tmp_path / "skip",
            "--max-tokens", "24", "--length", "64", "--num-prompts", "2", *arguments,
        )  # fmt: skip

    return search


def test_the_found_layers_can_be_used_as_a_drafter(searching, tiny_checkpoint, tmp_path, secondguess_command):
    done = searching()
    assert done.code == 0, done.err
    out = tmp_path / "skip"
    assert json.loads((out / "config.json").read_text())["skipped"]
    drafter = ("--drafter", f"layer-skip:{out}", "--max-tokens", 8, "--json")
    spoken = secondguess_command("generate", "def f(x):", "--model", tiny_checkpoint, *drafter)
    assert spoken.code == 0, spoken.err


@pytest.mark.parametrize("skipped", ["[-1]", '["a"]', "[true]", "{}"])
def test_a_broken_list_of_layers_is_refused(tiny_checkpoint, tmp_path, secondguess_command, skipped):
    (tmp_path / "config.json").write_text(f'{{"model_type": "secondguess-layer-skip", "skipped": {skipped}}}')
    done = secondguess_command(
        "generate", "x", "--model", tiny_checkpoint, "--drafter", f"layer-skip:{tmp_path}"
    )
    assert done.code == 2
    assert "expected layers found by" in done.err


def test_texts_of_another_run_are_not_reused(searching, tiny_draft_checkpoint, tmp_path):
    assert searching().code == 0
    found = (tmp_path / "skip" / "config.json").read_bytes()
    for arguments, differing in (
        (["--seed", "1"], "its answers (seed) is 0, not 1"),
        (["--temperature", "0.5"], "its answers"),
        (["--max-tokens", "16"], "its answers"),
        (["--length", "48"], "its answers"),
        (["--num-prompts", "1"], "its num prompts"),
        (["--dtype", "float32"], "its dtype"),
        (["--model", tiny_draft_checkpoint], "its target sha256"),
    ):
        done = searching(*arguments)
        assert done.code == 2, arguments
        assert differing in done.err
        assert "Choose another folder" in done.err
        assert (tmp_path / "skip" / "config.json").read_bytes() == found


def test_the_same_search_reuses_its_texts(searching, tmp_path):
    assert searching().code == 0
    (stored,) = (tmp_path / "skip" / "run" / "texts").iterdir()
    written = stored.stat().st_mtime_ns
    assert searching().code == 0
    assert stored.stat().st_mtime_ns == written


@pytest.mark.parametrize("most", [64, 70])
def test_an_answer_length_without_room_for_the_prompt_is_refused(searching, tmp_path, most):
    done = searching("--max-tokens", most)
    assert done.code == 2
    assert "expected --max-tokens below --length" in done.err
    assert not (tmp_path / "skip").exists()


@pytest.mark.parametrize(
    ("out", "complaint"),
    [("prompts.jsonl", "got the file"), ("prompts.jsonl/skip", "that can be written to")],
)
def test_an_unwritable_folder_is_reported_before_generation(searching, tmp_path, out, complaint):
    done = searching("--out", tmp_path / out)
    assert done.code == 2
    assert "expected a folder for --out" in done.err
    assert complaint in done.err
