"""Prompts by kind: code, chat, prose, structured replies and long texts, as token ids of a model.

`code` continues HumanEval; `chat` and `prose` are questions of Spec-Bench; `json` and `tools` have replies that follow a
grammar; `documents:N` and `sources:N` continue the first N tokens of this repository's pages or modules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from secondguess.api import encode
from secondguess.bench.encoding import truncate_left
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.errors import BadInputError
from secondguess.params import Grammar
from secondguess.workloads.loading import DATA_SETS, DATA_VARIABLE, evenly_spaced, load_workload

ROOT = Path(__file__).resolve().parents[1]
CATEGORIES = {
    "chat": ("reasoning", "math", "coding", "extraction", "stem", "qa"),
    "prose": ("writing", "roleplay", "humanities"),
}
"""Categories of Spec-Bench by kind."""
LONG = {"documents": "docs/*.md", "sources": "src/secondguess/**/*.py"}
"""Files that long prompts are made of."""
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "occupation": {"type": "string", "maxLength": 60},
        "born": {"type": "integer"},
        "works": {
            "type": "array",
            "items": {"type": "string", "maxLength": 60},
            "minItems": 2,
            "maxItems": 4,
        },
    },
    "required": ["name", "occupation", "born", "works"],
    "additionalProperties": False,
}
PEOPLE = (
    "Marie Curie", "Johann Sebastian Bach", "Ada Lovelace", "Leonardo da Vinci", "Jane Austen", "Albert Einstein",
    "Frida Kahlo", "Isaac Newton",
)  # fmt: skip
PLACES = ("Ljubljana", "Nairobi", "Osaka", "Lima", "Oslo", "Cairo", "Toronto", "Hanoi")
ARGUMENTS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 40},
        "days": {"type": "integer"},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather_forecast", "description": "Return a forecast.", "parameters": ARGUMENTS},
}
CALL = {
    "type": "object",
    "properties": {"name": {"const": "weather_forecast"}, "arguments": ARGUMENTS},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
GRAMMARS = {"json": Grammar.json_schema(PERSON), "tools": Grammar.json_schema(CALL)}
"""Grammars of the replies, by kind."""


def texts(kind: str, num_prompts: int) -> list[str]:
    """Return evenly spaced prompts of a kind."""
    if kind == "json":
        return [f"Describe {name} as JSON with the keys {', '.join(PERSON['required'])}." for name in PEOPLE][
            :num_prompts
        ]
    if kind == "tools":
        return [f"What will the weather be in {place} over the next five days?" for place in PLACES][
            :num_prompts
        ]
    name, _, length = kind.partition(":")
    if name in LONG and length:
        found = [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(LONG[name]))]
        starts = evenly_spaced(range(len(found)), num_prompts)
        return ["\n".join((*found[start:], *found[:start])) for start in starts]
    if kind == "code":
        return list(load_workload("humaneval", num_prompts).prompts)
    path = DATA_SETS["spec-bench"].path
    if kind not in CATEGORIES or path is None:
        raise BadInputError(
            f"expected code, {', '.join((*CATEGORIES, *GRAMMARS))}, documents:TOKENS or sources:TOKENS as prompts, and "
            f"Spec-Bench in the folder {DATA_VARIABLE}, got {kind!r}; give one of these and set the variable"
        )
    categories = CATEGORIES[kind]
    return list(load_workload(str(path), max(num_prompts, len(categories)), categories).prompts)[:num_prompts]


def prompts(target: LoadedModel, kind: str, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Return the token ids of prompts of a kind that leave room for new tokens.

    Requests are conversations where the model has a chat template.
    """
    room = target.runtime.context_length - num_tokens
    first = getattr(target.tokenizer, "bos_token_id", None)
    length = int(kind.partition(":")[2] or room)
    if length > room:
        raise BadInputError(
            f"expected a prompt of at most {room} tokens, the context less {num_tokens} new ones, got {kind}; ask for fewer"
        )
    found = []
    for text in texts(kind, num_prompts):
        if ":" in kind:
            found.append(encode(target, text[: 8 * length])[:length])
        else:
            found.append(truncate_left(_encode_request(target, kind, text), room, first))
    return found


def _encode_request(target: LoadedModel, kind: str, text: str) -> list[int]:
    if kind == "code" or not target.tokenizer.chat_template:
        return encode(target, text)
    options: Mapping[str, Any] = {"tools": [json.loads(json.dumps(TOOL))]} if kind == "tools" else {}
    ids: list[int] = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False, **options
    )
    return ids
