"""`secondguess train layer-skip`, whole: the target writes, and on its text it is found which layers a draft can spare."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from secondguess.api import load
from secondguess.bench.head_training import DEFAULT_PROMPTS, Show
from secondguess.bench.lesson_texts import (
    AnswerSettings,
    default_documents,
    read_documents,
    some_of,
    write_answers,
)
from secondguess.errors import BadInputError, UnsupportedModelError
from secondguess.heads.files import Provenance
from secondguess.names import require_between
from secondguess.runtime.fingerprint import hash_weights
from secondguess.runtime.fused import FusedRuntime
from secondguess.train.skip_search import Candidate, SkipSearch, one_length, save_layers

SEARCHED_TOKENS = 128
"""Of each text."""


@dataclass(frozen=True)
class SkipJob:
    """What to search, on what, and where to put what is found.

    Args:
        out: folder of what is found, for `layer-skip:OUT`.
        model, dtype: the target; it is loaded with the fused runtime, whose layers can be left out.
        data: files of prompts; empty for prompts out of the standard library.
        num_prompts: so many of them are answered, and searched on.
        answers: how.
    """

    out: Path
    model: str = "builtin"
    dtype: str = "auto"
    data: tuple[Path, ...] = ()
    num_prompts: int = 16
    answers: AnswerSettings = field(default_factory=AnswerSettings)

    def __post_init__(self) -> None:
        if self.out.exists() and not self.out.is_dir():
            raise BadInputError(f"expected a folder for --out, got the file {self.out}")
        require_between("--num-prompts", self.num_prompts, 1, 10_000)


def search_layers(job: SkipJob, show: Show) -> Candidate:
    """Search, and write what was found.

    Raises:
        BadInputError: data that cannot be used, or texts that are too short.
        UnsupportedModelError: a target whose layers cannot be left out.
    """
    documents = read_documents(job.data, as_is=False) if job.data else default_documents(DEFAULT_PROMPTS)
    llm = load(job.model, "suffix", dtype=job.dtype, runtime="fused")
    target = llm.target.runtime
    if not isinstance(target, FusedRuntime):
        raise UnsupportedModelError(
            f"expected a target that the fused runtime covers, got {job.model}; its layers cannot be left out"
        )
    chosen = some_of(documents, job.num_prompts)
    texts = write_answers(llm, chosen, job.answers, job.out / "run" / "texts", show.writing, show.pause)
    length = min(SEARCHED_TOKENS, max(len(text.tokens) for text in texts))
    search = SkipSearch(target, one_length([text.tokens for text in texts], length))
    found = search.run(show.line)
    save_layers(found, job.out)
    Provenance(
        "layer-skip",
        job.model if job.model == "builtin" else Path(job.model).name,
        hash_weights(Path(llm.target.path)),
        training={"texts": len(texts), "tokens_of_each": length, "candidates": search.num_tried},
        figures={"acceptance": round(found.acceptance, 4), "expected_speedup": round(found.speedup, 3)},
    ).write(job.out)
    return found
