"""Workloads: selection of prompts, and refusals."""

import json
import os
from pathlib import Path

import pytest

from secondguess.errors import BadInputError
from secondguess.workloads.loading import (
    DATA_SETS,
    DATA_VARIABLE,
    equal_shares,
    evenly_spaced,
    interleave,
    load_workload,
)


def test_a_file_gives_its_prompts(tmp_path):
    texts = ("def quicksort(items):\n", "class Stack:\n    def push(", "print(")
    workload = load_workload(
        str(write_lines(tmp_path / "prompts.jsonl", *({"prompt": text} for text in texts)))
    )
    assert (workload.name, workload.prompts) == ("prompts.jsonl", texts)


def test_a_name_that_is_not_utf8_can_be_part_of_a_report(tmp_path):
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/b\xff\xc3\xbc.txt"))
    path.write_text("a prompt")
    assert load_workload(str(path)).name.encode().decode() == "b\ufffdü.txt"


def test_a_sample_is_evenly_spaced_and_deterministic(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"prompt {index}"}) for index in range(164)))
    workload = load_workload(str(path), 40)
    numbers = [int(prompt.split()[1]) for prompt in workload.prompts]
    assert numbers[:3] == [0, 4, 8]
    assert numbers[-1] == 159
    assert workload == load_workload(str(path), 40)
    assert len(set(numbers)) == 40


def test_different_prompts_have_different_hashes():
    assert load_workload("builtin", 2).sha256 != load_workload("builtin", 3).sha256


def test_the_builtin_prompts_are_a_workload():
    workload = load_workload("builtin", 100)
    assert workload.name == "builtin"
    assert len(set(workload.prompts)) == len(workload.prompts) >= 10


def test_a_sample_of_all_prompts_is_the_workload():
    assert evenly_spaced(("a", "b"), 2) == evenly_spaced(("a", "b"), 3) == ("a", "b")


def test_humaneval_is_the_default_if_present(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    (tmp_path / "humaneval.jsonl").write_text('{"prompt": "def f():"}\n')
    workload = load_workload()
    assert (workload.name, workload.prompts, workload.note) == ("humaneval.jsonl", ("def f():",), "")


def test_without_humaneval_the_default_is_builtin_with_a_note(tmp_path, monkeypatch):
    for folder in (None, str(tmp_path), ""):
        monkeypatch.delenv(DATA_VARIABLE, raising=False)
        if folder is not None:
            monkeypatch.setenv(DATA_VARIABLE, folder)
        workload = load_workload(num_prompts=3)
        assert workload.prompts == load_workload("builtin", 3).prompts
        assert DATA_VARIABLE in workload.note
    assert load_workload("builtin", 3).note == ""
    for given in (str(tmp_path / "humaneval.jsonl"), ""):
        with pytest.raises(BadInputError, match="--prompts FILE"):
            load_workload(given)


def test_a_missing_dataset_names_the_option():
    with pytest.raises(BadInputError, match="--prompts FILE"):
        load_workload("no-such-file.jsonl")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got an empty file"),
        (b'{"prompt": "x"}\nnonsense\n', "line 2"),
        (b'{"prompt": ""}\n', "line 1"),
        (b'{"text": "x"}\n', "line 1"),
        (b'["x"]\n', "line 1"),
        (b'{"prompt": "\xff"}\n', "UTF-8"),
        (b"\n \n", "got an empty file"),
        (b'{"prompt": "x"}\n\0\0', "binary"),
        (b'{"prompt": " \\n"}\n', "line 1"),
        (b'{"prompt": "half \\ud83d"}\n', "surrogate"),
        (b'{"prompt": "x", "completion": "half \\ud83d"}\n', "surrogate"),
        (b'{"question": 5}\n', "got the keys question"),
        (b'{"turns": []}\n', "line 1"),
        (b'{"messages": [{"role": "system", "content": "be kind"}]}\n', "line 1"),
        (b'{"prompt": "x", "category": 3}\n', "expected a text as 'category'"),
        (b"[" * 100_000 + b"\n", "line 1"),
    ],
)
def test_a_file_without_prompts_is_refused_with_the_line(tmp_path, content, message):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=message):
        load_workload(str(path))


