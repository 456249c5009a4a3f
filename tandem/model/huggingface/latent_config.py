"""Reads and writes the sizes of multi-head latent attention in a ``config.json``. Imports no torch."""

from typing import Any

from tandem.layout.latent_attention import LatentAttention
from tandem.model.huggingface.config_reader import ConfigReader


def read_latent(read: ConfigReader, defaults: LatentAttention) -> LatentAttention:
    """Returns the sizes; a missing key takes that of ``defaults``. A null ``q_lora_rank`` means that queries are not compressed."""
    sizes = {name: read.integer(name, getattr(defaults, name)) for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}
    is_compressed = read.config.get("q_lora_rank", defaults.q_lora_rank) is not None
    return LatentAttention(**sizes, q_lora_rank=read.integer("q_lora_rank", defaults.q_lora_rank) if is_compressed else 0)


def latent_keys(latent: LatentAttention) -> dict[str, Any]:
    """Returns the keys that describe ``latent``, with the two sums that transformers writes."""
    return {
        "q_lora_rank": latent.q_lora_rank or None,
        "kv_lora_rank": latent.kv_lora_rank,
        "qk_nope_head_dim": latent.qk_nope_head_dim,
        "qk_rope_head_dim": latent.qk_rope_head_dim,
        "v_head_dim": latent.v_head_dim,
        "head_dim": latent.qk_rope_head_dim,
        "qk_head_dim": latent.head_dim,
    }
