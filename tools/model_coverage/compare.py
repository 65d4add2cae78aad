"""Comparison of a checkpoint's greedy text and logits with those of Transformers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

import secondguess
from model_coverage.tiny import VOCAB_SIZE
from secondguess.api import LLM
from secondguess.checkpoint.classes import LOADED_WHOLE
from secondguess.checkpoint.description import describe
from secondguess.checkpoint.plan import Checkpoint
from secondguess.controllers import make_controller
from secondguess.core import Budgets, Draft, Row
from secondguess.drafters.base import Drafter
from secondguess.drafters.self import SelfDrafter
from secondguess.engine.generation import Generation
from secondguess.runtime.base import Runtime
from secondguess.sampling import SamplingParams
from secondguess.sampling.noise import Noise
from secondguess.tensors import padded_tensor
from secondguess.verifiers import make_verifier

PROMPT_LENGTHS = (20, 3, 11)
NUM_TOKENS = 24
DRAFT_LENGTH = 4
TOLERANCE = 1e-4
"""Largest difference of logits, relative to the largest logit, that is taken for rounding in float32."""


@dataclass(frozen=True)
class Reference:
    """Greedy text of Transformers alone.

    Args:
        prompt: token ids.
        output: generated token ids.
        logits: `[position, vocab]`, logits of each generated token.
    """

    prompt: list[int]
    output: list[int]
    logits: Tensor


def read_references(directory: Path) -> list[Reference]:
    """Return the greedy texts that Transformers alone generates, one random prompt at a time."""
    is_whole = AutoConfig.from_pretrained(directory).model_type in LOADED_WHOLE
    loader = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    model = loader.from_pretrained(directory, dtype=torch.float32).eval()
    # Without the settings of its own that a class has, such as an end token that is forced at the end (BART).
    model.generation_config = GenerationConfig(eos_token_id=0, pad_token_id=0)
    generator = torch.Generator().manual_seed(1)
    references = []
    for length in PROMPT_LENGTHS:
        prompt = torch.randint(5, VOCAB_SIZE, (1, length), generator=generator)
        found = model.generate(
            prompt,
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        output = found.sequences[0, length:].tolist()
        references.append(Reference(prompt[0].tolist(), output, torch.cat(found.logits)))
    return references


class PartlyWrongDrafter(Drafter):
    """Drafter of the expected text with errors.

    Args:
        references: the expected texts.
        vocab_size: number of tokens.
        branching: False for chains, in which every third token is wrong; True for trees, in which each
            level has a wrong node and a right one, and the next level branches from the latter.
    """

    name = "partly-wrong"
    deterministic = True

    def __init__(self, references: Sequence[Reference], vocab_size: int, branching: bool) -> None:
        self.references = references
        self.vocab_size = vocab_size
        self.can_draft_trees = branching

    def propose(self, rows: Sequence[Row], budgets: Budgets, noise: Noise) -> Draft:
        expected = [self._expected(row, limit) for row, limit in zip(rows, budgets.lengths, strict=True)]
        if self.can_draft_trees:
            nodes = [
                [token for right in texts for token in (self._wrong(right), right)] for texts in expected
            ]
            parents = [[2 * (node // 2) - 1 for node in range(len(row))] for row in nodes]
            return Draft(
                padded_tensor(nodes, 0, noise.device),
                padded_tensor(parents, -1, noise.device),
                torch.tensor([len(row) for row in nodes], device=noise.device),
            )
        chains = [
            [
                self._wrong(token) if (row.num_output + level) % 3 == 2 else token
                for level, token in enumerate(texts)
            ]
            for row, texts in zip(rows, expected, strict=True)
        ]
        return Draft.chains(chains, device=noise.device)

    def _expected(self, row: Row, limit: int) -> list[int]:
        prompt = row.tokens[: row.num_prompt]
        output = next(each.output for each in self.references if each.prompt == prompt)
        return output[row.num_output :][:limit]

    def _wrong(self, token: int) -> int:
        return (token + 1) % self.vocab_size


def load_tiny(directory: Path) -> LLM:
    """Describe a checkpoint as `secondguess inspect` does, and load it without a drafter."""
    describe(Checkpoint.resolve(directory))
    return secondguess.load(directory, drafter="none", dtype="float32", device="cpu", runtime="transformers")


def find_differences(llm: LLM, references: Sequence[Reference]) -> list[str]:
    """Return the names of the comparisons that fail, in float32, with the texts of Transformers alone."""
    size = llm.target.runtime.vocab_size
    chain, tree = (PartlyWrongDrafter(references, size, branching) for branching in (False, True))
    one = references[:1]
    same = {
        "plain": _generate(llm, llm.drafter, one, "fixed:0") == _outputs(one),
        "chain": _generate(llm, chain, one) == _outputs(one),
        "tree": _generate(llm, tree, one) == _outputs(one),
        "batch of chains": _generate(llm, chain, references) == _outputs(references),
        "batch of trees": _generate(llm, tree, references) == _outputs(references),
        "rollback": _logits_after_rollback(llm.target.runtime, references[0]) <= TOLERANCE,
    }
    if not llm.target.runtime.why_not_copied:
        copy = SelfDrafter(llm.target.runtime, "self:int4")
        same["quantised copy"] = _generate(llm, copy, references) == _outputs(references)
    return [name for name, equal in same.items() if not equal]


def _outputs(references: Sequence[Reference]) -> list[list[int]]:
    return [reference.output for reference in references]


def _generate(
    llm: LLM, drafter: Drafter, references: Sequence[Reference], controller: str = f"fixed:{DRAFT_LENGTH}"
) -> list[list[int]]:
    drafting = LLM(llm.target, drafter, make_verifier("auto"), make_controller(controller))
    drafting.reset_prefix_cache()
    prompts = [reference.prompt for reference in references]
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0)
    return [output.token_ids for output in Generation(drafting, prompts, [params] * len(prompts)).run()]


def _logits_after_rollback(runtime: Runtime, reference: Reference) -> float:
    """Return the relative error of the logits after a wrong text was drafted, kept, and rewound."""
    row = Row([*reference.prompt], SamplingParams(max_tokens=NUM_TOKENS))
    runtime.reset_prefix_cache()
    runtime.begin([row])
    try:
        runtime.score([row], Draft.chains([[7, 8, 9, 10]]))
        runtime.keep([row], [[0, 1]])
        row.tokens += [7, 8, 11]
        runtime.score([row], Draft.chains([[12, 13]]))
        runtime.rewind([row], [len(reference.prompt) // 2])
        row.tokens[:] = reference.prompt
        logits = runtime.score([row], Draft.chains([reference.output[:-1]])).logits[0]
    finally:
        runtime.release(row)
    return float((logits - reference.logits).abs().max() / reference.logits.abs().max())
