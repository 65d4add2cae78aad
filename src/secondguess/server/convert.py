"""Requests of the API as requests of the engine: sampling settings and token ids."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, TypeVar

from pydantic import BaseModel

from secondguess.prompts import encode
from secondguess.sampling import Grammar, SamplingParams
from secondguess.sampling.text import num_incomplete
from secondguess.server.calls.parsers import (
    ForcedCallParser,
    PlainParser,
    ReplyParser,
    TemplateParser,
)
from secondguess.server.conversations import ChatTemplate, Conversation, text_of, to_conversation
from secondguess.server.errors import check_limit, refused
from secondguess.server.images import ImageReader
from secondguess.server.infill_prompts import encode_infill, end_tokens
from secondguess.server.jobs import Job
from secondguess.server.schemas import (
    ChatRequest,
    CompletionRequest,
    InfillRequest,
    Sampling,
    SpeculationOptions,
)
from secondguess.server.served_model import ServedModel, recommended_sampling
from secondguess.server.settings import ServerSettings
from secondguess.server.structure import forces_call, grammar_of_chat, grammar_of_outputs

logger = logging.getLogger(__name__)
OPENAI_SAMPLING: dict[str, float] = {"temperature": 1.0, "top_p": 1.0}
"""Sampling settings of a request to OpenAI's API that has none."""
RequestType = TypeVar("RequestType", bound=BaseModel)


