"""A tiny random folder of every family in ``tandem.model.families``, and what transformers computes with it: a new family is compared by a row here."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.model.decoder import Decoder, PackedContext

LATENT = {"kv_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "num_key_value_heads": 4, "attention_bias": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.3}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
TINY: dict[str, dict[str, Any]] = {
    "cohere": {"head_dim": 16, "use_qk_norm": True, "logit_scale": 0.3, "attention_bias": True},
    "cohere2": {"num_hidden_layers": 4, "sliding_window": 9, "logit_scale": 0.25, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "deepseek_v2": {
        **LATENT, "num_hidden_layers": 3, "q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "n_shared_experts": 2, "first_k_dense_replace": 1, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7,
        "rope_parameters": YARN,
    },
    "deepseek_v3": {
        **LATENT, "num_hidden_layers": 3, "q_lora_rank": 28, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "rope_parameters": YARN,
    },
    "gemma": {"head_dim": 16, "attention_bias": True},
    "gemma2": {
        "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 9, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
    },
    "gemma3_text": {
        "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 9, "query_pre_attn_scalar": 400, "final_logit_softcapping": 3.0, "layer_types": [
            "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"
        ], "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "glm4": {"head_dim": 16, "partial_rotary_factor": 0.5},
    "glm4_moe": {
        "num_hidden_layers": 3, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1,
        "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.7, "use_qk_norm": True, "attention_bias": True, "head_dim": 16,
    },
    "gpt_oss": {
        "num_hidden_layers": 3, "intermediate_size": 24, "num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 9,
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False},
    },
    "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3, "logits_scaling": 0.8, "attention_bias": True,
    },
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 9, "head_dim": 16},
    "mixtral": {"num_local_experts": 4},
    "olmo2": {"attention_bias": True},
    "olmo3": {
        "num_hidden_layers": 4, "sliding_window": 9, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "phi3": {"sliding_window": 9},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen2_moe": {**EXPERTS, "num_hidden_layers": 3, "shared_expert_intermediate_size": 40},
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3_moe": {**EXPERTS, "head_dim": 16},
    "qwen3_next": {
        **EXPERTS, "num_hidden_layers": 4, "shared_expert_intermediate_size": 40, "head_dim": 16, "partial_rotary_factor": 0.5, "attention_bias": True,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 12, "linear_value_head_dim": 10, "linear_conv_kernel_dim": 3,
    },
    "smollm3": {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 9},
}  # fmt: skip
"""By ``model_type``: keys of a ``config.json`` that turn on what the family has beside the sizes of ``peer_model``."""
BY_OTHERS = ("cohere2", "deepseek_v2", "gemma", "gemma3_text", "glm4", "glm4_moe", "llama", "mistral", "mixtral", "olmo2", "qwen2", "qwen2_moe", "qwen3")
"""Families whose terms are all in others, so that ``make test`` leaves them out."""
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
SEQUENCES = [torch.randint(3, 40, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]


class Tiny(NamedTuple):
    """A random model of ``family`` in transformers, and the folder that it was saved to, with a tokenizer."""

    family: str
    peer: Any
    folder: Path


def peer_config(model_type: str, **config: Any) -> Any:
    """Returns the configuration in transformers of a model of ``SIZES``, changed by ``config``."""
    import transformers

    return transformers.AutoConfig.for_model(model_type, **{**SIZES, **config})


def random_peer(model_type: str, seed: int = 0, **config: Any) -> Any:
    """Returns a transformers model in which no parameter has a special value."""
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(peer_config(model_type, **config)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.15)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.2)
    return model


def packed_hidden(decoder: Decoder, sequences: list[Tensor]) -> Tensor:
    bounds = torch.tensor([0, *map(len, sequences)]).cumsum(0).to(torch.int32)
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return decoder(torch.cat(sequences), positions, PackedContext(bounds, max(map(len, sequences))))


def logits_of(decoder: Decoder) -> Tensor:
    with torch.no_grad():
        return decoder.logits(packed_hidden(decoder, SEQUENCES))


def peer_logits(peer: Any, sequences: Sequence[Tensor] = SEQUENCES) -> Tensor:
    with torch.no_grad():
        return torch.cat([peer(s.unsqueeze(0)).logits[0] for s in sequences])
