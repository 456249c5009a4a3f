"""The memory of keys and values, a layer at a time."""

from tandem.kernels import KVLayer, empty_cache, stored_dtype
from tandem.model.decoder import Decoder
from tandem.types.kv_cache import KVCacheDtype


def make_cache(decoder: Decoder, blocks: int, kv_cache_dtype: KVCacheDtype = "auto") -> list[KVLayer]:
    """An empty cache of ``blocks`` blocks for the heads that ``decoder`` has on its rank, a layer for each of its own."""
    local, weights = decoder.local, decoder.embed_tokens
    sizes = (blocks, local.num_kv_heads, local.head_dim)
    return empty_cache(sizes, local.num_layers, stored_dtype(kv_cache_dtype, weights.dtype), weights.device)
