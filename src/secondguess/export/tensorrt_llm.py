"""Export to TensorRT-LLM (names of 1.3 and 1.4): a YAML file for `trtllm-serve --config`."""

from __future__ import annotations

import json
import shlex

from secondguess.export.base import ExportTarget, Recommendation

FILE = "secondguess-trtllm.yaml"


def _plain(recommendation: Recommendation) -> str:
    return _file(recommendation, {})


def _draft_target(recommendation: Recommendation) -> str:
    speculation = {
        "decoding_type": "DraftTarget",
        "max_draft_len": recommendation.draft_length,
        "speculative_model": recommendation.drafter.draft_model,
    }
    return _file(recommendation, speculation, disable_overlap_scheduler=True)


def _ngram(recommendation: Recommendation) -> str:
    speculation = {
        "decoding_type": "NGram",
        "max_draft_len": recommendation.draft_length,
        "max_matching_ngram_size": recommendation.drafter.options["max"],
        # Same behaviour as our n-gram drafter: the latest match within one request.
        "is_keep_all": True,
        "is_use_oldest": False,
        "is_public_pool": False,
    }
    return _file(recommendation, speculation, disable_overlap_scheduler=True)


def _suffix_automaton(recommendation: Recommendation) -> str:
    return _file(recommendation, {"decoding_type": "SA", "max_draft_len": recommendation.draft_length})


def _file(recommendation: Recommendation, speculation: dict[str, object], **settings: object) -> str:
    if recommendation.dtype is not None:
        settings["dtype"] = recommendation.dtype
    lines = [f"# {shlex.join(['trtllm-serve', recommendation.model, '--config', FILE])}"]
    lines += [f"{key}: {_yaml(value)}" for key, value in settings.items()]
    if speculation:
        lines += ["speculative_config:", *(f"  {key}: {_yaml(value)}" for key, value in speculation.items())]
    if not settings and not speculation:
        # A YAML file of comments only does not parse as a mapping.
        lines.append("{}")
    return "\n".join(lines) + "\n"


def _yaml(value: object) -> str:
    # Every JSON scalar is a valid YAML scalar.
    return json.dumps(value, ensure_ascii=False)


TENSORRT_LLM = ExportTarget(
    title="TensorRT-LLM",
    writers={"none": _plain, "model": _draft_target, "ngram": _ngram, "suffix": _suffix_automaton},
    options={"ngram": ("max",)},
    dtypes=("float32", "bfloat16", "float16"),
    int8="TensorRT-LLM has no equivalent of our 8-bit weights; give it a checkpoint that is quantised",
    notes=(
        "TensorRT-LLM runs on NVIDIA GPUs only",
        "the distribution of sampled text is not guaranteed: use_rejection_sampling and allow_advanced_sampling are off unless "
        "they are added to speculative_config",
        "it drafts this many tokens at any load; max_concurrency or draft_len_schedule in speculative_config limit that",
    ),
    notes_by_drafter={
        "model": (
            "its documentation names the decoding type DraftTarget; releases that refuse it call it Draft_Target",
        ),
    },
)