class Converter:
    """Conversion of requests for one model. Slow (tokenization): call it off the event loop."""

    def __init__(self, target: ServedModel, settings: ServerSettings, template: ChatTemplate) -> None:
        self._target = target
        self._settings = settings
        self._template = template
        self._has_warned = False
        self.defaults = OPENAI_SAMPLING | (
            recommended_sampling(target.checkpoint.source) if settings.generation_config else {}
        )

    @cached_property
    def _special_tokens(self) -> dict[str, int]:
        """Ids of special tokens by their texts; outputs lack these texts, so that a stop string which is one needs the id."""
        added = self._target.tokenizer.added_tokens_decoder
        known = self._target.num_input_tokens
        return {token.content: index for index, token in added.items() if token.special and index < known}

    def with_defaults(self, request: RequestType) -> RequestType:
        """Return a request whose sampling settings that are left out have the server's defaults."""
        missing = {
            name: value
            for name, value in self.defaults.items()
            if name in type(request).model_fields and getattr(request, name) is None
        }
        return request.model_copy(update=missing)

    def completion(self, request: CompletionRequest) -> Job:
        """Return the job of a completion request."""
        if request.best_of is not None and request.best_of != (request.n or 1):
            raise refused(
                "best_of",
                f"expected best_of to equal n, got {request.best_of}; leave it out and rank n samples",
            )
        if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
            request = request.model_copy(update={"prompt_logprobs": request.logprobs})
        if request.prompt_logprobs is not None and (request.n or 1) > 1:
            raise refused(
                "n",
                f"expected n of 1 together with log-probabilities of the prompt, got {request.n}; send them once",
            )
        if request.prompt_logprobs is not None and request.stream:
            name = "echo" if request.echo else "prompt_logprobs"
            raise refused(
                name, f"expected no stream of the log-probabilities of a prompt ({name}); leave one out"
            )
        if request.echo and request.suffix is not None:
            raise refused("echo", "expected no echo together with suffix; leave one out")
        texts = _prompts(request.prompt)
        self._check_samples(len(texts), request)
        prompts = [self._encode(text, request.suffix) for text in texts]
        grammar = grammar_of_outputs(request, self._settings.max_schema_bytes)
        params = self._params(request, prompts, request.max_tokens, "max_tokens", request.logprobs, grammar)
        if request.suffix is not None and not request.ignore_eos:
            params = self._ended_by_files(params)
        echo = [self._text(text) for text in texts] if request.echo else []
        return Job(prompts, params, echo=echo)

    def infill(self, request: InfillRequest) -> Job:
        """Return the job of a request of `/infill`."""
        files = [(file.filename, file.text) for file in request.input_extra or ()]
        prefix = request.input_prefix + request.prompt
        for text in (prefix, request.input_suffix, *(text for _, text in files)):
            self._target.check_characters(text)
        reserved = self._target.context_length // 4 if request.n_predict is None else request.n_predict
        prompts = [encode_infill(self._target, prefix, request.input_suffix, files, reserved)]
        grammar = grammar_of_outputs(request, self._settings.max_schema_bytes)
        params = self._params(request, prompts, request.n_predict, "n_predict", None, grammar)
        return Job(prompts, params if request.ignore_eos else self._ended_by_files(params))

    def _ended_by_files(self, params: SamplingParams) -> SamplingParams:
        """Return settings with which a middle ends where another file would begin."""
        ends = {*params.stop_token_ids, *end_tokens(self._target)}
        return replace(params, stop_token_ids=tuple(sorted(ends)))

    def chat(self, request: ChatRequest) -> Job:
        """Return the job of a chat request."""
        self._check_tools(request)
        grammar = grammar_of_chat(request, self._settings.max_schema_bytes)
        if request.top_logprobs and not request.logprobs:
            raise refused("top_logprobs", "expected logprobs: true together with top_logprobs; add it")
        limits = {request.max_tokens, request.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise refused(
                "max_tokens",
                "expected one of max_tokens and max_completion_tokens, got different values; leave one out",
            )
        self._check_samples(1, request)
        conversation = to_conversation(request, ImageReader(self._target, self._settings))
        prompt = self._template.encode(conversation)
        prompts = [prompt.ids]
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        limit = next(iter(limits), None)
        params = self._params(request, prompts, limit, "max_completion_tokens", logprobs, grammar)
        return Job(
            prompts,
            params,
            images=prompt.images,
            make_parser=partial(self._parser, request, conversation, prompt.ids, params),
        )

    def _parser(
        self, request: ChatRequest, conversation: Conversation, prompt: list[int], params: SamplingParams
    ) -> ReplyParser:
        """Return a parser for one sample of a chat."""
        if forces_call(request):
            return ForcedCallParser()
        template = self._template.response_template
        if template is None:
            return PlainParser()
        if not conversation.tools or params.grammar is not None:  # text that looks like a call is none
            fields = {name: field for name, field in template["fields"].items() if name != "tool_calls"}
            template = {**template, "fields": fields}
        return TemplateParser(
            self._target.tokenizer,
            template,
            prompt,
            conversation.tools,
            params.stop,
            params.include_stop_str_in_output,
            single_call=request.parallel_tool_calls is False,
        )

    def _check_tools(self, request: ChatRequest) -> None:
        """Refuse tools without effect; warn once of those whose calls are not recognised."""
        if request.tool_choice is not None and not request.tools:
            raise refused("tool_choice", "expected tools together with tool_choice; add them or leave it out")
        is_free = request.tool_choice in (None, "auto")
        if request.tools and is_free and self._template.response_template is None and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "tool calls in replies of %s are left in their content: neither its tokenizer nor its chat template has a "
                "known format of calls; tool_choice required, or a function, works all the same",
                self._target.name,
            )
        size = sum(len(tool.model_dump_json()) for tool in request.tools or ())
        check_limit("tools", size, self._settings.max_schema_bytes, "bytes of tools")

    def _check_samples(self, num_prompts: int, request: Sampling) -> None:
        count = num_prompts * max(1, request.n or 1)
        check_limit("n", count, self._settings.max_samples, "samples (prompts times n)")

    def _params(
        self,
        request: Sampling,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        limit_name: str,
        logprobs: int | None,
        grammar: Grammar | None,
    ) -> SamplingParams:
        """Return the sampling settings of a request."""
        request = self.with_defaults(request)
        settings: dict[str, Any] = {
            name: value
            for name in SamplingParams.__dataclass_fields__
            if (value := getattr(request, name, None)) is not None
        }
        if request.stream_options is not None and not request.stream:
            raise refused("stream_options", "expected stream: true together with stream_options; add it")
        if request.top_k == -1:  # none, for vLLM
            settings["top_k"] = 0
        if request.top_p == 0:  # the most probable token alone
            settings |= {"top_k": 1, "top_p": 1.0}
        if request.seed is not None and request.seed < 0:  # -1 is none, for llama.cpp
            settings["seed"] = None if request.seed == -1 else request.seed % 2**63
        stop = [request.stop] if isinstance(request.stop, str) else request.stop or []
        stop = [text for text in stop if text]
        stop_token_ids = request.stop_token_ids or []
        for name, values in (("stop", stop), ("stop_token_ids", stop_token_ids)):
            check_limit(name, len(values), self._settings.max_stop_strings, f"entries of {name}")
        settings |= {
            "stop": tuple(stop),
            "stop_token_ids": (
                *stop_token_ids,
                *(self._special_tokens[text] for text in stop if text in self._special_tokens),
            ),
            "logit_bias": self._logit_bias(request),
            "max_tokens": self._max_tokens(prompts, max_tokens, limit_name),
            "logprobs": logprobs,
            "grammar": grammar,
            **_speculation(request),
        }
        if request.prediction is not None:
            settings["prediction"] = text_of(request.prediction.content)[: self._target.max_characters]
        return SamplingParams(**settings)

    def _max_tokens(self, prompts: Sequence[list[int]], wanted: int | None, name: str) -> int:
        """Return the largest number of output tokens; by default, what fits into the context."""
        context, limit = self._target.context_length, self._settings.max_output_tokens
        longest = max(map(len, prompts))
        if longest + (wanted != 0) > context:
            raise self._target.too_long(str(longest))
        if wanted is None:
            return min(context - min(map(len, prompts)), limit or context)
        check_limit(name, wanted, limit or wanted, f"output tokens ({name})")
        if self._target.is_limited_by_memory and longest + wanted > context:
            raise refused(
                name,
                f"expected {name} of at most {context - longest} after a prompt of {longest} tokens "
                f"({self._target.limit} {context}), got {wanted}; lower it or shorten the prompt",
                "invalid_value",
            )
        return wanted

    def _logit_bias(self, request: Sampling) -> dict[int, float]:
        bias = request.logit_bias or {}
        check_limit("logit_bias", len(bias), self._settings.max_logit_biases, "entries of logit_bias")
        for token in bias:
            if not (token.isascii() and token.isdecimal() and len(token) <= 9):
                raise refused(
                    "logit_bias",
                    f"expected token ids as keys of logit_bias, got {token!r:.60}",
                    "invalid_value",
                )
        return {int(token): value for token, value in bias.items()}

    def _encode(self, prompt: str | list[int], suffix: str | None) -> list[int]:
        for text in (prompt, suffix):
            if isinstance(text, str):
                self._target.check_characters(text)
        if suffix is None:
            return encode(self._target, prompt)
        if not isinstance(prompt, str):
            raise refused(
                "suffix", "expected a prompt as text together with suffix, got token ids; send the text"
            )
        return encode(self._target, encode_infill(self._target, prompt, suffix))

    def _text(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        text: str = self._target.tokenizer.decode(prompt, skip_special_tokens=True)
        return text[: len(text) - num_incomplete(text)]  # the output has the rest of a character


def _prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """Return the prompts of a completion request, which may be one or several."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise refused("prompt", "expected at least one prompt, got an empty list; add one", "invalid_value")
    return list(prompt)  # type: ignore[arg-type]


def _speculation(request: Sampling) -> dict[str, int | str | bool | None]:
    if isinstance(request.speculation, SpeculationOptions):
        options = request.speculation
        return {
            "draft_length": options.draft_length,
            "max_draft_length": options.max_draft,
            "draft_with": options.drafter,
            "history": options.history is not False,
        }
    return {"draft_length": 0 if request.speculation == "off" else None}
