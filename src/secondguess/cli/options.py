"""The options that several verbs share, each described once."""

from __future__ import annotations

from typing import Annotated

from typer import Option

TEAM = "Who takes part"
SAMPLING = "Sampling"
OUTPUT = "Input and output"

Model = Annotated[
    str, Option(help="Target: a directory, a cached model's name, or builtin.", rich_help_panel=TEAM)
]
Drafter = Annotated[
    str | None,
    Option(
        help="none, model:PATH, ngram, suffix, each with ,key=value options.",
        show_default="builtin-draft for builtin, else suffix",
        rich_help_panel=TEAM,
    ),
]
Verifier = Annotated[str, Option(help="auto, greedy, rejection, block or coupled.", rich_help_panel=TEAM)]
Controller = Annotated[
    str | None,
    Option(
        help="How far to draft: fixed:K or confidence:K[,threshold=T].",
        show_default="what suits the drafter",
        rich_help_panel=TEAM,
    ),
]
Dtype = Annotated[str, Option(help="auto, float64, float32, bfloat16 or float16.", rich_help_panel=TEAM)]
Device = Annotated[str, Option(help="auto, cpu or cuda[:N].", rich_help_panel=TEAM)]
Quantize = Annotated[
    str | None, Option(help="int8: store the target's weights in 8 bits.", rich_help_panel=TEAM)
]
DrafterQuantize = Annotated[
    str | None, Option(help="int8: store the draft model's weights in 8 bits.", rich_help_panel=TEAM)
]
Runtime = Annotated[
    str, Option(help="What runs the target: auto, native, fused or transformers.", rich_help_panel=TEAM)
]

MaxTokens = Annotated[int, Option(help="Most tokens to generate.", rich_help_panel=SAMPLING)]
MinTokens = Annotated[int, Option(help="No end before this many tokens.", rich_help_panel=SAMPLING)]
Temperature = Annotated[float, Option(help="0 is greedy, 1 the model's own law.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, Option(help="Keep the K most probable tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
TopP = Annotated[
    float, Option(help="Keep the smallest set with this mass; 1 keeps all.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float, Option(help="Keep tokens with this share of the top one's probability.", rich_help_panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float, Option(help="Above 1: avoid tokens of prompt and output.", rich_help_panel=SAMPLING)
]
FrequencyPenalty = Annotated[
    float, Option(help="Subtracted once per occurrence in the output.", rich_help_panel=SAMPLING)
]
PresencePenalty = Annotated[
    float, Option(help="Subtracted from tokens that occur in the output.", rich_help_panel=SAMPLING)
]
LogitBias = Annotated[
    list[str] | None,
    Option(
        metavar="TOKEN=VALUE",
        help="Add to a token id's logit; -inf bans it; repeatable.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None, Option(help="End before this string; repeatable.", rich_help_panel=SAMPLING)
]
StopTokenId = Annotated[
    list[int] | None, Option(help="End at this token id; repeatable.", rich_help_panel=SAMPLING)
]
Seed = Annotated[
    int | None,
    Option(
        help="Reproducible text; with verifier auto or coupled the same with any drafter (see the README on precision).",
        show_default="fresh each time",
        rich_help_panel=SAMPLING,
    ),
]
Logprobs = Annotated[
    int | None,
    Option(
        help="With --json: each token's log-probability and this many alternatives.", rich_help_panel=SAMPLING
    ),
]

Json = Annotated[bool, Option("--json", help="For machines: JSON and nothing else.", rich_help_panel=OUTPUT)]
