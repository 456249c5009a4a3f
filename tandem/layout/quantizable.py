"""What of a model cannot be quantized. Imports no torch."""

from tandem.layout.shapes import ModelShapes


def cannot(shapes: ModelShapes, method: str) -> str | None:
    """Returns what a model of ``shapes`` has that ``method`` cannot quantize, in words that follow "has"; ``None`` if it can."""
    if method == "awq" and not shapes.pre_norms:
        return "no norms before attention and MLP, into which --method awq folds its scales"
    return None


def cache_cannot(shapes: ModelShapes, kv_cache_dtype: str) -> str | None:
    """Returns why the cache of a model of ``shapes`` cannot have the dtype, in words that follow its name; ``None`` if it can."""
    if kv_cache_dtype == "int4" and shapes.latent is not None:
        return "which a model with latent attention cannot have: its rows are compressed already; choose int8 or fp8_e4m3"
    return None
