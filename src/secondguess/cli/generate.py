"""`secondguess generate`: continue prompts, as coloured text or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Context, Option

from secondguess.cli import options
from secondguess.cli.interruption import DeferredInterrupt
from secondguess.cli.output import JsonWriter, TerminalWriter, Writer
from secondguess.cli.prompts import Request, read_logit_bias, read_requests
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.api import LLM
    from secondguess.sampling import SamplingParams


def generate(
    context: Context,
    prompt: Annotated[
        str | None,
        Argument(
            metavar="PROMPT|-", help="The text to continue; - reads standard input.", show_default=False
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        Option(
            help="One JSON object per line, answered in order: a prompt (or messages, for a model with a "
            "chat template), settings (max_tokens, seed, ...) that replace those given here, and metadata, "
            "which --json repeats. Other fields are refused.",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        Option(
            help="Number of prompts of the file that decode together, each with all its samples.",
            show_default="1",
            rich_help_panel=options.OUTPUT,
        ),
    ] = None,
    json: options.Json = False,
    config: options.Config = None,
    model: options.Model = "builtin",
    drafter: options.Drafter = None,
    verifier: options.Verifier = "auto",
    controller: options.Controller = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    quantize: options.Quantize = None,
    drafter_quantize: options.DrafterQuantize = None,
    runtime: options.Runtime = "auto",
    max_tokens: options.MaxTokens = 128,
    min_tokens: options.MinTokens = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    presence_penalty: options.PresencePenalty = 0.0,
    logit_bias: options.LogitBias = None,
    stop: options.Stop = None,
    stop_token_id: options.StopTokenId = None,
    n: options.NumSamples = 1,
    seed: options.Seed = None,
    logprobs: options.Logprobs = None,
    draft_length: options.DraftLength = None,
) -> int:
    """Continue a prompt, or every prompt of a file.

    Text is coloured by origin (drafter or target) and followed by one line of
    statistics: tokens per second, acceptance rate, tokens per target pass. Ctrl-C
    keeps the text generated so far; with --json, finish_reason is then null.
    """
    requests = read_requests(prompt, prompt_file)
    if batch_size is not None and (prompt_file is None or batch_size < 1):
        got = f"{batch_size}" if prompt_file else f"{batch_size} without a file"
        raise BadInputError(f"expected --batch-size of at least 1, together with --prompt-file; got {got}")

    from secondguess.api import load
    from secondguess.sampling import SamplingParams

    base = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        logit_bias=read_logit_bias(logit_bias or []),
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        n=n,
        seed=seed,
        logprobs=logprobs,
        draft_length=draft_length,
    )
    params = [_settings(base, request) for request in requests]
    if not json:
        _refuse_logprobs(requests, params)
    llm = load(**options.load_settings(context, config))
    return answer(llm, requests, params, batch_size or 1, JsonWriter if json else TerminalWriter)


def answer(
    llm: LLM,
    requests: Sequence[Request],
    params: Sequence[SamplingParams],
    batch_size: int,
    make_writer: Callable[[LLM], Writer],
) -> int:
    """Generate for all requests in order, `batch_size` at a time, and return the exit code.

    All prompts are encoded first, so that an invalid one is reported before any generation.

    Raises:
        BadInputError: a prompt is too long or settings are not supported; names the source.
        KeyboardInterrupt: Ctrl-C; raised after the text generated so far has been written.
    """
    from secondguess.api import Generation

    prompts = [_encode(llm, request, settings) for request, settings in zip(requests, params, strict=True)]
    writer = make_writer(llm)
    for batch in _batches(len(requests), batch_size):
        writer.begin([requests[index] for index in batch for _ in range(params[index].n)])
        generation = Generation(llm, [prompts[index] for index in batch], [params[index] for index in batch])
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
    return 0


def _batches(count: int, size: int) -> Iterator[range]:
    return (range(start, min(start + size, count)) for start in range(0, count, size))


def _settings(base: SamplingParams, request: Request) -> SamplingParams:
    from secondguess.api import LLM

    try:
        return LLM.sampling(base, **request.settings)
    except BadInputError as error:
        raise BadInputError(f"{request.source}: {error}") from None


def _refuse_logprobs(requests: Sequence[Request], params: Sequence[SamplingParams]) -> None:
    for request, settings in zip(requests, params, strict=True):
        if settings.logprobs is not None:
            raise BadInputError(
                f"{request.source}: expected --json together with --logprobs (or a line's logprobs): "
                "log-probabilities are only shown there"
            )


def _encode(llm: LLM, request: Request, params: SamplingParams) -> list[int]:
    from secondguess.api import check_request, encode

    try:
        ids = encode(llm.target, request.prompt)
        check_request(llm.target, llm.verifier, ids, params)
        return ids
    except BadInputError as error:
        raise BadInputError(f"{request.source}: {error}") from None
