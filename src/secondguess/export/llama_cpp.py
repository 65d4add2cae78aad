"""Export to llama.cpp (option names of 2026, commit 0c1e570).

The exported commands convert the weights to GGUF and start `llama-server`.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from secondguess.drafters.ngram import NgramOptions
from secondguess.export.base import ExportTarget, Recommendation

TARGET_FILE, DRAFTER_FILE = "target.gguf", "drafter.gguf"
OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
INT8 = "q8_0"


def _plain(recommendation: Recommendation) -> str:
    return _serve(recommendation, [])


def _draft_model(recommendation: Recommendation) -> str:
    return _serve(
        recommendation,
        [
            *("-md", DRAFTER_FILE),
            *("--spec-type", "draft-simple"),
            *("--spec-draft-n-max", str(recommendation.draft_length)),
        ],
    )


def _ngram(recommendation: Recommendation) -> str:
    longest = recommendation.drafter.options.get("max", NgramOptions().max)
    return _serve(
        recommendation,
        [
            *("--spec-type", "ngram-simple"),
            *("--spec-ngram-simple-size-n", str(longest)),
            *("--spec-ngram-simple-size-m", str(recommendation.draft_length)),
        ],
    )


def _serve(recommendation: Recommendation, speculation: list[str]) -> str:
    commands = _convert(recommendation.model, TARGET_FILE, recommendation.dtype, recommendation.quantize)
    if recommendation.drafter.draft_model is not None:
        commands += _convert(
            recommendation.drafter.draft_model,
            DRAFTER_FILE,
            recommendation.dtype,
            recommendation.drafter_quantize,
        )
    commands.append(["llama-server", "-m", TARGET_FILE, *speculation])
    return "".join(shlex.join(command) + "\n" for command in commands)


def _convert(model: str, file: str, dtype: str | None, quantize: str | None) -> list[list[str]]:
    """Return the commands that convert a model to a GGUF file.

    The converter reads directories only, so other models are downloaded first.
    """
    folder = model if Path(model).is_dir() else file.removesuffix(".gguf")
    fetch = [] if folder == model else [["hf", "download", model, "--local-dir", folder]]
    outtype = INT8 if quantize else "auto" if dtype is None else OUTTYPES[dtype]
    return [*fetch, ["python", "convert_hf_to_gguf.py", folder, "--outfile", file, "--outtype", outtype]]


_NGRAM_NOTE = (
    "llama.cpp's ngram-simple looks for matches of exactly that many tokens, where ours tries several lengths"
)

LLAMA_CPP = ExportTarget(
    title="llama.cpp",
    writers={"none": _plain, "model": _draft_model, "ngram": _ngram, "suffix": _ngram},
    options={"ngram": ("max",)},
    dtypes=tuple(OUTTYPES),
    notes=(
        "convert_hf_to_gguf.py lies in llama.cpp's sources; builds from before 2026 call --spec-draft-n-max --draft-max",
        "llama.cpp keeps the target's distribution by sampling the target and comparing: with a draft model it accepts "
        "less at temperatures above 0 than we do",
        "it drafts at any load, also where that does not pay",
    ),
    notes_by_drafter={
        "ngram": (_NGRAM_NOTE,),
        "suffix": ("llama.cpp has no suffix drafter: ngram-simple is the nearest it has", _NGRAM_NOTE),
    },
)
