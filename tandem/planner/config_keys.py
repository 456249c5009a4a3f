"""The keys of a Hugging Face ``config.json`` that the planner understands, by what they mean for sizes. Imports no torch."""

import re
from collections.abc import Iterable
from typing import Any

from tandem.types.errors import UserError

LINEAR_ATTENTION = (
    "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "full_attention_interval",
)  # fmt: skip
"""The sizes of linear attention, which are understood of families that have it here."""
SIZES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim",),
    "intermediate_size": ("intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length", "model_max_length"),
    "num_experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "num_experts_per_tok": ("num_experts_per_tok", "moe_top_k", "moe_topk"),
    "moe_intermediate_size": ("moe_intermediate_size",),
    "sliding_window": ("sliding_window",),
}
"""Of each size, the keys that name it."""
OTHER_SIZES = (
    "vocab_size", "tie_word_embeddings", "multi_query", "gated_mlp", "num_labels", "id2label", "label2id", "num_key_value_groups",
    # windows
    "layer_types", "use_sliding_window", "max_window_layers", "sliding_window_pattern", "_sliding_window_pattern",
    # experts
    "mlp_only_layers", "decoder_sparse_step", "moe_layer_freq", "mlp_layer_types", "first_k_dense_replace", "shared_expert_intermediate_size",
    "n_shared_experts", "num_shared_experts",
    # latent attention; transformers writes the sum of both parts of a head too
    "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim",
    # biases and norms
    "attention_bias", "qkv_bias", "attn_bias", "mlp_bias", "use_bias", "use_qk_norm", "qk_norm",
)  # fmt: skip
NO_SIZES = (
    # which model it is, and what wrote the file
    "architectures", "model_type", "_name_or_path", "name_or_path", "auto_map", "transformers_version", "_commit_hash", "torch_dtype", "dtype",
    "tokenizer_class", "task_specific_params", "finetuning_task", "language", "problem_type", "torchscript", "use_bfloat16", "tf_legacy_loss",
    "unsloth_version", "init_device",
    # arithmetic
    "hidden_act", "hidden_activation", "activation_function", "activation", "rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps", "layer_norm_epsilon",
    "norm_type", "use_rms_norm", "logits_scaling", "logit_scale", "embedding_multiplier", "attention_multiplier", "residual_multiplier",
    "query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "attention_softmax_in_fp32", "scale_attn_weights",
    "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "clip_qkv", "no_bias", "scale_embedding", "multiply_number_of_posemb", "normalized_eps",
    "qk_layernorm", "pretraining_tp", "slow_but_exact", "apply_residual_connection_post_layernorm", "use_parallel_residual", "parallel_attn",
    "new_decoder_architecture", "alibi", "word_embed_proj_dim", "do_layer_norm_before", "layer_norm_elementwise_affine", "_remove_final_layer_norm",
    "use_parallel_block", "use_gated_activation", "use_embedding_sharing", "use_parallel_embedding", "position_embedding_type", "layer_switch",
    "order_of_interleaved_layers", "full_attn_mod", "interpolate_factor", "use_bidirectional_attention", "is_causal", "rotary", "bias", "inference_runner",
    "swiglu_alpha", "swiglu_limit",
    "num_ln_in_parallel_attn", "enable_bias", "scale_attention_softmax_in_fp32", "use_qkv_bias", "learned_pos_emb", "embedding_fraction",
    # positions
    "partial_rotary_factor", "rotary_pct", "rotary_dim", "rotary_emb_base", "original_max_position_embeddings", "use_mrope", "sliding_window_size",
    "initial_context_length",
    # training from scratch
    "initializer_range", "initializer_factor", "init_method_std", "init_std", "layerdrop", "pad_token_id",
    # routing, which sends a token to as many experts however it chooses them
    "norm_topk_prob", "routed_scaling_factor", "scoring_func", "topk_method", "topk_group", "n_group", "aux_loss_alpha", "seq_aux", "router_aux_loss_coef",
    "router_aux_loss_factor", "router_z_loss_coef", "router_jitter_noise", "output_router_logits", "ep_size", "moe_router_dtype", "norm_topk_prob",
    "experts_per_token",
    # modules for speculative decoding, which are beside the model and not in its published number of parameters
    "num_nextn_predict_layers", "num_mtp_layers",
    # generation and attention of encoders, which old files repeat
    "use_cache", "is_decoder", "is_encoder_decoder", "add_cross_attention", "cross_attention_hidden_size", "tie_encoder_decoder", "chunk_size_feed_forward",
    "prefix", "min_length", "max_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature", "top_k", "top_p",
    "typical_p", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens",
    "begin_suppress_tokens", "num_return_sequences", "output_scores", "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate",
    "remove_invalid_values", "exponential_decay_length_penalty", "pruned_heads", "sep_token_id", "cache_implementation", "use_flash_attn", "attn_config",
    "quantization_config", "compression_config",
)  # fmt: skip
NO_SIZE_PATTERN = re.compile(
    r".*_token_ids?|.*_token_index|.*dropout.*|.*_pdrop|.*_drop|rope_.*|.*_rope_.*|.*rotary_.*|summary_.*|_?attn_implementation.*|_experts_implementation.*|"
    r"initializer_.*|.*_loss_coef|max_length"
)
"""Keys that change no size, whatever precedes or follows."""


def refuse_unknown(config: dict[str, Any], where: str, ignored: Iterable[str]) -> None:
    """Raises ``UserError`` for keys that may change a size and are not understood, by name. A key that is null, false, 0 or empty turns nothing on."""
    understood = {key for keys in SIZES.values() for key in keys} | set(OTHER_SIZES) | set(NO_SIZES) | set(ignored)
    unknown = sorted(key for key, value in config.items() if key not in understood and value and not NO_SIZE_PATTERN.fullmatch(key))
    if unknown:
        names = ", ".join(unknown[:8])
        more = f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""
        raise UserError(
            f"'{where}' has fields that the planner does not understand: {names}{more}; name those that change no size with "
            f"--ignore-fields {','.join(unknown)}, or give the sizes by flag"
        )