def write_lines(path, *records):
    path.write_text(
        "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8"
    )
    return path


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"prompt": "a", "question": "b"}, "a"),
        ({"question": "b", "answer": "c"}, "b"),
        ({"turns": ["first", "second"]}, "first"),
        (
            {"messages": [
                {"role": "system", "content": "s"}, {"role": "user", "content": "u"},
                {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"},
            ]},
            "u\n\nv",
        ),
        ({"conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}, "h"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "part"}]}]}, "part"),
        ({"prompt": "one\u2028line"}, "one\u2028line"),
    ],
)  # fmt: skip
def test_a_line_may_contain_its_prompt_in_several_forms(tmp_path, record, text):
    assert load_workload(str(write_lines(tmp_path / "x.jsonl", record))).prompts == (text,)


def test_the_task_is_that_of_the_line_or_the_file(tmp_path):
    path = write_lines(
        tmp_path / "mine.jsonl",
        {"prompt": "a", "category": "sums"}, {"prompt": "b", "task": "songs"}, {"prompt": "c"},
    )  # fmt: skip
    workload = load_workload(str(path))
    assert dict(zip(workload.prompts, workload.tasks, strict=True)) == {
        "a": "sums",
        "b": "songs",
        "c": "mine",
    }


def test_paragraphs_of_a_plain_text_are_prompts(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_bytes("\ufeff \nOnce upon\r\na time\r\n\r\n \n  indented\n\n\n".encode())
    workload = load_workload(str(path))
    assert workload.prompts == ("Once upon\na time", "  indented")
    assert set(workload.tasks) == {"notes"}


def test_json_lines_are_detected_by_their_content(tmp_path):
    path = write_lines(tmp_path / "prompts.dat", {"prompt": "a"}, {"prompt": "b"})
    assert load_workload(str(path)).prompts == ("a", "b")


def spec_bench_file(tmp_path, *categories):
    records = [
        {"question_id": number, "category": category, "turns": [f"{category} {number}", "more"]}
        for number, category in enumerate(categories)
    ]
    return f"spec-bench:{write_lines(tmp_path / 'question.jsonl', *records)}"


def test_the_eight_categories_of_mt_bench_are_one_task_of_spec_bench(tmp_path):
    source = spec_bench_file(tmp_path, "writing", "humanities", "qa", "rag", "coding")
    workload = load_workload(source)
    assert sorted(set(workload.tasks)) == ["multi-turn", "qa", "rag"]
    assert workload.tasks.count("multi-turn") == 3
    assert "writing 0" in workload.prompts


def test_an_unknown_spec_bench_category_is_refused(tmp_path):
    with pytest.raises(BadInputError, match=r"got 'cooking'; other files.* in question\.jsonl, line 2"):
        load_workload(spec_bench_file(tmp_path, "qa", "cooking"))


def test_prompts_of_gsm8k_are_its_questions(tmp_path):
    path = write_lines(tmp_path / "g.jsonl", {"question": "2 + 2?", "answer": "4"})
    workload = load_workload(f"gsm8k:{path}")
    assert (workload.prompts, workload.tasks) == (("2 + 2?",), ("gsm8k",))
    with pytest.raises(BadInputError, match="'prompt' for humaneval"):
        load_workload(f"humaneval:{path}")


def test_datasets_are_found_in_the_folder_of_the_environment_variable(tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    for name, data_set in DATA_SETS.items():
        with pytest.raises(BadInputError, match=f"--prompts {name}:PATH"):
            load_workload(name)
        write_lines(
            tmp_path / data_set.file_name, {"prompt": "x", "question": "x", "turns": ["x"], "category": "qa"}
        )
        assert load_workload(name).prompts == ("x",)


def test_samples_have_equal_numbers_per_task_and_are_interleaved(tmp_path):
    first = write_lines(tmp_path / "many.jsonl", *({"prompt": f"m{number}"} for number in range(30)))
    other = write_lines(tmp_path / "few.jsonl", *({"prompt": f"f{number}"} for number in range(3)))
    workload = load_workload((str(first), str(other)), 12)
    assert workload.name == "many.jsonl + few.jsonl"
    assert (workload.tasks.count("many"), workload.tasks.count("few")) == (9, 3)
    assert [prompt for prompt in workload.prompts if prompt[0] == "m"][:4] == ["m0", "m3", "m6", "m10"]
    assert "few" in workload.tasks[:4]
    assert "few" in workload.tasks[-4:]


def test_shares_are_equal_up_to_the_group_sizes():
    assert equal_shares([80] * 6, 40) == [7, 7, 7, 7, 6, 6]
    assert equal_shares([2, 100], 10) == [2, 8]
    assert equal_shares([2, 3], 10) == [2, 3]


def test_interleaving_keeps_the_order_and_spreads_small_groups():
    assert interleave([list("abcd"), list("12")]) == ["a", "1", "b", "c", "2", "d"]


def test_only_the_selected_tasks_are_used(tmp_path):
    source = spec_bench_file(tmp_path, "writing", "qa", "rag")
    assert set(load_workload(source, tasks=("qa", "rag")).tasks) == {"qa", "rag"}
    with pytest.raises(
        BadInputError, match=r"expected a task of question.jsonl \(multi-turn, qa, rag\), got 'maths'"
    ):
        load_workload(source, tasks=("maths",))


def test_fewer_prompts_than_tasks_are_refused(tmp_path):
    with pytest.raises(BadInputError, match="--task"):
        load_workload(spec_bench_file(tmp_path, "writing", "qa", "rag"), num_prompts=2)


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="got the folder"):
        load_workload(str(tmp_path))
