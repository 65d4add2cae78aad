"""Configurations of the engines that recommendations can be exported to."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path

from secondguess.checkpoint.resolve import find_in_cache, is_gguf
from secondguess.drafters.ngram import NgramOptions
from secondguess.errors import BadInputError
from secondguess.export.base import DrafterExport, ExportTarget, Recommendation
from secondguess.heads.dspark import count_drafted
from secondguess.heads.medusa import count_heads

GPU_DTYPES = ("float32", "bfloat16", "float16")
QUANTIZED_NOTE = "{} has no equivalent of our quantised weights; give it a checkpoint that is quantised"
NUMERICS_NOTE = "greedy text may change with drafting in half precision, and a seed gives another text with drafts than without"
DEFAULTS_NOTE = (
    "{} samples with the values of generation_config.json where a request gives none, as `secondguess serve` does and "
    "generate does not: {} switches that off"
)


def _command(recommendation: Recommendation, words: list[str], settings: Mapping[str, object]) -> str:
    """Return a command line with the model, the dtype and one option per setting."""
    dtype = [] if recommendation.dtype is None else ["--dtype", recommendation.dtype]
    options = [word for name, value in settings.items() for word in (name, str(value))]
    return shlex.join([*words, recommendation.model, *dtype, *options]) + "\n"


# vLLM, option names of 0.33: `vllm serve` with `--speculative-config` JSON.


def _write_vllm(recommendation: Recommendation, settings: dict[str, object]) -> str:
    speculation = {"--speculative-config": json.dumps(settings, ensure_ascii=False)} if settings else {}
    return _command(recommendation, ["vllm", "serve"], speculation)


VLLM = ExportTarget(
    title="vLLM",
    drafters={
        "none": DrafterExport(),
        "model": DrafterExport(
            "method draft_model model {model} num_speculative_tokens {length}",
            notes=(
                "vLLM's drafts are greedy at any temperature, which is lossless and accepts less; for sampled text add "
                '"draft_sample_method": "probabilistic" (it takes memory for the probabilities) and, for block verification, '
                '"rejection_sample_method": "block"',
            ),
        ),
        "ngram": DrafterExport(
            "method ngram prompt_lookup_max {max} prompt_lookup_min {min} num_speculative_tokens {length}"
        ),
        "suffix": DrafterExport(
            "method suffix suffix_decoding_max_spec_factor {factor} suffix_decoding_min_token_prob {threshold} "
            "num_speculative_tokens {length}",
            notes=(
                "suffix needs `pip install arctic-inference` with vLLM's first model runner; the second needs nothing and does "
                "not read the two suffix_ keys; matches there also reach into the outputs of earlier requests",
            ),
        ),
        "eagle": DrafterExport("method eagle{version} model {head} num_speculative_tokens {length}"),
        # Without a folder, the modules in the target's own checkpoint.
        "mtp": DrafterExport("method mtp model {model} num_speculative_tokens {length}"),
        "gemma4-assistant": DrafterExport("method mtp model {head} num_speculative_tokens {length}"),
        "medusa": DrafterExport(
            "method medusa model {head} num_speculative_tokens {length}",
            notes=(
                "vLLM's Medusa needs an output matrix in the file: add the target's as lm_head.weight to a folder trained here; "
                "its drafts are chains of the likeliest tokens",
            ),
            longest=count_heads,
        ),
        "dspark": DrafterExport(
            "method dspark model {head} num_speculative_tokens {length}", longest=count_drafted
        ),
    },
    write=_write_vllm,
    dtypes=GPU_DTYPES,
    quantized=QUANTIZED_NOTE.format("vLLM"),
    gguf="vLLM reads a GGUF file only with `pip install vllm-gguf-plugin`, and from a local path",
    longest_draft=32,
    notes=(
        f"vLLM is documented as lossless up to numerics: {NUMERICS_NOTE}",
        "it drafts this many tokens at any load; num_speculative_tokens_per_batch_size in the same JSON can make that "
        "fewer for large batches",
        DEFAULTS_NOTE.format("vLLM", "--generation-config vllm"),
    ),
)

# SGLang, option names of 0.5.23: one command-line option per setting. Chains only: trees need further options and
# the overlap scheduler disabled. The pending token counts as part of the draft.


def _write_sglang(recommendation: Recommendation, settings: dict[str, object]) -> str:
    return _command(recommendation, ["python", "-m", "sglang.launch_server", "--model-path"], settings)


_SGLANG_CHAIN = " --speculative-num-steps {length} --speculative-eagle-topk 1 --speculative-num-draft-tokens {length_and_pending}"
_SGLANG_NGRAM = "--speculative-algorithm NGRAM --speculative-num-draft-tokens {length_and_pending}"
_SGLANG_NGRAM_NOTE = (
    "SGLang's NGRAM looks up a tree of past text, that of other requests included, and needs CUDA; "
    "how long a match must be is its own choice"
)

SGLANG = ExportTarget(
    title="SGLang",
    drafters={
        "none": DrafterExport(),
        "model": DrafterExport(
            "--speculative-algorithm STANDALONE --speculative-draft-model-path {model}" + _SGLANG_CHAIN
        ),
        "ngram": DrafterExport(_SGLANG_NGRAM, notes=(_SGLANG_NGRAM_NOTE,)),
        "suffix": DrafterExport(
            _SGLANG_NGRAM,
            notes=("SGLang has no suffix drafter: NGRAM is the nearest it has", _SGLANG_NGRAM_NOTE),
        ),
        "eagle": DrafterExport(
            "--speculative-algorithm EAGLE{version} --speculative-draft-model-path {head}" + _SGLANG_CHAIN,
            notes=(
                "SGLang reads the authors' format (midlayer.*); what is trained here is in that of speculators: rename "
                "layers.0. to midlayer. if your version refuses it",
            ),
        ),
    },
    write=_write_sglang,
    dtypes=GPU_DTYPES,
    quantized=QUANTIZED_NOTE.format("SGLang"),
    notes=(
        "the distribution of sampled text is not guaranteed: SGLang samples the target alone unless "
        "--speculative-use-rejection-sampling is added (chains only)",
        "with speculation on, SGLang lowers --max-running-requests to 48 unless it is given",
        DEFAULTS_NOTE.format("SGLang", "--sampling-defaults openai"),
    ),
)

# llama.cpp, option names of 2026, commit 0c1e570: commands that convert the weights to GGUF and
# start `llama-server`.

_OUTTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}


def _find_gguf(name: str) -> str | None:
    """Return the path of a GGUF file; None for one of a repository that is not in the local cache."""
    if Path(name).is_file():
        return name
    _refuse_path(name)
    repository, path = _split_repository(name)
    if not path:  # relative to where the server starts
        return name
    found = find_in_cache(repository, path)
    return None if found is None else str(found)


def _split_repository(name: str) -> tuple[str, str]:
    """Return the repository and the file of `ORGANISATION/NAME/FILE`; the file is empty for another name."""
    organisation, _, rest = name.partition("/")
    repository, _, path = rest.partition("/")
    return f"{organisation}/{repository}", path


def _refuse_path(name: str) -> None:
    """Refuse a missing path that cannot be a repository's name, as it starts like a path."""
    if Path(name).is_absolute() or name.startswith((".", "~")):
        raise BadInputError(
            f"expected a model directory, a GGUF file or a repository on the Hub, got {name!r}, which does not exist; "
            "check the path"
        )


