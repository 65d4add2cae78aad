"""`secondguess train layer-skip`: search for layers to skip in drafts, on text of the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from secondguess.api import load
from secondguess.checkpoint.weight_files import hash_weights
from secondguess.errors import UnsupportedModelError
from secondguess.heads.files import Provenance
from secondguess.heads.skip import write_skipped
from secondguess.names import check_range
from secondguess.runtime.fused import FusedRuntime
from secondguess.train.head_training import DEFAULT_PROMPTS, ProgressDisplay
from secondguess.train.run_folder import (
    RUN,
    check_or_record_options,
    identity_of_texts,
    require_drafter_folder,
)
from secondguess.train.skip_search import Candidate, SkipSearch, stack_prefixes
from secondguess.train.training_texts import (
    AnswerSettings,
    default_documents,
    read_documents,
    require_room,
    write_answers,
)
from secondguess.workloads.loading import evenly_spaced
from secondguess.workloads.provenance import public_name

MAX_SEARCH_TOKENS = 128
"""Maximum number of tokens of each text that are searched on."""


def search_layers(
    out: Path,
    model: str,
    dtype: str,
    device: str,
    data: Sequence[Path],
    num_prompts: int,
    answers: AnswerSettings,
    show: ProgressDisplay,
) -> Candidate:
    """Search for the layers to skip, and write the result to a folder, for `layer-skip:OUT`.

    Args:
        out: folder of the result and of the run, whose texts are reused.
        model, dtype, device: the target; it is loaded with the fused runtime, which can skip layers.
        data: files of prompts; empty for prompts from the standard library.
        num_prompts: maximum number of prompts, to which the target generates answers.
        answers: settings of the answers.
        show: display of the progress.

    Raises:
        BadInputError: an option out of range, data that cannot be used, texts that are too short,
            or a folder that cannot be written to or holds another run.
        UnsupportedModelError: a target whose layers cannot be skipped.
    """
    require_drafter_folder(out, model, "layer-skip")
    answers.require_room_for_prompts()
    check_range("--num-prompts", num_prompts, 1, 10_000)
    documents = read_documents(data, as_is=False) if data else default_documents(DEFAULT_PROMPTS)
    run = out / RUN
    identity = identity_of_texts(model, data, num_prompts, answers, dtype)
    try:
        llm = load(model, "suffix", dtype=dtype, device=device, runtime="fused")
    except UnsupportedModelError as error:
        reason = str(error).partition(";")[0]
        raise UnsupportedModelError(f"{reason}; train a drafter of another kind, such as medusa") from error
    target = llm.target.runtime
    if not isinstance(target, FusedRuntime):
        raise UnsupportedModelError(
            f"expected a target that the fused runtime covers, got {model}; its layers cannot be left out"
        )
    require_room(llm.target, answers.length)
    check_or_record_options(run, {"kind": "layer-skip", **identity})
    chosen = evenly_spaced(documents, num_prompts)
    texts = write_answers(llm, chosen, answers, run / "texts", show.writing, show.pause)
    length = min(MAX_SEARCH_TOKENS, max(len(text.tokens) for text in texts))
    search = SkipSearch(target, stack_prefixes([text.tokens for text in texts], length))
    found = search.run(show.line)
    write_skipped(out, found.skipped, asdict(found))
    Provenance(
        "layer-skip",
        public_name(model),
        hash_weights(Path(llm.target.path)),
        training={"texts": len(texts), "tokens_of_each": length, "candidates": search.num_tried},
        figures={"acceptance": round(found.acceptance, 4), "expected_speedup": round(found.speedup, 3)},
    ).write(out)
    return found
