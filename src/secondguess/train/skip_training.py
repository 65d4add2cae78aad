"""`secondguess train layer-skip`: search for layers to skip in drafts, on text of the target."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secondguess.api import load
from secondguess.errors import UnsupportedModelError
from secondguess.heads.files import Provenance
from secondguess.names import check_range
from secondguess.runtime.fingerprint import hash_weights
from secondguess.runtime.fused import FusedRuntime
from secondguess.train.files import require_folder
from secondguess.train.head_training import DEFAULT_PROMPTS, ProgressDisplay
from secondguess.train.run_folder import check_or_record_options, identity_of_texts
from secondguess.train.skip_search import Candidate, SkipSearch, save_layers, stack_prefixes
from secondguess.train.training_texts import (
    AnswerSettings,
    default_documents,
    read_documents,
    sample_evenly,
    write_answers,
)
from secondguess.workloads.provenance import public_name

MAX_SEARCH_TOKENS = 128
"""Maximum number of tokens of each text that are searched on."""


@dataclass(frozen=True)
class SkipJob:
    """Options of a search.

    Args:
        out: folder of the result, for `layer-skip:OUT`.
        model, dtype: the target; it is loaded with the fused runtime, which can skip layers.
        data: files of prompts; empty for prompts from the standard library.
        num_prompts: maximum number of prompts, to which the target generates answers.
        answers: settings of the answers.

    Raises:
        BadInputError: an option out of range, or a folder that cannot be written to.
    """

    out: Path
    model: str = "builtin"
    dtype: str = "auto"
    data: tuple[Path, ...] = ()
    num_prompts: int = 16
    answers: AnswerSettings = field(default_factory=AnswerSettings)

    def __post_init__(self) -> None:
        require_folder(self.out, "--out")
        self.answers.require_room_for_prompts()
        check_range("--num-prompts", self.num_prompts, 1, 10_000)

    def identity(self) -> dict[str, Any]:
        """Return the options that determine texts and layers, with which texts are reused."""
        return {
            "kind": "layer-skip",
            **identity_of_texts(self.model, self.data, self.num_prompts, self.answers, self.dtype),
        }


def search_layers(job: SkipJob, show: ProgressDisplay) -> Candidate:
    """Search for the layers to skip, and write the result to `job.out`.

    Raises:
        BadInputError: data that cannot be used, texts that are too short, or a folder with another
            run.
        UnsupportedModelError: a target whose layers cannot be skipped.
    """
    documents = read_documents(job.data, as_is=False) if job.data else default_documents(DEFAULT_PROMPTS)
    run = job.out / "run"
    check_or_record_options(run, job.identity())
    llm = load(job.model, "suffix", dtype=job.dtype, runtime="fused")
    target = llm.target.runtime
    if not isinstance(target, FusedRuntime):
        raise UnsupportedModelError(
            f"expected a target that the fused runtime covers, got {job.model}; its layers cannot be left out"
        )
    chosen = sample_evenly(documents, job.num_prompts)
    texts = write_answers(llm, chosen, job.answers, run / "texts", show.writing, show.pause)
    length = min(MAX_SEARCH_TOKENS, max(len(text.tokens) for text in texts))
    search = SkipSearch(target, stack_prefixes([text.tokens for text in texts], length))
    found = search.run(show.line)
    save_layers(found, job.out)
    Provenance(
        "layer-skip",
        public_name(job.model),
        hash_weights(Path(llm.target.path)),
        training={"texts": len(texts), "tokens_of_each": length, "candidates": search.num_tried},
        figures={"acceptance": round(found.acceptance, 4), "expected_speedup": round(found.speedup, 3)},
    ).write(job.out)
    return found
