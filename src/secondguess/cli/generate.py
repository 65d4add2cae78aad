"""`secondguess generate`: continue prompts, as coloured text or JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument

from secondguess.cli import options
from secondguess.cli.interruption import DeferredInterrupt
from secondguess.cli.options import output_option
from secondguess.cli.output import JsonWriter, TerminalWriter, Writer
from secondguess.cli.progress import load_with_progress
from secondguess.cli.prompts import Request, error_source, read_requests
from secondguess.cli.sampling import SAMPLING
from secondguess.errors import BadInputError
from secondguess.params import SamplingParams

if TYPE_CHECKING:
    from secondguess.api import LLM, Generation


def generate(
    prompt: Annotated[
        str | None,
        Argument(
            metavar="PROMPT|-", help="The text to continue; - reads standard input.", show_default=False
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        output_option("Image before the prompt, for a vision-language model; repeatable.", metavar="FILE"),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        output_option(
            "One JSON object per line, answered in order: a prompt (or messages, for a model with a "
            "chat template), settings (max_tokens, seed, ...) that replace those given here, and metadata, "
            "which --json repeats. Other fields are refused."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        output_option(
            "Number of prompts of the file that decode together, each with all its samples.",
            show_default="1",
        ),
    ] = None,
    json: options.Json = False,
    *,
    loading: Annotated[options.Loading, options.LOADING],
    params: Annotated[SamplingParams, SAMPLING],
) -> int:
    """Continue a prompt, or every prompt of a file.

    Text is coloured by origin (drafter or target) and followed by one line of
    statistics: tokens per second, acceptance rate, tokens per target pass. Ctrl-C
    keeps the text generated so far; with --json, finish_reason is then null.
    """
    requests = read_requests(prompt, prompt_file, image or ())
    if batch_size is not None and (prompt_file is None or batch_size < 1):
        got = f"{batch_size}" if prompt_file else f"{batch_size} without a file"
        raise BadInputError(f"expected --batch-size of at least 1, together with --prompt-file; got {got}")

    from secondguess.api import LLM

    all_params = []
    for request in requests:
        with error_source(request.source):
            all_params.append(LLM.sampling(params, **request.settings))
            for name in ("logprobs", "prompt_logprobs"):
                if getattr(all_params[-1], name) is not None and not json:
                    raise BadInputError(
                        f"expected --json together with --{name.replace('_', '-')} (or a line's {name}): "
                        "log-probabilities are only shown there"
                    )
    loading.require_use_of(all_params)
    llm = load_with_progress(loading.settings)
    return answer(llm, requests, all_params, batch_size or 1, JsonWriter if json else TerminalWriter)


def answer(
    llm: LLM,
    requests: Sequence[Request],
    params: Sequence[SamplingParams],
    batch_size: int,
    make_writer: Callable[[LLM], Writer],
) -> int:
    """Generate for all requests in order, `batch_size` at a time, and return the exit code.

    All prompts are encoded first, so that an invalid one is reported, with its source, before any generation.
    """
    from secondguess.api import Generation, check_request
    from secondguess.drafters import select_parts
    from secondguess.prompts import EncodedPrompt, encode_with_images

    prompts = []
    for request, settings in zip(requests, params, strict=True):
        with error_source(request.source):
            prompts.append(EncodedPrompt(*encode_with_images(llm.target, request.prompt)))
            check_request(llm.target, llm.verifier, prompts[-1].ids, settings)
            if settings.draft_with is not None:
                select_parts(llm.drafter, settings.draft_with)
    writer = make_writer(llm)
    for start in range(0, len(requests), batch_size):
        batch = slice(start, start + batch_size)
        pairs = zip(requests[batch], params[batch], strict=True)
        generation = Generation(llm, prompts[batch], params[batch])
        writer.begin([request for request, settings in pairs for _ in range(settings.n)])
        write_rounds(generation, writer)
    return 0


def write_rounds(generation: Generation, writer: Writer) -> None:
    """Run a generation and write its text as it is committed; after Ctrl-C, write what there is first."""
    try:
        with DeferredInterrupt() as interruption:
            for pieces in generation.rounds():
                writer.show(pieces)
                interruption.raise_if_interrupted()
    except KeyboardInterrupt:
        writer.show(generation.flush())
        writer.end(generation.outputs())
        raise
    writer.end(generation.outputs())
