"""Export to Transformers (names of 5.23): a Python script that calls `generate`."""

from __future__ import annotations

from secondguess.drafters.ngram import NgramOptions
from secondguess.export.base import ExportTarget, Recommendation

SCRIPT = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model!r})
model = AutoModelForCausalLM.from_pretrained({model!r}, dtype={dtype!r})
{setup}inputs = tokenizer("def quicksort(items):", return_tensors="pt", return_token_type_ids=False)
ids = model.generate(**inputs, {arguments}max_new_tokens=128)
print(tokenizer.decode(ids[0]))
"""
ASSISTANT = """\
assistant = AutoModelForCausalLM.from_pretrained({draft_model!r}, dtype={dtype!r})
# These three are read from the assistant's own configuration; as arguments of generate they are ignored.
assistant.generation_config.num_assistant_tokens = {length}
assistant.generation_config.num_assistant_tokens_schedule = "constant"
assistant.generation_config.assistant_confidence_threshold = 0.0
"""


def _plain(recommendation: Recommendation) -> str:
    return _script(recommendation)


def _assisted(recommendation: Recommendation) -> str:
    setup = ASSISTANT.format(
        draft_model=recommendation.drafter.draft_model,
        dtype=recommendation.dtype or "auto",
        length=recommendation.draft_length,
    )
    return _script(recommendation, setup, "assistant_model=assistant, ")


def _prompt_lookup(recommendation: Recommendation) -> str:
    longest = recommendation.drafter.options.get("max", NgramOptions().max)
    length = recommendation.draft_length
    return _script(
        recommendation,
        arguments=f"prompt_lookup_num_tokens={length}, max_matching_ngram_size={longest}, ",
    )


def _script(recommendation: Recommendation, setup: str = "", arguments: str = "") -> str:
    dtype = recommendation.dtype or "auto"
    return SCRIPT.format(model=recommendation.model, dtype=dtype, setup=setup, arguments=arguments)


_NGRAM_NOTE = (
    "prompt lookup there copies the leftmost match, ours the latest, and tries matches down to one token"
)

TRANSFORMERS = ExportTarget(
    title="Transformers",
    writers={"none": _plain, "model": _assisted, "ngram": _prompt_lookup, "suffix": _prompt_lookup},
    options={"ngram": ("max",)},
    dtypes=("float64", "float32", "bfloat16", "float16"),
    int8="give from_pretrained a quantization_config",
    notes=(
        "Transformers drafts for one prompt at a time: batches and several sequences per prompt are refused",
        "greedy text may change with drafting in half precision, and a seed gives another text with drafts than without",
        "our loop runs under the same generate: custom_generate=secondguess.custom_generate",
    ),
    notes_by_drafter={
        "model": (
            "two models whose vocabularies are padded to different widths also need tokenizer= and "
            "assistant_tokenizer=, and fail there when sampling",
        ),
        "ngram": (_NGRAM_NOTE,),
        "suffix": ("Transformers has no suffix drafter: prompt lookup is the nearest it has", _NGRAM_NOTE),
    },
)
