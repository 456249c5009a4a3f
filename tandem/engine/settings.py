"""What an engine can be told, apart from its model."""

from dataclasses import dataclass

from tandem.engine.kv_cache.block_table import blocks_for
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype, check_kv_cache_dtype

BATCHING = ("static", "dynamic", "continuous", "chunked")
KV = ("static", "paged")
PREEMPTION = ("auto", "swap", "recompute")
OVERLAP = ("auto", "on", "off")
CUDA_GRAPHS = ("auto", "off")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """``max_model_len``: tokens of one sequence, prompt and completion together. ``num_blocks``: blocks of the KV
    cache. ``max_num_seqs``: sequences that decode at once. ``max_num_batched_tokens``: tokens that one step computes
    at most. ``seed``: of requests that bring none. ``max_loras``: adapters held at once (0: none are taken), each of a rank
    up to ``max_lora_rank``. ``kv_cache_dtype``: what keys and values are kept in.

    ``batching``: who may join those that run. ``static``: nobody; a batch keeps its rows and blocks until its last sequence
    ends. ``dynamic``: nobody, but who ends gives them back. ``continuous``: everybody, a prompt in one piece. ``chunked``:
    everybody, a prompt in the pieces that the budget leaves. ``enable_chunked_prefill=False`` makes ``chunked``
    ``continuous``. ``kv``: ``paged``, or ``static``: at its admission a sequence reserves ``max_model_len`` tokens side
    by side, and finds no prefix.

    ``preemption``: ``swap`` (as far as ``swap_blocks`` blocks of host memory go), ``recompute``, or ``auto``, whichever costs
    less. ``watermark``: the share of the blocks that an admission leaves free while others run. ``deterministic``: refuse
    what makes a token's bits depend on more than its prefix, weights and settings.

    ``overlap``: a step is planned and launched while the device computes the one before (``auto``: on a GPU). ``cuda_graphs``: steps in which
    everybody decodes are replayed from graphs, on a GPU and with ``overlap``.
    """

    max_model_len: int
    num_blocks: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 4096
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    seed: int = 0
    max_loras: int = 0
    max_lora_rank: int = 16
    kv_cache_dtype: KVCacheDtype = "auto"
    batching: str = "chunked"
    kv: str = "paged"
    preemption: str = "auto"
    swap_blocks: int = 0
    watermark: float = 0.01
    deterministic: bool = True
    overlap: str = "auto"
    cuda_graphs: str = "auto"

    @property
    def joins(self) -> str:
        """``batching``, with ``enable_chunked_prefill`` seen to."""
        return "continuous" if self.batching == "chunked" and not self.enable_chunked_prefill else self.batching

    @property
    def finds_prefixes(self) -> bool:
        return self.enable_prefix_caching and self.kv == "paged"

    def check(self, max_position_embeddings: int) -> None:
        """Raise ``UserError`` for a value that cannot work with a model of ``max_position_embeddings`` positions."""
        lowest = {
            "max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_loras": 0, "max_lora_rank": 1, "swap_blocks": 0,
        }
        for name, low in lowest.items():
            if getattr(self, name) < low:
                raise UserError(f"engine {name} is {getattr(self, name)}; it must be at least {low}")
        check_kv_cache_dtype(self.kv_cache_dtype)
        switches = {"batching": BATCHING, "kv": KV, "preemption": PREEMPTION, "overlap": OVERLAP, "cuda_graphs": CUDA_GRAPHS}
        for name, known in switches.items():
            if getattr(self, name) not in known:
                raise UserError(f"engine {name} is {getattr(self, name)!r}; it must be one of {', '.join(known)}")
        if not 0 <= self.watermark < 1:
            raise UserError(f"engine watermark is {self.watermark}; it must be a share of the blocks, from 0 to below 1")
        if self.preemption == "swap" and not self.swap_blocks:
            raise UserError("engine preemption is 'swap' and there is no swap space; raise swap_tokens or choose 'recompute'")
        if self.max_model_len > max_position_embeddings:
            raise UserError(f"engine max_model_len is {self.max_model_len}; the model has {max_position_embeddings} positions")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise UserError(
                f"engine max_num_batched_tokens is {self.max_num_batched_tokens}; it must be at least max_num_seqs "
                f"({self.max_num_seqs}), one token for each sequence"
            )
        if self.joins != "chunked" and self.max_num_batched_tokens < self.max_model_len:
            raise UserError(
                f"engine max_num_batched_tokens is {self.max_num_batched_tokens}; without chunked prefill it must be "
                f"at least max_model_len ({self.max_model_len})"
            )
        if self.num_blocks < blocks_for(self.max_model_len):
            raise UserError(
                f"engine KV cache has {self.num_blocks} blocks; one sequence of max_model_len ({self.max_model_len}) "
                f"tokens needs {blocks_for(self.max_model_len)}: enlarge the cache or lower max_model_len"
            )
