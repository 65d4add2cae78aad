"""Options for `SamplingParams`."""

from __future__ import annotations

from pathlib import Path

from typer import Context

from secondguess.cli.option_groups import Group, options_of, panel
from secondguess.cli.prompts import read_logit_bias, read_text
from secondguess.errors import BadInputError
from secondguess.params import Grammar, SamplingParams

sampling_option = panel("Sampling")


def read_params(context: Context) -> SamplingParams:
    """Return the sampling settings among the options of a command."""
    given = context.params
    settings = {name: given[name] for name in SamplingParams.__dataclass_fields__ if name in given}
    settings["grammar"] = _grammar(given.get("json_schema"), given.get("regex"))
    if given.get("prediction") is not None:
        settings["prediction"] = read_text(given["prediction"])
    settings["logit_bias"] = read_logit_bias(given.get("logit_bias") or [])
    for name in ("stop", "stop_token_ids"):
        settings[name] = tuple(given.get(name) or ())
    return SamplingParams(**settings)


def _grammar(json_schema: Path | None, regex: str | None) -> Grammar | None:
    if json_schema is not None and regex is not None:
        raise BadInputError("expected one grammar, got --json-schema and --regex; give one of them")
    if regex is not None:
        return Grammar.regex(regex)
    return None if json_schema is None else Grammar.json_schema(read_text(json_schema))


OPTIONS = {
    "max_tokens": sampling_option("Maximum number of tokens to generate."),
    "min_tokens": sampling_option("Minimum number of tokens to generate."),
    "temperature": sampling_option("0 is greedy, 1 the model's own distribution."),
    "top_k": sampling_option("Keep the K most probable tokens; 0 keeps all."),
    "top_p": sampling_option("Keep the most probable tokens, up to this total probability; 1 keeps all."),
    "min_p": sampling_option(
        "Keep tokens with at least this share of the top token's probability; 0 keeps all."
    ),
    "repetition_penalty": sampling_option("Above 1: avoid tokens of prompt and output."),
    "frequency_penalty": sampling_option("Subtracted once per occurrence in the output."),
    "presence_penalty": sampling_option("Subtracted from tokens that occur in the output."),
    "logit_bias": sampling_option(
        "Add to a token id's logit; -inf bans it; repeatable.", metavar="TOKEN=VALUE"
    ),
    "stop": sampling_option(
        "End before this string, taken as it is (a line break in bash: $'\\n'); repeatable."
    ),
    "include_stop_str_in_output": sampling_option("Leave the stop string in the text.", "--include-stop"),
    "stop_token_ids": sampling_option("End at this token id; repeatable.", "--stop-token-id"),
    "ignore_eos": sampling_option("Go on after the model's end tokens.", "--ignore-eos"),
    "n": sampling_option("Samples per prompt.", "--n"),
    "seed": sampling_option(
        "Reproducible text; with verifier auto or coupled the same with any drafter (docs/runtimes.md, Identical text).",
        show_default="fresh each time",
    ),
    "logprobs": sampling_option("With --json: each token's log-probability and this many alternatives."),
    "prompt_logprobs": sampling_option("With --json: the same for the tokens of the prompt."),
    "json_schema": sampling_option("The text must be JSON that this JSON schema describes.", metavar="FILE"),
    "regex": sampling_option("The text must match this regular expression."),
    "prediction": sampling_option(
        "Expected output, such as the file before an edit, to draft from.", metavar="FILE"
    ),
    "draft_length": sampling_option(
        "Draft this many tokens before each target pass, in place of the controller's choice; 0 is plain decoding.",
        show_default="the controller decides",
    ),
    "max_draft_length": sampling_option(
        "Draft at most this many tokens before each target pass.", show_default="no limit"
    ),
    "draft_with": sampling_option(
        "Draft only with these parts of the drafter, such as suffix of suffix+model:PATH; ngram and none are always valid.",
        show_default="all of them",
    ),
    "history": sampling_option(
        "With --share-history: draft from other outputs, and let other prompts draft from these.",
        "--history/--no-history",
    ),
}
TYPES = {"logit_bias": list[str], "json_schema": Path, "regex": str, "prediction": Path}
"""Options whose value is read into the setting; `json_schema` and `regex` are kinds of `grammar`."""

SAMPLING = Group(options_of(SamplingParams, OPTIONS, TYPES), read_params)
