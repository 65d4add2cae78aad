"""Every class in Transformers' causal-LM mapping: the table in `docs/models.md`, and some classes compared anew."""

from collections import Counter
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from model_coverage.__main__ import compare_class
from model_coverage.report import Result, read_report
from secondguess.runtime.step import ForwardStep

RESULTS = read_report(Path(__file__).parents[1] / "docs" / "models.md")


@pytest.mark.transformers
def test_the_table_has_every_model_type():
    """It is that of the newest release; older ones have fewer types."""
    listed = [result.model_type for result in RESULTS]
    assert listed == sorted(listed)
    assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() <= set(listed)


def test_no_model_type_crashes_or_differs():
    counts = Counter(result.outcome for result in RESULTS)
    assert counts.keys() <= {"same", "refused", "not built"}
    assert all(result.reason for result in RESULTS if result.outcome != "same")


SAME_IN_EVERY_RELEASE = [
    "apertus1p5_text",
    "deepseek_v32",
    "dory",
    "exaone",
    "inkling2_loop_text",
    "lara_mini",
    "lfm2",
    "llama",
    "mamba",
    "qwen3_5",
    "sarvam_mla",
    "sarvam_moe",
]
"""Types, some of them new in the newest release."""


@pytest.mark.parametrize(
    ("model_type", "outcome"),
    [
        *(pytest.param(each, "same", marks=pytest.mark.transformers) for each in SAME_IN_EVERY_RELEASE),
        ("afmoe", "same"),
        ("doge", "same"),
        ("dots3_note", "same"),
        ("falcon", "same"),
        ("gemma4_text", "same"),
        ("hrm_text", "same"),
        ("jetmoe", "same"),
        ("mpt", "same"),
        ("musicgen", "refused"),
        ("rwkv", "refused"),
        ("xlnet", "refused"),
    ],
)
def test_a_class_gets_the_result_of_the_table(model_type, outcome):
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"Transformers {transformers.__version__} has no {model_type}")
    result = compare_class(model_type)
    assert result.outcome == outcome, result
    assert Result(model_type, result.outcome, result.runtime, result.reason) in RESULTS


def test_a_wrong_mask_is_found(monkeypatch):
    """The comparison fails if every query attends to all keys of a draft."""
    monkeypatch.setattr(ForwardStep, "visible", lambda self, *_: None)
    result = compare_class("llama")
    assert result.outcome == "differs", result
    assert "batch of chains" in result.reason
