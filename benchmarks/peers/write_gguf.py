"""A Hugging Face folder of a Qwen2 or Qwen3 model without a tokenizer as a GGUF file: ``write_gguf.py FOLDER FILE F32|Q8_0``.

Runs in llama.cpp's environment with its own ``gguf`` package. Norms and biases stay F32, as llama.cpp's converter leaves them.
"""

import json
import sys
from pathlib import Path

import gguf
from safetensors.numpy import load_file

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}


def renamed(name: str) -> str:
    """Hugging Face's name as llama.cpp's."""
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    inner, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[inner]}.{kind}"


def main() -> None:
    folder, path, kind = Path(sys.argv[1]), sys.argv[2], gguf.GGMLQuantizationType[sys.argv[3]]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(path, config["model_type"])
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head)
    writer.add_value_length(head)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(config.get("rope_theta") or rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    for name, tensor in load_file(folder / "model.safetensors").items():
        chosen = kind if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(renamed(name), gguf.quants.quantize(tensor, chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


main()
