"""Objects of replies: completions, chats, chunks, log-probabilities and usage."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from secondguess.core import TokenLogprob
from secondguess.engine import Output
from secondguess.sampling.text import REPLACEMENT, Piece, text_of_tokens
from secondguess.server.calls.parsers import Delta
from secondguess.server.jobs import FINISH_REASONS, Job
from secondguess.server.metrics import speculative_decoding
from secondguess.server.schemas import Sampling

Json = dict[str, Any]

LOWEST_LOGPROB = -9999.0
"""Value that OpenAI's API gives in place of minus infinity, which JSON lacks."""


def finish_reason(output: Output, has_tool_calls: bool = False) -> str | None:
    """Return OpenAI's finish reason; a full context is `length`. None if generation was cut."""
    reason = FINISH_REASONS.get(str(output.finish_reason))
    return "tool_calls" if has_tool_calls and reason == "stop" else reason


@dataclass(frozen=True)
class Head:
    """Fields that a reply and all its chunks share."""

    object_name: str
    model: str
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    token: str = field(default_factory=lambda: secrets.token_hex(12))

    def reply(self, choices: Sequence[Json], **more: Any) -> Json:
        """Return a reply or a chunk with these choices."""
        return {
            "id": f"{self.prefix}-{self.token}",
            "object": self.object_name,
            "created": self.created,
            "model": self.model,
            "choices": list(choices),
            **more,
        }


def usage(job: Job) -> Json:
    """Return the usage of a request.

    The prediction tokens are those of the request's `prediction`, never the drafter's.
    """
    outputs, num_prompt = job.outputs, sum(map(len, job.token_ids))
    num_output = sum(len(output.token_ids) for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": _num_cached(job)},
        "completion_tokens_details": {
            "reasoning_tokens": job.num_reasoning_tokens,
            "accepted_prediction_tokens": sum(output.stats.accepted_prediction_tokens for output in outputs),
            "rejected_prediction_tokens": sum(output.stats.rejected_prediction_tokens for output in outputs),
        },
    }


def _num_cached(job: Job) -> int:
    """Return the number of prompt tokens that were in the cache: once per prompt, not for each of its samples."""
    return sum(output.stats.num_reused for output in job.outputs[:: job.params.n])


def requested_statistics(request: Sampling, job: Job) -> Json:
    """Return the fields that `report` and `timings_per_token` add to a reply."""
    found = report(job.outputs) if request.report else {}
    return found | {"timings": timings(job)} if request.timings_per_token else found


def report(outputs: Sequence[Output]) -> Json:
    """Return the fields that `report: true` adds; vLLM's `metrics` are null for several samples."""
    statistics = [
        {
            "index": index,
            "finish_reason": output.finish_reason,
            "exactness": output.exactness,
            **output.stats.as_dict(),
        }
        for index, output in enumerate(outputs)
    ]
    single = speculative_decoding(outputs[0].stats) if len(outputs) == 1 else None
    return {"metrics": {"speculative_decoding": single}, "secondguess": {"samples": statistics}}


def timings(job: Job) -> Json:
    """Return times in milliseconds and per token, as llama.cpp's server reports them, summed over outputs."""
    stats, num_cached = [output.stats for output in job.outputs], _num_cached(job)
    prefill = sum(sample.seconds["prefill"] for sample in stats)
    spent = {
        "prompt": (sum(map(len, job.token_ids)) - num_cached, prefill),
        "predicted": (
            sum(len(output.token_ids) for output in job.outputs),
            sum(sum(sample.seconds.values()) for sample in stats) - prefill,
        ),
    }
    found: Json = {"cache_n": num_cached}
    for name, (number, seconds) in spent.items():
        found |= {
            f"{name}_n": number,
            f"{name}_ms": 1000 * seconds,
            f"{name}_per_token_ms": 1000 * seconds / max(1, number),
            f"{name}_per_second": number / seconds if seconds else 0.0,
        }
    num_drafted, num_accepted = (
        sum(getattr(sample, name) for sample in stats) for name in ("num_drafted", "num_accepted")
    )
    return found | {"draft_n": num_drafted, "draft_n_accepted": num_accepted}


