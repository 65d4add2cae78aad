"""lm-evaluation-harness against the server: log-likelihoods of multiple choices are those of Transformers."""

from __future__ import annotations

import json

import pytest
import torch
from released_models import RELEASES, make_folder

from conftest import serving
from secondguess import load
from secondguess.checkpoint.loader import module_of
from secondguess.engine import Engine
from secondguess.server.served_model import short_name

pytest.importorskip(
    "lm_eval.models.openai_completions", reason="needs lm-evaluation-harness (`pip install lm_eval[api]`)"
)
CAPITALS = {
    "France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Austria": "Vienna", "Slovenia": "Ljubljana",
    "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo", "Greece": "Athens",
}  # fmt: skip
TASK = {
    "task": "capitals",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}


def questions():
    names = list(CAPITALS.values())
    for index, country in enumerate(CAPITALS):
        choices = [names[(index + step) % len(names)] for step in (0, 3, 5, 7)]
        answer = index % 4
        choices[0], choices[answer] = choices[answer], choices[0]
        yield {"question": f"The capital of {country} is", "choices": choices, "answer": answer}


@pytest.mark.released
def test_log_likelihoods_are_those_of_transformers(tmp_path, monkeypatch):
    import lm_eval
    from lm_eval.tasks import TaskManager

    if not RELEASES["smollm2"].path.is_file():
        pytest.skip("smollm2 is not here: python tools/released smollm2")
    folder = str(make_folder(RELEASES["smollm2"]))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "test.jsonl").write_text("\n".join(map(json.dumps, questions())))
    task = TASK | {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "test.jsonl")}}}
    llm = load(folder, dtype="float32")
    engine = Engine(llm)
    with serving(engine) as url:
        arguments = {
            "model": short_name(llm.target.name), "base_url": f"{url}/v1/completions", "tokenizer": folder,
            "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_retries": 1,
        }  # fmt: skip
        results = lm_eval.simple_evaluate(
            "local-completions",
            model_args=arguments,
            tasks=[task],
            batch_size=4,
            task_manager=TaskManager(include_defaults=False),  # reading its own tasks takes seconds
        )
    engine.close()
    module = module_of(llm.target.checkpoint)
    for sample in results["samples"]["capitals"]:
        for arguments, (found, _) in zip(sample["arguments"], sample["filtered_resps"], strict=True):
            assert found == pytest.approx(log_likelihood(module, llm.target, *arguments), abs=1e-4)


def log_likelihood(module, target, context, continuation):
    """Return the log-probability of a continuation, from the module's logits in float32."""
    ids, num_context = target.encode(context + continuation), len(target.encode(context))
    with torch.inference_mode():
        logprobs = module(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(logprobs[position - 1, ids[position]].item() for position in range(num_context, len(ids)))
