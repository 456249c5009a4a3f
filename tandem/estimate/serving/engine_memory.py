"""The memory of each GPU of an engine, and the blocks of KV cache that it leaves. Imports no torch."""

from dataclasses import dataclass, fields, replace

from tandem.estimate.count_bytes import running_state_bytes
from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.model_bytes import kv_bytes_per_token, state_bytes, state_snapshots
from tandem.estimate.pod_gpu import (
    ENGINE_CONTEXT_BYTES,
    cache_tokens_beside,
    cache_tokens_within,
    engine_weight_bytes,
    engine_working_bytes,
)
from tandem.estimate.serving.kv_cache import cached_token_bytes, held_tokens, token_bytes
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.weight_formats import UNQUANTIZED, quantized_weight_bytes
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError
from tandem.types.kv_cache import BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of one GPU, which add up to ``total``. ``context``: CUDA's context, libraries and graphs. ``unused``: what ``gpu_memory_utilization`` leaves to
    fragmentation and other programs. ``states``: of linear attention, of the sequences that run; ``snapshots``: those in the prefix cache. ``num_blocks``,
    ``num_snapshots``: of the KV cache, of an engine."""

    weights: int
    kv_cache: int
    activations: int
    context: int
    unused: int
    num_blocks: int
    states: int = 0
    snapshots: int = 0
    num_snapshots: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    def by_kind(self) -> dict[str, int]:
        """Returns the bytes by kind, of those that the model has."""
        return {field.name: size for field in fields(self) if not field.name.startswith("num_") and (size := getattr(self, field.name))}

    @property
    def cache_tokens(self) -> int:
        return self.num_blocks * BLOCK_TOKENS


def predict_engine_memory(shapes: ModelShapes, layout: ServingLayout, hardware: Hardware) -> EngineMemory:
    """Returns the memory of one GPU. The blocks are those that the engine itself would allocate (``tandem.engine.settings`` asks the same function). Raises
    ``UserError`` if not one sequence of ``max_model_len`` tokens fits."""
    layout.check(shapes, hardware)
    args, ranks, token = layout.engine_args(), layout.tensor, cached_token_bytes(shapes, layout)
    is_plain = layout.quantization in ("bf16", "fp16")
    weights = engine_weight_bytes(shapes, UNQUANTIZED, UNQUANTIZED) if is_plain else quantized_weight_bytes(shapes, layout.quantization)
    if is_plain and shapes.latent is None and ranks <= shapes.num_key_value_heads:
        tokens = cache_tokens_within(shapes, args, UNQUANTIZED, hardware.memory_bytes)
    else:
        tokens = cache_tokens_beside(weights, token, shapes, args, hardware.memory_bytes)
    length = layout.max_model_len or shapes.default_context
    if tokens < held_tokens(shapes, length):
        share = int(layout.gpu_memory_utilization * hardware.memory_bytes) / 2**30
        raise UserError(
            f"{layout.quantization} weights of {weights / ranks / 2**30:,.1f} GiB on each of {ranks} {hardware.name} leave {max(0, tokens):,} tokens of KV "
            f"cache in {share:,.1f} GiB, and one sequence has up to {length:,}; use more GPUs, fewer bits, or a smaller max_model_len"
        )
    blocks = tokens // BLOCK_TOKENS
    states = running_state_bytes(shapes, args)
    own = blocks * BLOCK_TOKENS * kv_bytes_per_token(shapes, UNQUANTIZED, layout.kv_cache_dtype)
    # As ``tandem.engine.settings.resolve`` counts them.
    num_snapshots = min(blocks, state_snapshots(shapes, own)) if args.finds_prefixes else 0
    memory = EngineMemory(
        weights // ranks, blocks * BLOCK_TOKENS * token_bytes(shapes, layout) // ranks, (engine_working_bytes(shapes, args) - states) // ranks,
        ENGINE_CONTEXT_BYTES, 0, blocks, states // ranks, num_snapshots * state_bytes(shapes) // ranks, num_snapshots,
    )  # fmt: skip
    return replace(memory, unused=hardware.memory_bytes - memory.total)
