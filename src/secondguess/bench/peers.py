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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from secondguess.bench.systems import Run, System
from secondguess.checkpoint.loaded import LoadedModel
from secondguess.runtime.system.quiet import no_progress_bars, quiet
from secondguess.workloads.provenance import public_name

FAMILY = "transformers"
LOOKUP_LENGTH = 10
"""Draft length of prompt lookup; the value of Transformers' own documentation."""


class TransformersModel:
    """Unmodified Transformers model."""

    def __init__(self, path: str | Path, dtype: torch.dtype, device: torch.device) -> None:
        with no_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(
                path, dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
        # `generate` takes missing options from the model's own generation config, which must not
        # end a text early.
        model.generation_config.eos_token_id = None
        self.module: Any = model.to(device).eval()
        # A copy as loaded, since systems that share the module replace its generation config.
        self.generation_config: GenerationConfig = copy.deepcopy(model.generation_config)

    @classmethod
    def of(cls, loaded: LoadedModel) -> TransformersModel:
        """Return the unmodified model of a loaded one, in the same dtype on the same device."""
        return cls(loaded.path, getattr(torch, loaded.dtype), loaded.runtime.device)


class TransformersSystem(System):
    """`model.generate`: plain, with an assistant, or with prompt lookup.

    An assistant without a draft length has Transformers' defaults: up to 20 tokens, stopping below a confidence
    of 0.4. With one it drafts so many tokens per round, without early stopping.
    """

    family = FAMILY

    def __init__(
        self,
        target: TransformersModel,
        variant: str = "plain",
        *,
        draft_model: str | None = None,
        assistant: TransformersModel | None = None,
        draft_length: int | None = None,
        lookup_length: int | None = None,
    ) -> None:
        self.name = f"{FAMILY} {variant}"
        self.draft_model = draft_model
        self.speculates = assistant is not None or lookup_length is not None
        self._target, self._assistant, self._lookup_length = target, assistant, lookup_length
        if assistant is not None:
            self._assistant_config = copy.deepcopy(assistant.generation_config)
            if draft_length is not None:
                self._assistant_config.num_assistant_tokens = draft_length
                self._assistant_config.num_assistant_tokens_schedule = "constant"
                self._assistant_config.assistant_confidence_threshold = 0.0

    def generate(
        self, prompts: Sequence[Sequence[int]], num_tokens: int, temperature: float, seed: int
    ) -> Run:
        (prompt,) = prompts
        module, options = self._target.module, {}
        if self._assistant is not None:
            # Set before each run, since systems share the assistant; copied, since Transformers may
            # change it during generation.
            self._assistant.module.generation_config = copy.deepcopy(self._assistant_config)
            options["assistant_model"] = self._assistant.module
        config = self._config(num_tokens, temperature)
        with quiet(), torch.random.fork_rng(), torch.inference_mode():
            torch.manual_seed(seed)
            start = time.perf_counter()
            ids = torch.tensor([prompt], device=module.device)
            output = module.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, **options
            )
            tokens = output[0, len(prompt) :].tolist()
            seconds = time.perf_counter() - start
        return Run([tokens], seconds)

    def _config(self, num_tokens: int, temperature: float) -> GenerationConfig:
        options: dict[str, Any] = {"do_sample": False}
        if temperature:
            options = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if self._lookup_length is not None:
            options["prompt_lookup_num_tokens"] = self._lookup_length
        return GenerationConfig(max_new_tokens=num_tokens, pad_token_id=0, **options)


def transformers_systems(
    target: TransformersModel, assistants: Mapping[str, TransformersModel], draft_lengths: Sequence[int]
) -> list[System]:
    """Return plain decoding, assisted generation at every draft length and with the defaults, and prompt lookup."""
    systems: list[System] = [TransformersSystem(target)]
    for name, assistant in assistants.items():
        for length in [*draft_lengths, None]:
            parts = ["assisted", public_name(name) if len(assistants) > 1 else "", str(length or "")]
            variant = " ".join(part for part in parts if part)
            systems.append(
                TransformersSystem(
                    target, variant, draft_model=name, assistant=assistant, draft_length=length
                )
            )
    return [*systems, TransformersSystem(target, "prompt lookup", lookup_length=LOOKUP_LENGTH)]
