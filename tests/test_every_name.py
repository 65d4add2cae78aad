"""Every command, drafter, verifier, controller, runtime and format has a test that is named here."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
import typer

from secondguess.checkpoint.quantised import DECODED
from secondguess.checkpoint.resolve import RUNTIMES
from secondguess.cli import app
from secondguess.cli.train import LOSSES, SUMMARIES
from secondguess.controllers import CONTROLLERS
from secondguess.drafters import DRAFTERS
from secondguess.export import ENGINES
from secondguess.params import GrammarKind
from secondguess.runtime.weight_format import QUANTIZATIONS
from secondguess.verifiers import VERIFIERS
from secondguess.workloads.loading import DATA_SETS

TESTS = Path(__file__).parent
COMMANDS = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]

EVERY_DRAFTER = "drafters/test_every_drafter.py::test_greedy_text_equals_plain_decoding"
EVERY_HEAD = "drafters/test_every_head.py::test_output_distribution_equals_the_targets"
DISTRIBUTION = "test_distributions.py::test_output_distribution_equals_the_targets"
TREES = "test_tree_distributions.py::test_output_distribution_equals_the_targets"
EXPORT = "export/test_export.py::test_the_output_matches_the_schema_and_the_recommendation"

NAMES = {
    "drafters": {
        "none": "test_distributions.py::test_plain_decoding_has_the_target_distribution",
        "model": "drafters/test_model_drafter.py::test_drafts_of_the_target_itself_are_always_accepted",
        "ngram": EVERY_DRAFTER,
        "suffix": EVERY_DRAFTER,
        "grid": EVERY_DRAFTER,
        "jacobi": "test_distributions.py::test_jacobi_drafts_of_coupled_noise_keep_the_distribution",
        "early-exit": EVERY_HEAD,
        "layer-skip": EVERY_HEAD,
        "self": EVERY_HEAD,
        "medusa": EVERY_HEAD,
        "mtp": EVERY_HEAD,
        "eagle": EVERY_HEAD,
        "dspark": EVERY_HEAD,
    },
    "verifiers": {
        "auto": "test_tree_distributions.py::test_auto_verifies_trees_by_traversal",
        "greedy": "test_lossless.py::test_greedy_output_of_every_verifier_equals_plain_decoding",
        "rejection": DISTRIBUTION,
        "block": DISTRIBUTION,
        "traversal": TREES,
        "coupled": "test_distributions.py::test_output_distribution_of_coupled_rows_equals_the_targets",
    },
    "controllers": dict.fromkeys(("fixed", "confidence", "entropy", "cost", "learned"), DISTRIBUTION),
    "engines": dict.fromkeys(("vllm", "sglang", "llama.cpp"), EXPORT),
    "losses": dict.fromkeys(
        ("lk", "kl", "tv"), "train/test_losses.py::test_the_objectives_equal_values_computed_by_hand"
    ),
    "commands": {
        "generate": "cli/test_cli.py::test_text_and_logprobs_equal_those_of_the_api",
        "chat": "test_chat.py::test_each_reply_reads_the_whole_conversation",
        "serve": "server/test_run.py::test_a_signal_finishes_requests_and_refuses_new_ones",
        "verify": "cli/test_cli.py::test_verify_tests_the_named_model",
        "score": "cli/test_cli.py::test_score_compares_formats_of_weights",
        "inspect": "cli/test_cli.py::test_inspect_describes_a_model_without_loading_it",
        "train": "train/test_train_heads.py::test_a_trained_draft_model_has_a_card_and_drafts",
        "bench": "bench/test_run_bench.py::test_every_system_runs_at_every_temperature",
        "tune": "bench/test_tuning.py::test_the_built_in_pair_is_tuned_from_the_command_line",
        "export": EXPORT,
    },
    "trained": {
        "draft": "train/test_train_heads.py::test_a_trained_draft_model_has_a_card_and_drafts",
        **dict.fromkeys(
            ("early-exit", "medusa", "mtp", "eagle", "dspark"),
            "train/test_train_heads.py::test_a_trained_head_drafts_and_keeps_the_text",
        ),
        "layer-skip": "train/test_skip_command.py::test_the_found_layers_can_be_used_as_a_drafter",
    },
    "runtimes": {
        "native": "runtime/cpu/test_native.py::test_a_tokens_bits_depend_only_on_its_prefix",
        "fused": "runtime/decoder/test_fused.py::test_bfloat16_logits_are_bit_identical_to_the_module",
        "graphs": "runtime/cuda/test_graphs.py::test_a_chain_drawn_at_once_equals_one_drawn_token_by_token",
        "transformers": "test_lossless.py::test_greedy_output_equals_plain_decoding",
    },
    "quantizations": dict.fromkeys(
        ("int8", "int4"), "runtime/cpu/test_native.py::test_quantised_weights_differ_by_rounding"
    ),
    "grammars": {
        "regex": "test_distributions.py::test_a_grammar_holds_inside_a_draft",
        "lark": "sampling/test_grammar.py::test_a_limit_during_decoding_ends_the_text_with_its_own_reason",
        "json_schema": "server/test_structure.py::test_a_json_schema_is_followed_with_and_without_speculation",
        "json_object": "server/test_structure.py::test_a_json_object_is_streamed",
    },
    "encodings": {
        **dict.fromkeys(
            ("gptq", "awq", "compressed-tensors pack-quantized"),
            "checkpoint/test_quantised.py::test_the_weights_are_those_that_the_format_defines",
        ),
        "fp8": "checkpoint/test_quantised.py::test_the_last_block_of_8_bit_floats_may_be_smaller",
        "mxfp4": "checkpoint/test_mxfp4.py::test_logits_are_those_of_the_dequantised_weights",
        "gguf": "checkpoint/test_gguf.py::test_logits_are_those_of_the_dequantised_weights",
    },
    "datasets": {
        "spec-bench": "workloads/test_workloads.py::test_the_eight_categories_of_mt_bench_are_one_task_of_spec_bench",
        "humaneval": "workloads/test_workloads.py::test_humaneval_is_the_default_if_present",
        "gsm8k": "workloads/test_workloads.py::test_prompts_of_gsm8k_are_its_questions",
    },
}
REGISTRIES = {
    "drafters": DRAFTERS, "verifiers": VERIFIERS, "controllers": CONTROLLERS, "engines": ENGINES, "losses": LOSSES,
    "commands": COMMANDS, "trained": (*SUMMARIES, "layer-skip"), "runtimes": set(RUNTIMES) - {"auto"},
    "quantizations": QUANTIZATIONS, "grammars": get_args(GrammarKind),
    "encodings": DECODED, "datasets": DATA_SETS,
}  # fmt: skip

FORMATS = {
    "secondguess.toml": "test_configuration.py::test_the_documented_file_is_valid",
    "early-exit adapter": "drafters/test_early_exit.py::test_a_saved_adapter_is_loaded_unchanged",
    "medusa, original and vLLM's": "heads/test_medusa.py::test_every_published_format_drafts_as_in_the_paper",
    "eagle, authors' and speculators'": "heads/test_eagle.py::test_a_published_head_has_the_logits_of_its_paper",
    "eagle, dialects": "heads/test_eagle_dialects.py::test_a_dialect_has_the_logits_of_its_publisher",
    "mtp in a target or a folder": "heads/test_mtp.py::test_a_published_module_has_the_logits_of_its_paper",
    "dspark and dflash": "heads/test_dspark.py::test_every_published_format_drafts_as_in_the_paper",
    "other block drafters": "heads/test_block_formats.py::test_the_logits_are_those_of_the_publishers_code",
    "heads written for speculators": "heads/test_speculators.py::test_speculators_reads_written_heads",
}


@pytest.mark.parametrize("kind", NAMES)
def test_every_name_is_in_the_table_and_in_the_readme_or_the_documentation(kind):
    assert set(NAMES[kind]) == set(REGISTRIES[kind])
    pages = [TESTS.parent / "README.md", *(TESTS.parent / "docs").glob("*.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    words = {name: re.escape(name.split()[-1]) for name in NAMES[kind]}
    assert [name for name, word in words.items() if not re.search(rf"`[^`\n]*\b{word}\b", text)] == []


@pytest.mark.parametrize(
    "test", sorted({*FORMATS.values(), *(each for of in NAMES.values() for each in of.values())})
)
def test_every_named_test_exists(test):
    file, _, name = test.partition("::")
    assert f"\ndef {name}(" in (TESTS / file).read_text(encoding="utf-8")
