"""Plain, assisted and prompt-lookup generation of Transformers, unmodified, as benchmark systems.

The peers run in their fastest configuration: `sdpa` attention, no gradients, no streamer. Like
all systems they generate exactly the requested number of tokens: end tokens are removed from
the configuration instead of being banned, which avoids a logits processor. Draft lengths are
set on the assistant's own generation config, since Transformers silently ignores them in the
call of `generate`.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from secondguess.bench.systems import Run, System, public_name
from secondguess.runtime.quiet import quiet

FAMILY = "transformers"
LOOKUP_LENGTH = 10
"""Draft length of prompt lookup; the value of Transformers' own documentation."""


class TransformersModel:
    """Unmodified Transformers model."""

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        with quiet(), _no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
        # `generate` takes missing options from the model's own generation config, which must not
        # end a text early.
        model.generation_config.eos_token_id = None
        self.module: Any = model.to(device).eval()
        # A copy as loaded, since systems that share the module replace its generation config.
        self.generation_config: GenerationConfig = copy.deepcopy(model.generation_config)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Disable Transformers' progress bars, since the benchmark shows its own."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


class TransformersPlain(System):
    """`model.generate` without assistance."""

    family = FAMILY
    name = "transformers plain"
    speculates = False

    def __init__(self, target: TransformersModel) -> None:
        self._target = target

    def generate(self, prompt: Sequence[int], num_tokens: int, temperature: float, seed: int) -> Run:
        module = self._target.module
        config = self._config(num_tokens, temperature)
        options = self._options()
        with quiet(), torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            start = time.perf_counter()
            ids = torch.tensor([prompt], device=module.device)
            output = module.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, **options
            )
            tokens = output[0, len(prompt) :].tolist()
            seconds = time.perf_counter() - start
        return Run(tokens, seconds)

    def _options(self) -> dict[str, Any]:
        """Return the arguments that this kind of assistance adds to `generate`."""
        return {}

    def _config(self, num_tokens: int, temperature: float, **more: Any) -> GenerationConfig:
        sampled = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        return GenerationConfig(
            max_new_tokens=num_tokens,
            pad_token_id=0,
            **(sampled if temperature else {"do_sample": False}),
            **more,
        )


class TransformersAssisted(TransformersPlain):
    """`generate(assistant_model=...)` with a constant draft length or Transformers' defaults.

    Args:
        draft_model: name of the assistant.
        draft_length: tokens to draft per round, without early stopping; None for the defaults (up
            to 20 tokens, stopping below a confidence of 0.4).
        include_draft_model_name: whether the system's name contains the assistant's, which distinguishes
            systems if there are several assistants.
    """

    speculates = True

    def __init__(
        self,
        target: TransformersModel,
        assistant: TransformersModel,
        draft_model: str,
        draft_length: int | None = None,
        include_draft_model_name: bool = False,
    ) -> None:
        super().__init__(target)
        self._assistant = assistant
        self._generation_config = copy.deepcopy(assistant.generation_config)
        self.draft_model = draft_model
        self.name = " ".join(
            [
                "transformers assisted",
                *([public_name(draft_model)] if include_draft_model_name else []),
                *([] if draft_length is None else [str(draft_length)]),
            ]
        )
        if draft_length is not None:
            self._generation_config.num_assistant_tokens = draft_length
            self._generation_config.num_assistant_tokens_schedule = "constant"
            self._generation_config.assistant_confidence_threshold = 0.0

    def _options(self) -> dict[str, Any]:
        # Set before each run, since systems share the assistant; copied, since Transformers may
        # change it during generation.
        self._assistant.module.generation_config = copy.deepcopy(self._generation_config)
        return {"assistant_model": self._assistant.module}


class TransformersLookup(TransformersPlain):
    """`generate(prompt_lookup_num_tokens=...)`."""

    name = "transformers prompt lookup"
    speculates = True

    def _config(self, num_tokens: int, temperature: float, **more: Any) -> GenerationConfig:
        return super()._config(num_tokens, temperature, prompt_lookup_num_tokens=LOOKUP_LENGTH, **more)


def transformers_systems(
    target: TransformersModel, assistants: Mapping[str, TransformersModel], draft_lengths: Sequence[int]
) -> list[System]:
    """Return plain decoding, assisted generation and prompt lookup.

    Args:
        assistants: by draft model name; each runs at every draft length and with the defaults.
        draft_lengths: constant draft lengths.
    """
    lengths: list[int | None] = [*draft_lengths, None]
    assisted = [
        TransformersAssisted(target, assistant, name, length, include_draft_model_name=len(assistants) > 1)
        for name, assistant in assistants.items()
        for length in lengths
    ]
    return [TransformersPlain(target), *assisted, TransformersLookup(target)]
