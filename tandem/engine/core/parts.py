"""What an engine is made of, put together for one decoder."""

from typing import NamedTuple

import torch

from tandem.config.engine import SpeculativeConfig
from tandem.engine.core.costs import preemption_costs
from tandem.engine.core.state import SchedulerState, limits_of
from tandem.engine.executor.input_batch import RowTable
from tandem.engine.executor.model_runner import Runner
from tandem.engine.executor.overlap import Overlap, make_overlap, overlaps_steps
from tandem.engine.executor.ranks import Ranks
from tandem.engine.kv_cache.block_copies import host_pool
from tandem.engine.kv_cache.block_pool import BlockAllocator
from tandem.engine.kv_cache.cache_tensors import make_cache
from tandem.engine.kv_cache.prefix_cache import PrefixCache
from tandem.engine.lora.adapters import Adapters
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.proposers import make_proposer
from tandem.kernels.api import KVLayer
from tandem.model.decoder import Decoder
from tandem.types import WeightVersion


class Parts(NamedTuple):
    """What plans steps, what computes them, and what launches them ahead, where anything does."""

    state: SchedulerState
    runner: Runner
    overlap: Overlap | None


def make_parts(
    decoder: Decoder, settings: EngineSettings, version: WeightVersion, ranks: Ranks | None, speculative: SpeculativeConfig | None,
    draft: Decoder | None,
) -> Parts:
    """The parts of an engine whose ``decoder``, packed, has the weights ``version``; the other ``ranks`` get their caches too. Raises
    ``UserError`` for settings that do not go together."""
    shapes, weights = decoder.shapes, decoder.embed_tokens
    adapters = Adapters(decoder, settings.max_loras, settings.max_lora_rank, ranks)
    table = RowTable(settings.max_num_seqs, settings.max_model_len, torch.promote_types(weights.dtype, torch.float32))
    allocator = BlockAllocator(settings.num_blocks)
    state = SchedulerState(
        limits=limits_of(settings, shapes, 0 if speculative is None else speculative.guessing_seqs(weights.device.type)),
        allocator=allocator,
        prefix_cache=PrefixCache(allocator, settings.finds_prefixes),
        version=version,
        read_back=lambda sequences: table.read_back(sequences, state.version),
        adapter_key=adapters.key,
        host=BlockAllocator(settings.swap_blocks),
        costs=preemption_costs(shapes, str(weights.dtype).removeprefix("torch."), weights.device.type, settings.kv_cache_dtype),
    )
    proposer = make_proposer(speculative, draft, shapes, settings, table)
    if ranks is not None:
        sizes = {"num_blocks": settings.num_blocks, "swap_blocks": settings.swap_blocks, "kv_cache_dtype": settings.kv_cache_dtype}
        ranks.run("allocate", sizes, lambda: None)
    overlaps = overlaps_steps(settings, weights.device, ranks is not None, speculative is not None)
    caches = model_cache(decoder, settings, overlaps)
    host = host_pool(caches + (proposer.caches if proposer is not None else []), settings.swap_blocks)
    runner = Runner(decoder, caches, table, adapters, ranks, host, proposer)
    return Parts(state, runner, make_overlap(runner, settings) if overlaps else None)


def model_cache(decoder: Decoder, settings: EngineSettings, overlaps: bool) -> list[KVLayer]:
    """An empty cache for the model. ``overlaps``: one block more than is handed out, for rows that only fill up a batch."""
    return make_cache(decoder, settings.num_blocks + overlaps, settings.kv_cache_dtype)
