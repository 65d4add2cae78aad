"""`secondguess generate`: continue prompts, as coloured text or JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Context

from secondguess.cli import options
from secondguess.cli.interruption import DeferredInterrupt
from secondguess.cli.options import output_option, sampling_option
from secondguess.cli.output import JsonWriter, TerminalWriter, Writer
from secondguess.cli.prompts import Request, error_source, read_logit_bias, read_requests, read_text
from secondguess.errors import BadInputError

if TYPE_CHECKING:
    from secondguess.api import LLM, Generation
    from secondguess.sampling import Grammar, SamplingParams


def generate(
    context: Context,
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
    share_history: options.ShareHistory = False,
    max_tokens: Annotated[int, sampling_option("Maximum number of tokens to generate.")] = 128,
    min_tokens: Annotated[int, sampling_option("Minimum number of tokens to generate.")] = 0,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    frequency_penalty: Annotated[
        float, sampling_option("Subtracted once per occurrence in the output.")
    ] = 0.0,
    presence_penalty: Annotated[
        float, sampling_option("Subtracted from tokens that occur in the output.")
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        sampling_option("Add to a token id's logit; -inf bans it; repeatable.", metavar="TOKEN=VALUE"),
    ] = None,
    stop: options.Stop = None,
    include_stop_str_in_output: Annotated[
        bool, sampling_option("Leave the stop string in the text.", "--include-stop")
    ] = False,
    stop_token_ids: Annotated[
        list[int] | None, sampling_option("End at this token id; repeatable.", "--stop-token-id")
    ] = None,
    ignore_eos: Annotated[
        bool, sampling_option("Go on after the model's end tokens.", "--ignore-eos")
    ] = False,
    n: Annotated[int, sampling_option("Samples per prompt.", "--n")] = 1,
    seed: options.RequestSeed = None,
    logprobs: Annotated[
        int | None,
        sampling_option("With --json: each token's log-probability and this many alternatives."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None, sampling_option("With --json: the same for the tokens of the prompt.")
    ] = None,
    json_schema: Annotated[
        Path | None,
        sampling_option("The text must be JSON that this JSON schema describes.", metavar="FILE"),
    ] = None,
    regex: Annotated[str | None, sampling_option("The text must match this regular expression.")] = None,
    prediction: Annotated[
        Path | None,
        sampling_option("Expected output, such as the file before an edit, to draft from.", metavar="FILE"),
    ] = None,
    draft_length: options.DraftLength = None,
    max_draft_length: Annotated[
        int | None,
        sampling_option("Draft at most this many tokens before each target pass.", show_default="no limit"),
    ] = None,
    draft_with: Annotated[
        str | None,
        sampling_option(
            "Draft only with these parts of the drafter, such as suffix of suffix+model:PATH; ngram and none are always valid.",
            show_default="all of them",
        ),
    ] = None,
    history: Annotated[
        bool,
        sampling_option(
            "With --share-history: draft from other outputs, and let other prompts draft from these.",
            "--history/--no-history",
        ),
    ] = True,
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

    base = sampling_params(context.params)  # before the slow imports

    from secondguess.api import LLM
    from secondguess.cli.progress import load_with_progress

    params = []
    for request in requests:
        with error_source(request.source):
            params.append(LLM.sampling(base, **request.settings))
            for name in ("logprobs", "prompt_logprobs"):
                if getattr(params[-1], name) is not None and not json:
                    raise BadInputError(
                        f"expected --json together with --{name.replace('_', '-')} (or a line's {name}): "
                        "log-probabilities are only shown there"
                    )
    settings = options.load_settings_and_tuned(context, config)[0]
    options.refuse_unused(context, settings, params)
    llm = load_with_progress(settings)
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


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    from secondguess.sampling import Grammar

    if json_schema is not None and regex is not None:
        raise BadInputError("expected one grammar, got --json-schema and --regex; give one of them")
    if regex is not None:
        return Grammar.regex(regex)
    return None if json_schema is None else Grammar.json_schema(read_text(json_schema))


def write_rounds(generation: Generation, writer: Writer) -> None:
    """Run a generation and write its text as it is committed.

    Raises:
        KeyboardInterrupt: Ctrl-C; raised after the text generated so far has been written.
    """
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


def sampling_params(given: dict[str, Any]) -> SamplingParams:
    """Return the sampling settings among the parameters of a command."""
    from secondguess.sampling import SamplingParams

    settings = {name: given[name] for name in SamplingParams.__dataclass_fields__ if name in given}
    settings["grammar"] = _grammar(given.get("json_schema"), given.get("regex"))
    if given.get("prediction") is not None:
        settings["prediction"] = read_text(given["prediction"])
    settings["logit_bias"] = read_logit_bias(given.get("logit_bias") or [])
    for name in ("stop", "stop_token_ids"):
        settings[name] = tuple(given.get(name) or ())
    return SamplingParams(**settings)
