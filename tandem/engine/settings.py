"""``EngineSettings``: the ``EngineArgs`` of an engine, resolved for one model."""

from dataclasses import dataclass

import torch

from tandem.config.engine import EngineArgs
from tandem.engine.kv_cache.block_pool import blocks_for
from tandem.engine.model_limits import check_kv_cache_dtype
from tandem.engine.spec_decode.draft_size import DraftSize
from tandem.estimate.count_bytes import SAMPLE_BYTES, draft_states, lora_bytes, row_bytes, running_state_bytes
from tandem.estimate.model_bytes import kv_bytes_per_token, state_bytes, state_snapshots
from tandem.estimate.pod_gpu import cache_tokens_within
from tandem.kernels import BLOCK_TOKENS
from tandem.layout.shapes import ModelShapes
from tandem.runtime.machine.available_memory import total_bytes
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype

DEFAULT_CACHE_BYTES = 1 << 30
NO_DRAFT = DraftSize()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The options of ``EngineArgs`` that scheduling and execution depend on, by the same names; sizes in blocks of ``BLOCK_TOKENS`` tokens.

    ``num_blocks``: blocks of the KV cache. ``swap_blocks``: blocks of host memory for swapped-out sequences. ``state_snapshots``: snapshots of the states of
    linear attention in the prefix cache; ``swap_states``: such states in host memory; ``draft_states``: those after the draft
    tokens of one step. ``max_loras``: adapters held at
    once, 0 without LoRA. ``admission``: which sequences join a running batch: ``static``, ``dynamic``, ``continuous`` (whole prompts) or
    ``chunked``.
    """

    max_model_len: int
    num_blocks: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    max_prefill_slowdown: float | None = None
    enable_prefix_caching: bool = True
    seed: int = 0
    max_loras: int = 0
    max_lora_rank: int = 16
    kv_cache_dtype: KVCacheDtype = "auto"
    admission: str = "chunked"
    cache_implementation: str = "paged"
    preemption_mode: str = "auto"
    swap_blocks: int = 0
    state_snapshots: int = 0
    swap_states: int = 0
    draft_states: int = 0
    watermark: float = 0.01
    deterministic: bool = True
    async_scheduling: bool | None = None
    enforce_eager: bool = False

    def check(self, max_position_embeddings: int) -> None:
        """Raises ``UserError`` for a size that cannot work with a model of ``max_position_embeddings`` positions."""
        if self.max_model_len > max_position_embeddings:
            raise UserError(f"engine max_model_len is {self.max_model_len}; the model has {max_position_embeddings} positions")
        if self.num_blocks < blocks_for(self.max_model_len):
            raise UserError(
                f"engine KV cache has {self.num_blocks} blocks; one sequence of max_model_len ({self.max_model_len}) "
                f"tokens needs {blocks_for(self.max_model_len)}: raise kv_cache_tokens or lower max_model_len"
            )


def resolve(args: EngineArgs, shapes: ModelShapes, dtype: torch.dtype, draft: DraftSize = NO_DRAFT) -> EngineSettings:
    """Returns the settings of an engine for a model of ``shapes`` in ``dtype``, and a ``draft`` beside it. Raises ``UserError`` for what the model does not
    allow."""
    length = shapes.default_context if args.max_model_len is None else args.max_model_len
    args.check_length(length)
    check_kv_cache_dtype(shapes, args.kv_cache_dtype)
    block_bytes = (kv_bytes_per_token(shapes, str(dtype).removeprefix("torch."), args.kv_cache_dtype) + draft.token) * BLOCK_TOKENS
    fills_gpu = args.gpu_memory_utilization is not None and args.device != "cpu"
    num_blocks = _blocks_on_gpu(args, shapes, dtype, length, draft) if fills_gpu else _cache_blocks(args, length, block_bytes)
    snapshots = min(num_blocks, state_snapshots(shapes, num_blocks * (block_bytes - draft.token * BLOCK_TOKENS))) if args.finds_prefixes else 0
    swap_blocks, swap_states = _swap_space(args, shapes, block_bytes)
    settings = EngineSettings(
        max_model_len=length,
        num_blocks=num_blocks,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_prefill_slowdown=args.max_prefill_slowdown,
        enable_prefix_caching=args.finds_prefixes,
        seed=args.seed,
        max_loras=args.max_loras if args.enable_lora else 0,
        max_lora_rank=args.max_lora_rank,
        kv_cache_dtype=args.kv_cache_dtype,
        admission=args.admission,
        cache_implementation=args.cache_implementation,
        preemption_mode=args.preemption_mode,
        swap_blocks=swap_blocks,
        state_snapshots=snapshots,
        swap_states=swap_states,
        draft_states=draft_states(shapes, args),
        watermark=args.watermark,
        deterministic=args.deterministic,
        async_scheduling=args.async_scheduling,
        enforce_eager=args.enforce_eager,
    )
    settings.check(shapes.max_position_embeddings)
    check_engine_fits(args, shapes, length, num_blocks * block_bytes + snapshots * state_bytes(shapes) if args.device == "cpu" else 0)
    return settings


def _swap_space(args: EngineArgs, shapes: ModelShapes, block_bytes: int) -> tuple[int, int]:
    """Returns the blocks in the swap space, and the states of linear attention, which have half of it, and at least those of one sequence. Raises
    ``UserError`` if it is too small for those."""
    size, of_sequence = int(args.swap_space * 2**30), state_bytes(shapes)
    if not of_sequence or not size:
        return size // block_bytes, 0
    if size < of_sequence + block_bytes:
        raise UserError(
            f"engine swap_space is {args.swap_space} GiB, and a {shapes.architecture} model's states of one sequence take {of_sequence / 2**30:.4f} GiB, "
            "beside its keys and values; raise it, or leave it out"
        )
    states = max(1, size // 2 // of_sequence)
    return (size - states * of_sequence) // block_bytes, states


def _cache_blocks(args: EngineArgs, max_model_len: int, block_bytes: int) -> int:
    """Returns the number of KV-cache blocks: ``kv_cache_tokens``, or by default enough for ``max_num_seqs`` full sequences within
    ``DEFAULT_CACHE_BYTES``, and at least for one."""
    if args.kv_cache_tokens:
        return blocks_for(args.kv_cache_tokens)
    one = blocks_for(max_model_len)
    return max(one, min(one * args.max_num_seqs, DEFAULT_CACHE_BYTES // block_bytes))


def _blocks_on_gpu(args: EngineArgs, shapes: ModelShapes, dtype: torch.dtype, max_model_len: int, draft: DraftSize) -> int:
    """Returns the number of KV-cache blocks within the share ``gpu_memory_utilization`` of the GPU. Raises ``UserError`` if one sequence does not
    fit."""
    total = torch.cuda.get_device_properties(torch.device(args.device)).total_memory
    tokens = cache_tokens_within(shapes, args, str(dtype).removeprefix("torch."), total, draft.weights, draft.token)
    if tokens < max_model_len:
        raise UserError(
            f"engine gpu_memory_utilization is {args.gpu_memory_utilization}, which leaves {max(0, tokens):,} tokens of KV cache on a GPU of "
            f"{total / 2**30:.0f} GiB, and one sequence has up to {max_model_len:,}; raise it, or lower max_model_len"
        )
    return tokens // BLOCK_TOKENS


def check_engine_fits(args: EngineArgs, shapes: ModelShapes, max_model_len: int, cache_bytes: int) -> None:
    """Raises ``UserError`` for an option whose memory this machine does not have, before any of it is allocated. ``cache_bytes``: of the KV cache in
    host memory."""
    total = total_bytes()
    needs = {
        "max_num_seqs": args.max_num_seqs * row_bytes(max_model_len) + running_state_bytes(shapes, args),
        "kv_cache_tokens": cache_bytes,
        "swap_space": int(args.swap_space * 2**30),
        "max_loras": lora_bytes(shapes, args) if args.enable_lora else 0,
    }
    for name, needed in needs.items():
        if needed > total:
            also = {"max_num_seqs": " or max_model_len", "max_loras": " or max_lora_rank", "kv_cache_tokens": " or max_model_len"}.get(name, "")
            raise UserError(
                f"engine {name} is {getattr(args, name)}, which needs {needed / 2**30:,.1f} GiB of memory, and this machine has {total / 2**30:,.1f} GiB; "
                f"lower {name}{also}"
            )


def check_completions(count: int) -> None:
    """Raises ``UserError`` if this machine cannot hold ``count`` completions, however short."""
    needed, total = count * SAMPLE_BYTES, total_bytes()
    if needed > total:
        raise UserError(
            f"{count:,} completions are asked for, which need at least {needed / 2**30:,.1f} GiB of memory, and this machine has {total / 2**30:,.1f} GiB; "
            "lower sampling n, or give fewer prompts at once"
        )
