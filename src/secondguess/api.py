"""Public API: `load()` once, then `generate()` or `stream()`.

This module validates input and loads models. All tokens are decided in `decode.run_round`, which
`engine/shared_batch.py` calls for the rows of all calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from os import PathLike, fspath
from typing import Any, overload

import torch

from secondguess.checkpoint.loader import load_model
from secondguess.checkpoint.memory import check_memory, head_memory
from secondguess.controllers import make_controller
from secondguess.core import TokenLogprob
from secondguess.drafters.spec import DrafterSpec, make_drafter
from secondguess.engine.generation import Generation, Output, check_request, make_row
from secondguess.engine.models import Models
from secondguess.engine.text_scores import TextScore, windows_of
from secondguess.errors import BadInputError, suggestion
from secondguess.names import AUTO
from secondguess.pairing import (
    PLAIN_DECODING,
    check_verifier,
    choose_controller,
    confirm_default,
    first_that_fits,
    require_drafter_of_history,
    resolve_drafter,
    resolve_pair,
    warn_of_drafter_left_out,
)
from secondguess.prompts import ExtendedPrompt, Message, Prompt, encode, encode_with_images, is_single
from secondguess.runtime.base import Runtime
from secondguess.runtime.system.exclusive import one_at_a_time
from secondguess.runtime.system.machine import without_defaults_of_caller
from secondguess.sampling import SamplingParams
from secondguess.sampling.text import Piece
from secondguess.verifiers import make_verifier

__all__ = [
    "LLM",
    "PLAIN_DECODING",
    "Generation",
    "Output",
    "Prompt",
    "TextScore",
    "check_request",
    "check_verifier",
    "choose_controller",
    "encode",
    "load",
    "make_row",
]

OTHER_NAMES = {
    "sampling_params": "; give SamplingParams as params",
    "max_new_tokens": "; did you mean 'max_tokens'?",
    "max_length": "; did you mean 'max_tokens'?",
    "num_return_sequences": "; did you mean 'n'?",
    "do_sample": "; give temperature=1 to sample, or 0",
    "stream": "; call stream instead of generate",
}
"""Advice about settings of other libraries."""


class LLM(Models):
    """Target model with a drafter, ready to generate. Created by `load`.

    Calls share the controller, which learns the costs and acceptance rates of drafts from each
    call. Later calls may therefore use other draft lengths and run faster or slower; the output
    distribution does not change. A prompt that begins like an earlier one is prefilled only from
    where it differs. Calls from several threads decode together, as one batch.
    """

    # With `n` by name, the result depends on its value.
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        n: int,
        **settings: object,
    ) -> Any: ...
    @overload
    def generate(
        self,
        prompts: str | ExtendedPrompt | Sequence[int] | Sequence[Message],
        params: SamplingParams | None = None,
        **settings: object,
    ) -> Output: ...
    @overload
    def generate(
        self,
        prompts: list[str] | list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: object,
    ) -> list[Output]: ...
    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: object,
    ) -> Any: ...
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **settings: object,
    ) -> Output | list[Output] | list[list[Output]]:
        """Generate for one prompt, or for a list of prompts, which decode as one batch.

        Args:
            prompts: text, token ids, or a conversation (a list of `{"role": ..., "content": ...}`,
                formatted by the tokenizer's chat template). A list of such prompts is a batch.
            params: sampling settings of all prompts, or a list with one per prompt of a batch.
            settings: fields of `SamplingParams` (`max_tokens=128, temperature=0.7, ...`), which
                override those of `params`.

        Returns:
            An `Output` for a prompt, a list of them for a list of prompts. If any settings ask for
            several samples (`n`), a list of outputs per prompt replaces the `Output`.

        Raises:
            BadInputError: a value that is not a prompt, an empty prompt, one that fills the
                context, messages that cannot be formatted, an invalid setting, or a number of
                settings that differs from the number of prompts.
            OutOfMemoryError: the KV cache of the longest prompt alone does not fit. (Other prompts
                wait until rows have finished.)
        """
        single = is_single(prompts)
        batch: Sequence[Prompt] = [prompts] if single else prompts  # type: ignore[assignment, list-item]
        if not isinstance(params, Sequence) or isinstance(params, str):
            chosen = [self.sampling(params, **settings)] * len(batch)
        elif single:
            raise BadInputError(
                "expected a list of settings only together with a list of prompts, got one prompt; "
                "give its settings without a list"
            )
        else:
            chosen = [
                _with_settings(own, settings, f"params[{index}]", "give one SamplingParams per prompt")
                for index, own in enumerate(params)
            ]
        outputs = iter(Generation(self, batch, chosen).run())
        samples = [list(islice(outputs, own.n)) for own in chosen]
        if any(own.n > 1 for own in chosen):
            return samples[0] if single else samples
        alone = [output for (output,) in samples]
        return alone[0] if single else alone

    def reset_prefix_cache(self) -> None:
        """Forget the prompts of earlier calls, so that none of their cache entries is reused."""
        with self.shared_batch.between_rounds():
            self.target.runtime.reset_prefix_cache()
            self.drafter.reset_prefix_cache()

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, **settings: object
    ) -> Iterator[Piece]:
        """Yield text as it is generated; each piece reports which of its tokens were drafted.

        Args:
            prompt: text, token ids, or a conversation, as for `generate`.
            params: sampling settings.
            settings: fields of `SamplingParams`, which override those of `params`.

        Raises:
            BadInputError: as in `generate`, and for more than one sample. Raised by the call
                itself, not by the first `next`.
            OutOfMemoryError: as in `generate`.
        """
        chosen = self.sampling(params, **settings)
        if chosen.n > 1:
            raise BadInputError(
                f"expected n=1 for a stream, which yields the text of one sample, got {chosen.n}; "
                "use generate, or a stream per seed"
            )
        return (piece for _, piece in Generation(self, [prompt], [chosen]))

    @overload
    def score(
        self,
        texts: str | Sequence[int] | Sequence[Message],
        *,
        window: int | None = None,
        num_alternatives: int = 0,
        draft_length: int | None = None,
    ) -> TextScore: ...
    @overload
    def score(
        self,
        texts: list[str] | list[list[int]],
        *,
        window: int | None = None,
        num_alternatives: int = 0,
        draft_length: int | None = None,
    ) -> list[TextScore]: ...
    def score(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        window: int | None = None,
        num_alternatives: int = 0,
        draft_length: int | None = None,
    ) -> TextScore | list[TextScore]:
        """Return the log-probabilities of the tokens of a text, or of each text of a list, under the target.

        A text that is longer than the window is cut into windows, each of which begins with the last token of
        the one before it.

        Args:
            texts: text, token ids or messages of at least two tokens, or a list of them.
            window: largest number of tokens; None for the model's context.
            num_alternatives: number of most probable tokens that are reported at each position.
            draft_length: score in passes of this many tokens and one, as drafts of this length are verified, and
                with 0 as in plain decoding; None for passes of as many tokens as memory allows.

        Raises:
            BadInputError: as in `generate`, and for a text or a window of fewer than two tokens.
            OutOfMemoryError: as in `generate`.
        """
        params = SamplingParams(max_tokens=0, prompt_logprobs=num_alternatives, draft_length=draft_length)
        size = self.target.runtime.context_length if window is None else window
        if is_single(texts):
            return self._score(texts, params, size)  # type: ignore[arg-type]
        return [self._score(text, params, size) for text in texts]  # type: ignore[union-attr, arg-type]

    def _score(self, text: Prompt, params: SamplingParams, window: int) -> TextScore:
        ids, images = encode_with_images(self.target, text)
        if images is not None:
            raise BadInputError("expected a text without images to score, got some; leave them out")
        logprobs: list[TokenLogprob] = []
        for part in windows_of(ids, window):
            (output,) = Generation(self, [part], [params]).run()
            logprobs += output.prompt_logprobs
        return TextScore(ids, logprobs)

    @staticmethod
    def sampling(params: SamplingParams | None = None, **settings: object) -> SamplingParams:
        """Return sampling settings made of a base and changes to it.

        Args:
            params: the base; None for the defaults.
            settings: fields of `SamplingParams`, which override those of the base.

        Raises:
            BadInputError: `params` of another type, an unknown name, or an invalid value.
        """
        advice = "give single settings by name, such as max_tokens=64"
        return _with_settings(SamplingParams() if params is None else params, settings, "params", advice)


def _with_settings(params: object, settings: Mapping[str, object], name: str, advice: str) -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise BadInputError(f"expected {name} to be SamplingParams, got {type(params).__name__}; {advice}")
    known = SamplingParams.__dataclass_fields__
    for setting in settings:
        if setting not in known:
            hint = OTHER_NAMES.get(setting) or suggestion(setting, known)
            raise BadInputError(f"unknown setting {setting!r}; expected one of {', '.join(known)}{hint}")
    return replace(params, **settings)  # type: ignore[arg-type]


@one_at_a_time()
def load(
    model: str | PathLike[str] = "builtin",
    drafter: str | None = None,
    *,
    verifier: str = "auto",
    controller: str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    quantize: str | None = None,
    drafter_quantize: str | None = None,
    runtime: str = "auto",
    share_history: bool = False,
) -> LLM:
    """Load a target and its drafter.

    Args:
        model: a directory, a GGUF file or the name of a cached model; `builtin` is the built-in target.
        drafter: `none`, `model:PATH`, `ngram`, `suffix`, `grid`, `jacobi`, `self:int4`, `early-exit:K` or `[:PATH]`,
            `layer-skip:PATH`, `medusa[:PATH]`, `mtp[:PATH]`, `eagle[:PATH]`, `dspark[:PATH]` or `gemma4-assistant:PATH`,
            each with `,key=value` options (see `docs/drafters.md`). Several joined by `+`
            alternate: the controller picks one per row and round. Without a path, the head shipped
            with the target is used. By default, or for `auto`, the built-in target uses `suffix` and its own
            draft model; a target for which a trained drafter is found, in its checkpoint, beside it or in the
            Hugging Face cache, `suffix` and that; one that can be copied on a CPU `suffix+self:int4`, if memory
            holds the copy; one beside which there is a model of at most an eighth of its size `suffix` and that;
            any other target `suffix`, which needs no model.
        verifier: `auto` (see `docs/verifiers.md`), `greedy`, `rejection`, `block`, `traversal` or
            `coupled`.
        controller: `cost` (the default), `fixed:K`, `confidence`, `entropy` or `learned`, with
            options (see `docs/controllers.md`).
        dtype: `float64`, `float32`, `bfloat16`, `float16` (or torch's own), or `auto`: bfloat16 where the processor
            multiplies it in hardware or the compiled kernels run the model, else float32.
        device: `auto`, `cpu` or `cuda[:N]` (or torch's own).
        quantize: `int8` or `int4` stores the target's weights in 8 or 4 bits; of a model that runs as a
            Transformers module, those of linear layers. Without compiled kernels, and on a GPU,
            `int8` needs `pip install secondguess[quant]`, and `int4` is refused.
        drafter_quantize: the same for a draft model.
        runtime: `native` (compiled kernels; decoders in bfloat16, 8 or 4 bits on a CPU),
            `fused` (the same in torch, in any dtype), `graphs` (Triton kernels in CUDA graphs),
            `transformers` (the unmodified module), or `auto`: the first that covers the model and
            matches the module's output in a check at loading. A draft model always uses `auto`.
        share_history: draft from recent outputs of other calls, too, with the drafter `suffix`,
            alone or joined by `+` (see `docs/lookup.md`). It changes the speed alone.

    Raises:
        CheckpointError: a model that is missing, broken or cannot be decoded speculatively.
        BadInputError: a name or a value that does not exist, a controller that has no effect on
            the drafter, or a verifier that cannot verify its drafts.
        OutOfMemoryError: the models and their KV caches do not fit.
    """
    model = fspath(model) if isinstance(model, PathLike) else model
    dtype = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    device = str(device) if isinstance(device, torch.device) else device
    require_texts(model=model, verifier=verifier, dtype=dtype, device=device, runtime=runtime)
    drafter = None if drafter == AUTO else drafter
    optional = {"drafter": drafter, "controller": controller, "quantize": quantize}
    optional["drafter_quantize"] = drafter_quantize
    require_texts(**{name: value for name, value in optional.items() if value is not None})
    if not isinstance(share_history, bool):
        raise BadInputError(f"expected share_history to be True or False, got {share_history!r}")
    # Checked first: names are cheap to check, weights are expensive to load.
    chosen_verifier = make_verifier(verifier)
    if controller is not None:
        make_controller(controller)
    if share_history and drafter is not None:
        require_drafter_of_history(DrafterSpec.parse(drafter))
    pair = resolve_pair(
        model,
        drafter,
        dtype=dtype,
        device=device,
        quantize=quantize,
        drafter_quantize=drafter_quantize,
        runtime=runtime,
    )
    for found in pair.found:
        if found.names_target and found.obstacle:
            warn_of_drafter_left_out(found.name, found.obstacle)
    spec = pair.drafter
    check_verifier(chosen_verifier, spec)
    chosen_controller = choose_controller(controller, spec)
    checkpoints = [pair.target] if pair.draft_model is None else [pair.target, pair.draft_model]
    heads = [head_memory(spec.name, spec.head_bytes)] if spec.head_bytes else []
    check_memory([*(checkpoint.memory() for checkpoint in checkpoints), *heads], pair.target.device)
    with without_defaults_of_caller(pair.target.device):
        target = load_model(pair.target)
        loaded = [target]

        def load_draft_model(path: str) -> Runtime:
            assert pair.draft_model is not None
            loaded.append(load_model(pair.draft_model))
            return loaded[-1].runtime

        if drafter is None and (confirmed := confirm_default(spec.name, target.runtime)) != spec.name:
            spec = resolve_drafter(confirmed)
            chosen_controller = choose_controller(controller, spec)
        make = partial(
            make_drafter,
            target_vocab_size=target.runtime.vocab_size,
            load_draft_model=load_draft_model,
            pair_vocabularies=lambda name: pair.vocabularies,
            target=target,
        )
        made = first_that_fits(make, [spec, *pair.fallbacks])
    if pair.fallbacks:
        chosen_controller = choose_controller(controller, made)
    cache_bytes = sum(model.checkpoint.cache_bytes_per_token for model in loaded)
    return LLM(target, made, chosen_verifier, chosen_controller, cache_bytes, share_history)


def require_texts(**options: object) -> None:
    """Refuse options by name that are not texts.

    Raises:
        BadInputError: another type; of a loaded model the message says how to name it.
    """
    for name, value in options.items():
        if isinstance(value, torch.nn.Module):
            advice = (
                "give the path of its checkpoint, or call its own generate(..., "
                "custom_generate=secondguess.custom_generate)"
                if name == "model"
                else "give 'model:PATH' of its checkpoint"
            )
            raise BadInputError(
                f"expected {name} to be a text, got a loaded {type(value).__name__}; {advice}"
            )
        if not isinstance(value, str):
            raise BadInputError(f"expected {name} to be a text, got {value!r:.60}")
