"""The drop-in for Transformers users: `model.generate(**inputs, custom_generate=secondguess.custom_generate, drafter="ngram")`.

Transformers prepares prompts and settings as usual and hands them to this function instead of its own loop. Every setting is
used or refused by name; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from secondguess.api import check_verifier, choose_controller, make_row
from secondguess.controllers.base import Controller
from secondguess.core import Row
from secondguess.decode import Team, decode
from secondguess.drafters import make_drafter
from secondguess.drafters.base import Drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.runtime.loading import LoadedModel, borrow_model, check_vocabularies, load_runtime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier
from secondguess.verifiers.base import Verifier

_NEUTRAL: dict[str, tuple[object, ...]] = {
    "num_beams": (None, 1),
    "num_return_sequences": (None, 1),
    "typical_p": (None, 1.0),
    "epsilon_cutoff": (None, 0.0),
    "eta_cutoff": (None, 0.0),
    "no_repeat_ngram_size": (None, 0),
    "encoder_repetition_penalty": (None, 1.0),
    "bad_words_ids": (None,),
    "suppress_tokens": (None, []),
    "begin_suppress_tokens": (None, []),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "sequence_bias": (None,),
    "guidance_scale": (None, 1.0),
    "watermarking_config": (None,),
    "penalty_alpha": (None, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "exponential_decay_length_penalty": (None,),
    "remove_invalid_values": (None, False),
    "renormalize_logits": (None, False),
    "max_time": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None,),
    "speculation_type": (None,),
    "token_healing": (None, False),
    "stop_strings": (None, []),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict_in_generate": (None, False),
}
"""Generation settings that we do not carry out, with the values at which they do nothing."""


_INERT = ("logits_to_keep", "cache_position")
"""Inputs that Transformers adds for its own forwards; they say nothing about the text."""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    logits_processor: Sequence[Any],
    stopping_criteria: Sequence[Any],
    generation_config: Any,
    *,
    drafter: str = "suffix",
    verifier: str = "auto",
    controller: str | None = None,
    seed: int | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate with speculation, through `model.generate(custom_generate=...)`.

    Transformers 5 keeps `streamer` and `assistant_model` to itself when it is handed a function: for text as
    it comes use `LLM.stream`, for a draft model `drafter="model:PATH"`.

    Args:
        model: the user's own model; given back as it was found.
        input_ids: `[row, position]`, left-padded where rows differ in length.
        logits_processor, stopping_criteria: what Transformers made of the settings; others are refused.
        generation_config: Transformers' settings; sampling, lengths, penalties and end tokens are honoured.
        drafter, verifier, controller: names as for `secondguess.load`. A draft model is kept for later calls, and so is what
            the controller has learnt of this model with this drafter; what was trained for the model (a head) is read anew by
            every call, as it works on a model that is lent for one call only.
        seed: makes sampled text reproducible and, with the default verifier, independent of the drafter.
        model_kwargs: `attention_mask` `[row, position]`, 0 at padding, and what Transformers always adds.

    Returns:
        `[row, position]` prompts and new tokens, padded on the right as Transformers does.

    Raises:
        BadInputError: a setting or an input that we cannot carry out exactly, named.
    """
    _refuse_unknown(generation_config, logits_processor, stopping_criteria)
    mask = _attention_mask(input_ids, model_kwargs)
    params = params_of(generation_config, input_ids.shape[1], seed)
    judge = make_verifier(verifier)
    with borrow_model(model) as target:
        _require_room(target, generation_config)
        rows = _rows(target, judge, input_ids, mask, generation_config, params)
        guesser = make_drafter(
            drafter,
            target_vocab_size=target.runtime.vocab_size,
            load_draft_model=lambda path: _draft_runtime(target, path),
            target=target,
        )
        check_verifier(judge, guesser)
        team = Team(target.runtime, guesser, judge, _controller_of(model, controller, guesser))
        for _ in decode(team, rows):
            pass
    return _padded(input_ids, rows, generation_config)


def _attention_mask(input_ids: Tensor, model_kwargs: dict[str, Any]) -> Tensor:
    """The mask among what Transformers hands on; anything that would change the text is refused.

    An empty cache, the flag to use it and the usual positions come with every call.
    """
    cache = model_kwargs.pop("past_key_values", None)
    if cache is not None and cache.get_seq_length() > 0:
        raise BadInputError("expected an empty cache, got past_key_values with tokens; leave it out")
    if model_kwargs.pop("use_cache", True) is False:
        raise BadInputError("expected a cache to be used, got use_cache=False; leave it out")
    mask: Tensor | None = model_kwargs.pop("attention_mask", None)
    if mask is None:
        mask = torch.ones_like(input_ids)
    _check_positions(model_kwargs.pop("position_ids", None), mask)
    for name, value in model_kwargs.items():
        if value is not None and name not in _INERT:
            raise BadInputError(
                f"expected no {name}: custom_generate cannot carry it out; "
                "leave it out or generate without custom_generate"
            )
    return mask


