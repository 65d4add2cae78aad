"""Fields of a drafter's `config.json`: each is read, known to change nothing, or refused by name.

`Fields` remembers what was read of it. `refuse_unread` raises for the first field that nothing
has read, unless it is in `HARMLESS`, so that no field that changes what a drafter computes is
overlooked.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from secondguess.errors import UnsupportedModelError

HARMLESS = frozenset((
    # names, versions and training
    "_name_or_path", "name_or_path", "architectures", "auto_map", "model_type", "transformers_version", "torch_dtype",
    "dtype", "speculators_version", "speculators_config", "embed_requires_grad", "base_model_name_or_path",
    "target_model_type", "target_model_name_or_path", "initializer_range", "attention_dropout", "hidden_dropout",
    "embd_pdrop", "resid_pdrop", "dropout", "gradient_checkpointing", "ttt_length", "step_loss_decay",
    "tokenizer_class", "finetuning_task", "task_specific_params", "problem_type", "id2label", "label2id",
    "num_labels", "pretraining_tp", "unsloth_version",
    # how a model is run; these attributes of `PretrainedConfig` do not change its numbers
    "use_cache", "attn_implementation", "_attn_implementation", "_attn_implementation_autoset",
    "experts_implementation", "_experts_implementation", "return_dict", "output_attentions", "output_hidden_states",
    "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads", "tie_encoder_decoder", "is_encoder_decoder",
    "is_decoder", "add_cross_attention", "cross_attention_hidden_size", "chunk_size_feed_forward",
    "tie_word_embeddings", "base_model_tp_plan", "base_model_ep_plan", "base_model_pp_plan", "ep_size",
    "num_logits_to_keep",
    # token ids and generation
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id", "decoder_start_token_id",
    "forced_bos_token_id", "forced_eos_token_id", "prefix", "max_length", "max_new_tokens", "min_length", "do_sample",
    "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "num_return_sequences", "output_scores", "return_dict_in_generate", "remove_invalid_values",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    # experts, linear attention and further modules of the target: those of a drafter are tensors, which are checked
    "decoder_sparse_step", "moe_intermediate_size", "num_experts", "num_experts_per_tok", "norm_topk_prob",
    "mlp_only_layers", "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "topk_method",
    "routed_scaling_factor", "scoring_func", "seq_aux", "moe_layer_freq", "first_k_dense_replace", "aux_loss_alpha",
    "router_aux_loss_coef", "output_router_logits", "shared_expert_intermediate_size", "num_nextn_predict_layers",
))  # fmt: skip
"""Names of fields, at any depth, that do not change what a drafter computes; also those of fields within them."""


class Fields(Mapping[str, Any]):
    """Fields of a JSON object that remember which of them, and of the objects within, were read."""

    def __init__(self, values: Mapping[str, Any], path: str = "", read: set[str] | None = None) -> None:
        self._values, self._path = values, path
        self._read: set[str] = set() if read is None else read

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self._read.add(self._path + name)
        return Fields(value, f"{self._path}{name}.", self._read) if isinstance(value, Mapping) else value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Yield path and value of each field that is not null and was not read, but of no object itself."""
        for name, value in self._values.items():
            path = self._path + name
            if isinstance(value, Mapping):
                yield from Fields(value, f"{path}.", self._read).unread()
            elif value is not None and path not in self._read:
                yield path, value


def refuse_unread(fields: Fields, source: Path, harmless: Collection[str] = ()) -> None:
    """Raise an `UnsupportedModelError` for a field that was not read and may change something.

    Args:
        fields: fields of a drafter that was read.
        source: file that holds them.
        harmless: further paths of fields, or of objects of fields, that change nothing.
    """
    for path, value in fields.unread():
        names = path.split(".")
        parents = (".".join(names[:depth]) for depth in range(1, len(names) + 1))
        if HARMLESS.isdisjoint(names) and not any(parent in harmless for parent in parents):
            raise UnsupportedModelError(
                f"expected fields of a drafter that are known in {source}, got {path} of {value!r}, which may change what "
                "it computes; remove the field if it does not, or use another drafter"
            )
