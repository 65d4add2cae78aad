"""The drop-in for Transformers users: `model.generate(**inputs, custom_generate=secondguess.custom_generate, drafter="ngram")`.

Transformers prepares prompts and settings as usual and hands them to this function instead of its own loop. Every setting is
used or refused by name; nothing is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secondguess.api import make_row
from secondguess.controllers import make_controller
from secondguess.core import Row
from secondguess.decode import Team, decode
from secondguess.drafters import make_drafter
from secondguess.errors import BadInputError
from secondguess.runtime.base import Runtime
from secondguess.runtime.loading import LoadedModel, borrow_model, check_vocabularies, load_runtime
from secondguess.sampling import SamplingParams
from secondguess.verifiers import make_verifier

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
    "stop_strings": (None, []),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "return_dict_in_generate": (None, False),
}
"""Generation settings that we do not carry out, with the values at which they do nothing."""


def custom_generate(
    model: Any,
    input_ids: Tensor,
    generation_config: Any,
    *,
    drafter: str = "suffix",
    verifier: str = "auto",
    controller: str | None = None,
    seed: int | None = None,
    logits_processor: Sequence[Any] = (),
    stopping_criteria: Sequence[Any] = (),
    streamer: Any = None,
    attention_mask: Tensor | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Generate with speculation, through `model.generate(custom_generate=...)`.

    Args:
        model: the user's own model; its attention implementation is restored afterwards.
        input_ids: `[row, position]`, left-padded where rows differ in length.
        generation_config: Transformers' settings; sampling, lengths, penalties and end tokens are honoured.
        drafter, verifier, controller: names as for `secondguess.load`.
        seed: makes sampled text reproducible and independent of the drafter.
        streamer: receives tokens as they are decided (one row only).
        attention_mask: `[row, position]`, 0 at padding.

    Returns:
        `[row, position]` prompts and new tokens, padded on the right as Transformers does.

    Raises:
        BadInputError: a setting that we cannot carry out exactly, named.
    """
    _refuse_unknown(generation_config, logits_processor, stopping_criteria)
    params = params_of(generation_config, input_ids.shape[1], seed)
    if streamer is not None and input_ids.shape[0] > 1:
        raise BadInputError(
            f"expected one row with a streamer, got {input_ids.shape[0]}; stream rows separately"
        )
    with borrow_model(model) as target:
        rows = _rows(target, make_verifier(verifier), input_ids, attention_mask, generation_config, params)
        made = make_drafter(
            drafter,
            target_vocab_size=target.runtime.vocab_size,
            load_draft_model=lambda path: _draft_runtime(target, path),
        )
        team = Team(
            target.runtime,
            made,
            make_verifier(verifier),
            make_controller(controller or made.default_controller),
        )
        for commits in decode(team, rows):
            if streamer is not None:
                streamer.put(torch.tensor([commits[0].tokens]))
    if streamer is not None:
        streamer.end()
    return _padded(input_ids, rows, generation_config)


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
    verifier: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    config: Any,
    params: SamplingParams,
) -> list[Row]:
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    ends = config.eos_token_id
    end_tokens = frozenset([ends] if isinstance(ends, int) else ends or [])
    rows = []
    for ids, kept in zip(input_ids, mask.bool(), strict=True):
        row = make_row(target, verifier, ids[kept].tolist(), params)
        row.end_tokens = end_tokens
        rows.append(row)
    return rows


def _draft_runtime(target: LoadedModel, path: str) -> Runtime:
    loaded = load_runtime(path, dtype=target.dtype, device=target.device)
    check_vocabularies(target, loaded)
    return loaded.runtime


def _padded(input_ids: Tensor, rows: Sequence[Row], config: Any) -> Tensor:
    """Prompts as they came, each followed by its output, padded on the right."""
    width = max(row.num_output for row in rows)
    pad = _or(config.pad_token_id, min(rows[0].end_tokens, default=0))
    new = [[*row.output, *([pad] * (width - row.num_output))] for row in rows]
    return torch.cat([input_ids, torch.tensor(new, dtype=input_ids.dtype, device=input_ids.device)], dim=1)