def _check_positions(positions: Tensor | None, mask: Tensor) -> None:
    """Transformers counts a row's own tokens from 0; other positions would mean another text."""
    usual = mask.long().cumsum(-1) - 1
    if positions is not None and not torch.equal(positions[mask.bool()], usual[mask.bool()]):
        raise BadInputError(
            "expected position_ids that count each row's tokens from 0, got others; leave them out "
            "or generate without custom_generate"
        )


def _require_room(target: LoadedModel, config: Any) -> None:
    context = target.runtime.context_length
    if config.max_length > context:
        raise BadInputError(
            f"expected prompt and new tokens within the model's context of {context}, got a max_length of "
            f"{config.max_length}; shorten the prompt or lower max_new_tokens"
        )


def params_of(config: Any, prompt_width: int, seed: int | None) -> SamplingParams:
    """Our sampling settings from a Transformers `GenerationConfig`."""
    sampled = bool(config.do_sample)
    return SamplingParams(
        max_tokens=config.max_length - prompt_width,
        min_tokens=max(config.min_new_tokens or 0, (config.min_length or 0) - prompt_width, 0),
        temperature=_or(config.temperature, 1.0) if sampled else 0.0,
        top_k=_or(config.top_k, 0) if sampled else 0,
        top_p=_or(config.top_p, 1.0) if sampled else 1.0,
        min_p=_or(config.min_p, 0.0) if sampled else 0.0,
        repetition_penalty=_or(config.repetition_penalty, 1.0),
        seed=seed,
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _refuse_unknown(config: Any, processors: Sequence[Any], criteria: Sequence[Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        value = getattr(config, name, None)
        if value not in neutral:
            raise BadInputError(
                f"expected {name} to be unset, got {value!r}: custom_generate cannot carry it out; "
                "unset it or generate without custom_generate"
            )
    ours = {
        "TemperatureLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "MinPLogitsWarper",
        "RepetitionPenaltyLogitsProcessor",
        "MinLengthLogitsProcessor",
        "MinNewTokensLengthLogitsProcessor",
        "MaxLengthCriteria",
        "EosTokenCriteria",
    }
    for part in (*processors, *criteria):
        if type(part).__name__ not in ours:
            raise BadInputError(
                f"expected no custom logits processor or stopping criterion, got {type(part).__name__}: "
                "custom_generate cannot run it on drafted tokens; remove it"
            )


def _rows(
    target: LoadedModel,
    verifier: Verifier,
    input_ids: Tensor,
    mask: Tensor,
    config: Any,
    params: SamplingParams,
) -> list[Row]:
    ends = config.eos_token_id
    end_tokens = frozenset([ends] if isinstance(ends, int) else ends or [])
    rows = []
    for ids, kept in zip(input_ids, mask.bool(), strict=True):
        row = make_row(target, verifier, ids[kept].tolist(), params)
        row.end_tokens = end_tokens
        rows.append(row)
    return rows


def _draft_runtime(target: LoadedModel, path: str) -> Runtime:
    loaded = _loaded_draft_model(path, target.dtype, target.device)
    check_vocabularies(target, loaded)
    return loaded.runtime


_controllers: WeakKeyDictionary[Any, dict[tuple[str | None, str], Controller]] = WeakKeyDictionary()
"""Model -> names of controller and drafter -> who has seen the earlier calls. A controller holds on to no model."""


def _controller_of(model: Any, name: str | None, drafter: Drafter) -> Controller:
    of_model = _controllers.setdefault(model, {})
    key = (name, drafter.name)
    if key not in of_model:
        of_model[key] = choose_controller(name, drafter)
    return of_model[key]


@lru_cache(maxsize=1)
def _loaded_draft_model(path: str, dtype: str, device: str) -> LoadedModel:
    """The draft model used last: `generate` is called for every prompt."""
    return load_runtime(path, dtype=dtype, device=device, drafts=True)


def _padded(input_ids: Tensor, rows: Sequence[Row], config: Any) -> Tensor:
    """Prompts as they came, each followed by its output, padded on the right."""
    width = max(row.num_output for row in rows)
    pad = _or(config.pad_token_id, min(rows[0].end_tokens, default=0))
    new = [[*row.output, *([pad] * (width - row.num_output))] for row in rows]
    return torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