def origin(piece: Piece, tokenizer: Any) -> Json:
    """Return the fields that `report: true` adds to a choice of a chunk: its text by origin, rejected drafts."""
    rejected = text_of_tokens(tokenizer, piece.rejected) if piece.rejected else ""
    segments = [[text, drafted] for text, drafted in piece.segments]
    return {"secondguess": {"segments": segments, "rejected": rejected}}


def message(deltas: Sequence[Delta]) -> Json:
    """Return the message of a chat reply from all additions to it."""
    texts = {
        name: "".join(delta.text for delta in deltas if delta.field == name)
        for name in ("content", "reasoning")
    }
    calls = []
    for delta in deltas:
        if delta.field == "tool_call":
            calls.append(_tool_call(delta))
        elif delta.field == "arguments":
            calls[-1]["function"]["arguments"] += delta.text
    found: Json = {
        "role": "assistant",
        "content": None if calls and not texts["content"] else texts["content"],
        "refusal": None,
    }
    if texts["reasoning"]:
        found["reasoning_content"] = texts["reasoning"]
    if calls:
        found["tool_calls"] = calls
    return found


def delta_fields(delta: Delta, call_index: int) -> Json:
    """Return the `delta` of a chunk of a chat reply; `call_index` is the number of calls before."""
    if delta.field == "arguments":
        return {"tool_calls": [{"index": call_index - 1, "function": {"arguments": delta.text}}]}
    if delta.field == "tool_call":
        return {"tool_calls": [{"index": call_index, **_tool_call(delta)}]}
    return {"content" if delta.field == "content" else "reasoning_content": delta.text}


def _tool_call(delta: Delta) -> Json:
    return {
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.text},
    }


def chat_logprobs(logprobs: Sequence[TokenLogprob]) -> Json:
    """Return log-probabilities in the form of chats."""
    return {"content": [chat_logprob(logprob) for logprob in logprobs], "refusal": None}


def chat_logprob(logprob: TokenLogprob) -> Json:
    """Return the log-probability of one token, with its alternatives."""
    alternatives = [
        _token_logprob(logprob.alternative_texts.get(token, ""), value)
        for token, value in logprob.alternatives.items()
    ]
    return {**_token_logprob(logprob.text, logprob.logprob), "top_logprobs": alternatives}


def _token_logprob(text: str, logprob: float) -> Json:
    # The bytes of a token that is part of a character are not known from its text.
    raw = None if REPLACEMENT in text else list(text.encode("utf-8", "surrogatepass"))
    return {"token": text, "logprob": _finite(logprob), "bytes": raw}


def completion_logprobs(logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    """Return log-probabilities in the form of completions; `offset` characters precede the first token."""
    offsets = []
    for logprob in logprobs:
        offsets.append(offset)
        offset += len(logprob.text)
    return {
        "tokens": [logprob.text for logprob in logprobs],
        "token_logprobs": [_finite(logprob.logprob) for logprob in logprobs],
        "top_logprobs": [_by_text(logprob) for logprob in logprobs],
        "text_offset": offsets,
    }


def echoed_logprobs(first: str, logprobs: Sequence[TokenLogprob]) -> Json:
    """Return log-probabilities in the form of completions, after a first token that has none."""
    rest = completion_logprobs(logprobs, len(first))
    firsts = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [value, *rest[name]] for name, value in firsts.items()}


def logprobs_by_token(logprob: TokenLogprob) -> Json:
    """Return the log-probabilities of a token and its alternatives by token id, as vLLM's `prompt_logprobs`."""
    values = {**logprob.alternatives, logprob.token: logprob.logprob}
    texts = {**logprob.alternative_texts, logprob.token: logprob.text}
    return {
        str(token): {"logprob": _finite(value), "decoded_token": texts[token]}
        for token, value in values.items()
    }


def _by_text(logprob: TokenLogprob) -> Mapping[str, float]:
    """Return alternatives by text; of tokens with the same text, the most probable."""
    found: dict[str, float] = {}
    for token, value in logprob.alternatives.items():
        found.setdefault(logprob.alternative_texts.get(token, ""), _finite(value))
    return found


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST_LOGPROB
