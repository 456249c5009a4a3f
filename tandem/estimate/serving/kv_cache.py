"""The KV cache of an engine: the bytes of a token, and how many tokens a sequence holds. Imports no torch."""

from tandem.estimate.model_bytes import cached_bytes_per_token, kv_bytes_per_token
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.weight_formats import UNQUANTIZED
from tandem.layout.shapes import ModelShapes
from tandem.types.kv_cache import BLOCK_TOKENS


def token_bytes(shapes: ModelShapes, layout: ServingLayout) -> int:
    """Returns the bytes of a token's keys and values on all GPUs of an engine together, in all layers. Ranks that share a head of keys and values each
    hold it, and all hold the compressed vector of latent attention."""
    return _copies(shapes, layout) * kv_bytes_per_token(shapes, UNQUANTIZED, layout.kv_cache_dtype)


def cached_token_bytes(shapes: ModelShapes, layout: ServingLayout) -> int:
    """As ``token_bytes``, with the snapshots of the states of linear attention."""
    return _copies(shapes, layout) * cached_bytes_per_token(shapes, UNQUANTIZED, layout.kv_cache_dtype)


def _copies(shapes: ModelShapes, layout: ServingLayout) -> int:
    return layout.tensor if shapes.latent is not None else max(1, layout.tensor // shapes.num_key_value_heads)


def held_tokens(shapes: ModelShapes, tokens: float) -> float:
    """Returns the tokens of cache that a sequence of ``tokens`` holds, half a block of which is empty on average. Blocks outside the attention window of
    every layer are freed, as ``KVCacheManager.remove_skipped_blocks`` does."""
    widest = widest_window(shapes)
    return min(tokens, tokens if widest is None else widest + BLOCK_TOKENS) + BLOCK_TOKENS / 2


def widest_window(shapes: ModelShapes) -> int | None:
    """Returns the tokens of the widest attention window; ``None`` where some layer attends to all."""
    windows = [window for window in shapes.layer_windows if window is not None]
    return max(windows) if windows and len(windows) == len(shapes.layer_windows) else None


def attended_tokens(shapes: ModelShapes, tokens: float) -> float:
    """Returns the tokens that a query after ``tokens`` tokens attends to, over all layers."""
    if not shapes.layer_windows:
        return shapes.cached_layers * tokens
    return sum(min(tokens, window or tokens) for window in shapes.layer_windows)


def read_bytes(shapes: ModelShapes, layout: ServingLayout, tokens: float) -> float:
    """Returns the bytes of the cache that one GPU reads for a query after ``tokens`` tokens; of a layer with a window those inside it."""
    return token_bytes(shapes, layout) / layout.tensor / shapes.cached_layers * attended_tokens(shapes, tokens)
