"""Export to vLLM (option names of 0.33): `vllm serve` with `--speculative-config` JSON."""

from __future__ import annotations

import json
import shlex

from secondguess.errors import BadInputError
from secondguess.export.base import ExportTarget, Recommendation


def _plain(recommendation: Recommendation) -> str:
    return _serve(recommendation)


def _draft_model(recommendation: Recommendation) -> str:
    return _serve(recommendation, method="draft_model", model=recommendation.drafter.draft_model)


def _ngram(recommendation: Recommendation) -> str:
    options = recommendation.drafter.options
    return _serve(
        recommendation,
        method="ngram",
        prompt_lookup_max=options["max"],
        prompt_lookup_min=options["min"],
    )


def _suffix(recommendation: Recommendation) -> str:
    options = recommendation.drafter.options
    return _serve(
        recommendation,
        method="suffix",
        suffix_decoding_max_spec_factor=options["factor"],
        suffix_decoding_min_token_prob=options["threshold"],
    )


def _trained(recommendation: Recommendation) -> str:
    """Configure a drafter head: EAGLE-3, DSpark, Medusa or MTP.

    All need a folder, except MTP modules in the target's own checkpoint.
    """
    drafter = recommendation.drafter
    method = {"eagle": "eagle3"}.get(drafter.kind, drafter.kind)
    folder = {} if drafter.trained is None else {"model": drafter.trained}
    if not folder and drafter.kind != "mtp":
        raise BadInputError(
            f"expected the folder of a trained drafter for vLLM, as in {drafter.kind}:PATH, got {drafter.name}"
        )
    return _serve(recommendation, method=method, **folder)


def _serve(recommendation: Recommendation, **speculation: object) -> str:
    command = ["vllm", "serve", recommendation.model]
    if recommendation.dtype is not None:
        command += ["--dtype", recommendation.dtype]
    if speculation:
        speculation["num_speculative_tokens"] = recommendation.draft_length
        command += ["--speculative-config", json.dumps(speculation, ensure_ascii=False)]
    return shlex.join(command) + "\n"


VLLM = ExportTarget(
    title="vLLM",
    writers={
        "none": _plain,
        "model": _draft_model,
        "ngram": _ngram,
        "suffix": _suffix,
        "eagle": _trained,
        "mtp": _trained,
        "medusa": _trained,
        "dspark": _trained,
    },
    options={"ngram": ("max", "min"), "suffix": ("factor", "threshold")},
    dtypes=("float32", "bfloat16", "float16"),
    int8="vLLM has no equivalent of our 8-bit weights; give it a checkpoint that is quantised",
    longest_draft=32,
    notes=(
        "vLLM calls itself lossless up to numerics: greedy text may change with drafting in half precision, and a seed "
        "gives another text with drafts than without",
        "it drafts this many tokens at any load; num_speculative_tokens_per_batch_size in the same JSON can make that "
        "fewer for large batches",
    ),
    notes_by_drafter={
        "medusa": (
            "vLLM's Medusa wants an output matrix in the file: add the target's as lm_head.weight to a folder trained here; "
            "its drafts are chains of the likeliest tokens",
        ),
        "model": (
            "vLLM's drafts are greedy at any temperature, which is lossless and accepts less; for sampled text add "
            '"draft_sample_method": "probabilistic" (it takes memory for the probabilities) and, for block verification, '
            '"rejection_sample_method": "block"',
        ),
        "suffix": (
            "suffix needs `pip install arctic-inference` with vLLM's first model runner; the second needs nothing and does "
            "not read the two suffix_ keys; matches there also reach into the outputs of earlier requests",
        ),
    },
)
