"""Convert a checkpoint of a pair of `make_pair.py` to llama.cpp's GGUF format, in bfloat16.

    PYTHONPATH=<llama.cpp>/gguf-py python benchmarks/peers/to_gguf.py CHECKPOINT OUT.gguf

llama.cpp's own converter requires a known tokenizer, which the pairs lack.
Here each token is a user-defined word such as `<17>`, so that prompts and texts consist of ids.
"""

import json
import sys
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from safetensors import safe_open
from torch import Tensor

PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def name_in_gguf(name: str) -> str:
    """Return llama.cpp's name of a weight of a Transformers Llama."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{PARTS[part]}.weight"


def interleaved(weight: Tensor, num_heads: int) -> Tensor:
    """Reorder query or key projection rows for llama.cpp, whose RoPE pairs neighbouring rows."""
    rows, width = weight.shape
    return weight.view(num_heads, 2, rows // num_heads // 2, width).transpose(1, 2).reshape(rows, width)


def write(checkpoint: Path, out: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    if config["rope_parameters"]["rope_type"] != "default":
        raise SystemExit(
            f"expected plain rotary positions, got {config['rope_parameters']}: they would be dropped"
        )
    num_heads, num_key_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // num_heads
    writer = GGUFWriter(out, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(num_heads)
    writer.add_head_count_kv(num_key_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"<{token}>" for token in range(config["vocab_size"])])
    writer.add_token_scores([0.0] * config["vocab_size"])
    writer.add_token_types([TokenType.USER_DEFINED] * config["vocab_size"])
    if config["eos_token_id"] is not None:
        writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    with safe_open(checkpoint / "model.safetensors", framework="pt") as weights:
        for name in sorted(weights.keys()):
            weight = weights.get_tensor(name)
            if "q_proj" in name:
                weight = interleaved(weight, num_heads)
            if "k_proj" in name:
                weight = interleaved(weight, num_key_heads)
            if weight.dim() == 1:  # llama.cpp keeps norms in float32
                writer.add_tensor(name_in_gguf(name), weight.float().numpy())
            else:
                raw = weight.contiguous().view(torch.uint8).numpy()
                writer.add_tensor(name_in_gguf(name), raw, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
