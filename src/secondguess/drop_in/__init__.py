"""Drop-in for Transformers users: `model.generate(..., custom_generate=custom_generate)`.

Transformers prepares prompts and settings as usual and passes them to this function instead of its
own decoding loop. Every setting is supported or refused by name; none is ignored (`arguments.py`,
`processors.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from secondguess.api import check_verifier, make_row, require_texts
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.checkpoint.loader import wrap_model
from secondguess.core import Row
from secondguess.decode import Components, decode
from secondguess.drafters.base import Drafter
from secondguess.drafters.spec import DrafterSpec, make_drafter
from secondguess.drop_in.arguments import (
    arguments_of_generate,
    check_adapters,
    check_arguments,
    check_generation_config,
    prompt_mask,
    take_images,
)
from secondguess.drop_in.kept import loaded_draft_model, locked_state, vocabularies
from secondguess.drop_in.output import StopStringWatcher, StreamedRows, padded_output, padding_token
from secondguess.drop_in.processors import StoppingConditions, read_logits_processors, read_stopping_criteria
from secondguess.errors import BadInputError
from secondguess.names import AUTO
from secondguess.pairing import LOOKUP_DRAFTER
from secondguess.prompts import EncodedPrompt, encode_with_images
from secondguess.runtime.modules.support import check_config
from secondguess.runtime.system.machine import autocast_dtype
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    *,
    drafter: str | None = None,
    verifier: str = "auto",
    controller: str | None = None,
    seed: int | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    streamer: Any = None,
    **model_kwargs: Any,
) -> Any:
    """Generate with speculative decoding through `model.generate(custom_generate=...)`.

    Sampled text is reproducible with `torch.manual_seed`: without `seed`, each prompt gets a seed
    from torch's global generator. The text differs from that of Transformers but has the same
    distribution. Seeded rows use coupled verification (see `docs/verifiers.md`), because the
    default controller chooses draft lengths from measured times and the text must not depend on
    the drafts. With a `verifier` other than `auto` or `coupled`, a text is reproducible only with
    a controller that always drafts the same lengths, such as `fixed:4`.

    Calls from several threads are queued, because they may share a model or a draft model.

    Args:
        model: the user's model; restored to its original state afterwards.
        input_ids: `[row, position]`, left-padded where rows differ in length.
        logits_processor: the objects that Transformers made from the settings, and the user's own.
            Those with an equivalent setting are applied with their values; others are refused.
        stopping_criteria: likewise.
        generation_config: the `GenerationConfig`; unsupported fields that are set are refused.
        drafter: name as for `secondguess.load`. The default is `suffix+self:int4` for a model on a CPU that is not in
            training mode, if memory holds its copy, else `suffix`, as under `torch.autocast`. A draft model and a copy
            are kept for later calls. A drafter head trained for the model is loaded again by
            every call, since it is attached to a model that is borrowed for one call only.
        verifier: name as for `secondguess.load`.
        controller: name as for `secondguess.load`. Its state for this model and drafter is kept for later calls.
        seed: makes sampled text reproducible and, with the default verifier, independent of the
            drafter. The text of a prompt does not depend on the other prompts of the batch;
            samples of one prompt (`num_return_sequences`) differ.
        stop_strings: as for `generate`: a row ends with the token that completes one of the strings.
        tokenizer: as for `generate`; needed for `stop_strings`.
        streamer: as for `generate`: receives each token once it is final.
        model_kwargs: `attention_mask` `[row, position]`, 0 at padding, and the inputs that
            Transformers always adds.

    Returns:
        `[row, position]` prompts and new tokens, padded on the right as Transformers does; with
        `return_dict_in_generate`, a `GenerateDecoderOnlyOutput` with `sequences` as its only
        field.

    Raises:
        BadInputError: a setting or an input is not supported exactly; the message names it.
        UnsupportedModelError: a model that cannot be decoded speculatively.
    """
    check_config(model.config, type(model).__name__)  # before arguments, as an encoder-decoder has others
    check_adapters(model)
    arguments = arguments_of_generate(model)
    check_arguments(arguments)
    tokenizer = arguments.get("tokenizer") if tokenizer is None else tokenizer
    streamer = arguments.get("streamer") if streamer is None else streamer
    check_generation_config(generation_config)
    images = take_images(model.config, input_ids, model_kwargs, arguments.get("position_ids"))
    mask = prompt_mask(model.config, input_ids, model_kwargs)
    ending = read_stopping_criteria(stopping_criteria)
    if stop_strings is not None:
        ending = _with_stop_strings(ending, stop_strings, tokenizer)
    padding = padding_token(generation_config, ending, len(input_ids))
    params = _sampling_params(logits_processor, mask, ending, bool(generation_config.do_sample), seed)
    num_samples = generation_config.num_return_sequences or 1
    drafter = None if drafter == AUTO else drafter
    named = {"drafter": drafter, "controller": controller}
    require_texts(verifier=verifier, **{name: text for name, text in named.items() if text is not None})
    chosen_verifier = make_verifier(verifier)
    is_training = model.training  # `wrap_model` puts the model into evaluation mode
    is_cast = autocast_dtype(model.device) is not None  # and ends autocast
    with locked_state(model, drafter) as state, wrap_model(model) as target:
        state.update_weights(model)
        if drafter is None:
            drafter = LOOKUP_DRAFTER if is_training or is_cast else state.default_drafter(model)
        elif is_cast and DrafterSpec.parse(drafter).target_copies:
            raise BadInputError(
                f"cannot draft with {drafter!r} under torch.autocast: it copies the model. Use suffix or model:PATH, or "
                "generate outside of autocast."
            )
        _check_context_length(target, input_ids.shape[1] + params.max_tokens)
        prompts = [
            encode_with_images(target, EncodedPrompt(ids[kept].tolist(), images))[0]
            for ids, kept in zip(input_ids, mask, strict=True)
        ]
        settings = _seeded(params, len(prompts), num_samples)
        rows = [
            make_row(target, chosen_verifier, prompt, row_params, sample=index % num_samples)
            for index, (prompt, row_params) in enumerate(zip(prompts, settings, strict=True))
        ]
        for row in rows:
            row.images = images
        _end_as_in_transformers(rows, ending, input_ids)
        chosen_drafter = _make_drafter(target, drafter)
        state.keep_copies(model, drafter)
        check_verifier(chosen_verifier, chosen_drafter)
        chosen_controller = state.controller(controller, chosen_drafter)
        components = Components(target.runtime, chosen_drafter, chosen_verifier, chosen_controller)
        _decode(components, rows, streamer, padding)
    sequences = padded_output(input_ids, rows, padding)
    if generation_config.return_dict_in_generate:
        return GenerateDecoderOnlyOutput(sequences=sequences)
    return sequences


def _end_as_in_transformers(rows: Sequence[Row], ending: StoppingConditions, input_ids: Tensor) -> None:
    """Give rows the end tokens and stop strings of the call."""
    for row, ids in zip(rows, input_ids, strict=True):
        row.end_tokens = ending.end_tokens
        if ending.stop_strings:
            row.stop_checker = StopStringWatcher(ending.stop_strings, ids.tolist())


def _make_drafter(target: LoadedModel, name: str) -> Drafter:
    """Return the drafter of this name."""
    return make_drafter(
        name,
        target_vocab_size=target.runtime.vocab_size,
        load_draft_model=lambda path: loaded_draft_model(path, target.dtype, target.device).runtime,
        pair_vocabularies=lambda name: vocabularies(target.path, str(name)),
        target=target,
    )


def _decode(components: Components, rows: Sequence[Row], streamer: Any, padding: int) -> None:
    """Decode all rows, streaming new tokens only: `generate` has already streamed the prompt."""
    streamed = None if streamer is None else StreamedRows(streamer, rows, padding)
    with closing(decode(components, rows)) as rounds:
        for _ in rounds:
            if streamed is not None:
                streamed.stream_ready_steps()
    if streamer is not None:
        streamer.end()


def _with_stop_strings(
    ending: StoppingConditions, strings: str | Sequence[str], tokenizer: Any
) -> StoppingConditions:
    strings = [strings] if isinstance(strings, str) else strings
    if not isinstance(strings, Sequence) or not all(isinstance(text, str) and text for text in strings):
        raise BadInputError(
            f"expected stop_strings to be strings of at least one character, got {strings!r}; "
            'give a string or a list of strings, such as ["\\n\\n"]'
        )
    if not strings:
        return ending
    if tokenizer is None:
        raise BadInputError(
            f"expected a tokenizer for stop_strings {strings!r}, got none; give tokenizer=..., or "
            "stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]"
        )
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=list(strings))
    return replace(ending, stop_strings=(*ending.stop_strings, criterion))


def _sampling_params(
    processors: Sequence[Any], mask: Tensor, ending: StoppingConditions, do_sample: bool, seed: int | None
) -> SamplingParams:
    """Return the sampling settings shared by all rows."""
    width = mask.shape[1]
    settings = read_logits_processors(
        processors,
        width=width,
        padding=(~mask).sum(-1).tolist(),
        end_tokens=ending.end_tokens,
        do_sample=do_sample,
    )
    # Transformers checks the criteria after each new token, so it generates at least one.
    max_tokens = max(1, ending.max_length - width)
    min_tokens = min(settings.pop("min_tokens", 0), max_tokens)
    if min_tokens and ending.stop_strings:
        raise BadInputError(
            "expected no min_length or min_new_tokens with stop strings, got both: custom_generate would let a row "
            "go on after a stop string until it is long enough; leave one out"
        )
    return SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, seed=seed, **settings)


def _seeded(params: SamplingParams, num_rows: int, num_samples: int) -> list[SamplingParams]:
    """Return the settings of each row.

    When sampling without a seed, each prompt gets one from torch's global generator.
    """
    if params.seed is not None or params.temperature == 0:
        return [params] * num_rows
    seeds = torch.randint(2**63 - 1, (num_rows // num_samples,), device="cpu").tolist()
    return [replace(params, seed=seeds[row // num_samples]) for row in range(num_rows)]


def _check_context_length(target: LoadedModel, max_length: int) -> None:
    context = target.runtime.context_length
    if max_length > context:
        raise BadInputError(
            f"expected prompt and new tokens within the model's context of {context}, got a max_length of "
            f"{max_length}; shorten the prompt or lower max_new_tokens"
        )
