"""Export to SGLang (option names of 0.5.23): one command-line option per setting.

SGLang counts the pending token as part of the draft: K draft tokens here are K + 1 there.
"""

from __future__ import annotations

import shlex

from secondguess.errors import BadInputError
from secondguess.export.base import ExportTarget, Recommendation


def _plain(recommendation: Recommendation) -> str:
    return _launch(recommendation, [])


def _standalone(recommendation: Recommendation) -> str:
    assert recommendation.drafter.draft_model is not None
    length = recommendation.draft_length
    return _launch(
        recommendation,
        [
            *("--speculative-algorithm", "STANDALONE"),
            *("--speculative-draft-model-path", recommendation.drafter.draft_model),
            *("--speculative-num-steps", str(length)),
            # Chains only: trees need further options and the overlap scheduler disabled.
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(length + 1)),
        ],
    )


def _eagle(recommendation: Recommendation) -> str:
    drafter = recommendation.drafter
    if drafter.trained is None:
        raise BadInputError(
            f"expected the folder of a trained drafter for SGLang, as in eagle:PATH, got {drafter.name}"
        )
    length = recommendation.draft_length
    return _launch(
        recommendation,
        [
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", drafter.trained),
            *("--speculative-num-steps", str(length)),
            *("--speculative-eagle-topk", "1"),
            *("--speculative-num-draft-tokens", str(length + 1)),
        ],
    )


def _ngram(recommendation: Recommendation) -> str:
    length = str(recommendation.draft_length + 1)
    return _launch(
        recommendation, ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", length]
    )


def _launch(recommendation: Recommendation, speculation: list[str]) -> str:
    command = ["python", "-m", "sglang.launch_server", "--model-path", recommendation.model]
    if recommendation.dtype is not None:
        command += ["--dtype", recommendation.dtype]
    return shlex.join([*command, *speculation]) + "\n"


_NGRAM_NOTE = (
    "SGLang's NGRAM looks up a tree of past text, that of other requests included, and needs CUDA; "
    "how long a match must be is its own choice"
)

SGLANG = ExportTarget(
    title="SGLang",
    writers={"none": _plain, "model": _standalone, "ngram": _ngram, "suffix": _ngram, "eagle": _eagle},
    dtypes=("float32", "bfloat16", "float16"),
    int8="SGLang has no equivalent of our 8-bit weights; give it a checkpoint that is quantised",
    notes=(
        "the distribution of sampled text is not guaranteed: SGLang samples the target alone unless "
        "--speculative-use-rejection-sampling is added (chains only)",
        "with speculation on, SGLang lowers --max-running-requests to 48 unless it is given",
    ),
    notes_by_drafter={
        "eagle": (
            "SGLang reads the authors' format (midlayer.*); what is trained here is in that of speculators: rename "
            "layers.0. to midlayer. if your version refuses it",
        ),
        "ngram": (_NGRAM_NOTE,),
        "suffix": ("SGLang has no suffix drafter: NGRAM is the nearest it has", _NGRAM_NOTE),
    },
)
