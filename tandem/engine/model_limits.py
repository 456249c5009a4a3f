"""What the cache of a model rules out. Imports no torch, as the controller of a pod checks its recipe with it."""

from tandem.layout.shapes import ModelShapes
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype


def check_kv_cache_dtype(shapes: ModelShapes, kv_cache_dtype: KVCacheDtype, name: str = "kv_cache_dtype") -> None:
    """Raises ``UserError`` for a ``kv_cache_dtype`` that the cache of a model of ``shapes`` cannot have. ``name``: of the option."""
    if kv_cache_dtype == "int4" and shapes.latent is not None:
        raise UserError(f"{name} is 'int4', which a model with latent attention cannot have: its rows are compressed already; choose int8 or fp8_e4m3")