def _write_llama_cpp(recommendation: Recommendation, settings: dict[str, object]) -> str:
    models = {"target": (recommendation.model, recommendation.quantize)}
    if recommendation.drafter.draft_model is not None:
        models["drafter"] = (recommendation.drafter.draft_model, recommendation.drafter_quantize)
    commands, files = [], {}
    for name, (model, quantize) in models.items():
        if is_gguf(model):
            if recommendation.dtype is not None or quantize is not None:
                raise BadInputError(
                    f"expected no dtype and no quantisation for {model}, whose weights llama.cpp reads as they are stored; "
                    "leave --dtype, --quantize and --drafter-quantize out"
                )
            files[name], before = _fetch_gguf(model, name)
        else:
            files[name], before = f"{name}.gguf", _convert(model, name, recommendation.dtype, quantize)
        commands += before
    models_read = {"-m": files["target"]} | ({"-md": files["drafter"]} if "drafter" in files else {})
    options = [word for name, value in (models_read | settings).items() for word in (name, str(value))]
    return "".join(shlex.join(command) + "\n" for command in (*commands, ["llama-server", *options]))


def _fetch_gguf(model: str, folder: str) -> tuple[str, list[list[str]]]:
    """Return the path of a GGUF file, and the commands that download it into a folder if it is not here."""
    if (found := _find_gguf(model)) is not None:
        return found, []
    repository, path = _split_repository(model)
    return f"{folder}/{path}", [["hf", "download", repository, path, "--local-dir", folder]]


def _convert(model: str, name: str, dtype: str | None, quantize: str | None) -> list[list[str]]:
    """Return the commands that write a model of safetensors as NAME.gguf."""
    commands, folder = [], model
    if not Path(model).is_dir():  # the converter reads directories only
        _refuse_path(model)
        commands.append(["hf", "download", model, "--local-dir", name])
        folder = name
    outtype = "q8_0" if quantize == "int8" else _OUTTYPES.get(dtype or "", "auto")
    file, outfile = f"{name}.gguf", f"unquantised-{name}.gguf" if quantize == "int4" else f"{name}.gguf"
    commands.append(["python", "convert_hf_to_gguf.py", folder, "--outfile", outfile, "--outtype", outtype])
    if quantize == "int4":  # uneven levels and a scale per 32 inputs, too
        commands.append(["llama-quantize", outfile, file, "iq4_nl"])
    return commands


_LLAMA_NGRAM = "--spec-type ngram-simple --spec-ngram-simple-size-n {max} --spec-ngram-simple-size-m {length}"
_LLAMA_NGRAM_NOTE = (
    "llama.cpp's ngram-simple looks for matches of exactly that many tokens, where ours tries several lengths"
)

LLAMA_CPP = ExportTarget(
    title="llama.cpp",
    drafters={
        "none": DrafterExport(),
        "model": DrafterExport("--spec-type draft-simple --spec-draft-n-max {length}"),
        "ngram": DrafterExport(_LLAMA_NGRAM, notes=(_LLAMA_NGRAM_NOTE,)),
        "suffix": DrafterExport(
            _LLAMA_NGRAM.replace("{max}", str(NgramOptions().max)),
            notes=(
                "llama.cpp has no suffix drafter: ngram-simple is the nearest it has",
                _LLAMA_NGRAM_NOTE,
            ),
        ),
    },
    write=_write_llama_cpp,
    dtypes=tuple(_OUTTYPES),
    notes=(
        "convert_hf_to_gguf.py lies in llama.cpp's sources; builds from before 2026 call --spec-draft-n-max --draft-max",
        "llama.cpp keeps the target's distribution by sampling the target and comparing: with a draft model it accepts "
        "less at temperatures above 0 than we do",
        "it drafts at any load, also where that does not pay",
    ),
)
