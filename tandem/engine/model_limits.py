"""What the cache or the states of a model rule out. Imports no torch, as the controller of a pod checks its recipe with it."""

from tandem.config.engine import EngineArgs
from tandem.layout.shapes import ModelShapes
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype


def check_kv_cache_dtype(shapes: ModelShapes, kv_cache_dtype: KVCacheDtype, name: str = "kv_cache_dtype") -> None:
    """Raises ``UserError`` for a ``kv_cache_dtype`` that the cache of a model of ``shapes`` cannot have. ``name``: of the option."""
    if kv_cache_dtype == "int4" and shapes.latent is not None:
        raise UserError(f"{name} is 'int4', which a model with latent attention cannot have: its rows are compressed already; choose int8 or fp8_e4m3")


def check_states(args: EngineArgs, shapes: ModelShapes) -> None:
    """Raises ``UserError`` for an option that layers with linear attention do not have."""
    if args.speculative_config is not None and args.speculative_config.method == "mtp" and shapes.linear_attention is not None:
        raise UserError(
            f"speculative_config method is 'mtp', which a {shapes.architecture} model with layers of linear attention does not support; "
            "choose 'ngram', 'suffix', 'draft' or 'eagle3'"
        )
