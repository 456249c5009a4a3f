"""Builds the components of an engine for one decoder: scheduler, model runner, and their caches."""

from typing import NamedTuple

import torch

from tandem.config.engine import SpeculativeConfig
from tandem.engine.core.preemption import PreemptionCostMeter, PreemptionPolicy
from tandem.engine.core.prefill_budget import PrefillBudget
from tandem.engine.core.scheduler import Scheduler, SchedulerConfig
from tandem.engine.executor.input_batch import InputBatch
from tandem.engine.executor.model_runner import ModelRunner
from tandem.engine.executor.ranks import Ranks
from tandem.engine.kv_cache.block_pool import blocks_for
from tandem.engine.kv_cache.cache_tensors import host_pool, make_cache
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.engine.kv_cache.state_rows import StateRows
from tandem.engine.lora.adapters import Adapters
from tandem.engine.pooling.pooler import Pooler
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.draft_switch import DraftSwitch
from tandem.engine.spec_decode.proposers import make_proposer
from tandem.engine.spec_decode.state_proposer import DraftHead
from tandem.engine.spec_decode.step_costs import StepCosts
from tandem.kernels.api import CacheLayer
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.types import UserError, WeightVersion


class EngineComponents(NamedTuple):
    """``launches_ahead``: whether a step is launched before the previous one has ended. ``cost_meter``: measures preemption costs."""

    scheduler: Scheduler
    runner: ModelRunner
    launches_ahead: bool
    cost_meter: PreemptionCostMeter


def make_components(
    decoder: Decoder, settings: EngineSettings, version: WeightVersion, ranks: Ranks | None, speculative: SpeculativeConfig | None,
    draft: Decoder | DraftHead | None, pooler: Pooler | None = None,
) -> EngineComponents:
    """Returns the components of an engine.

    Args:
        decoder: The packed model.
        settings: The resolved options of the engine.
        version: The version of the decoder's weights.
        ranks: The other tensor-parallel ranks, which allocate their caches here.
        speculative: How draft tokens are proposed; ``None``: not at all.
        draft: The draft model of speculative method ``draft``, or the head of one that reads hidden states.
        pooler: Of a model that embeds or scores texts.

    Raises:
        UserError: Settings that contradict each other.
    """
    shapes, weights = decoder.shapes, decoder.embed_tokens
    launches_ahead = launches_steps_ahead(settings, weights.device, ranks is not None, speculative is not None)
    batch = InputBatch(
        settings.max_num_seqs, settings.max_model_len, torch.promote_types(weights.dtype, torch.float32), weights.device,
        settings.num_blocks if launches_ahead else None,
    )
    adapters = Adapters(decoder, settings.max_loras, settings.max_lora_rank, ranks)
    kv_cache = KVCacheManager(
        settings.num_blocks,
        enable_prefix_caching=settings.enable_prefix_caching,
        window=widest_window(shapes),
        reservation=blocks_for(settings.max_model_len) if settings.cache_implementation == "static" else 0,
        num_host_blocks=settings.swap_blocks,
        weight_version=version,
        adapter_key=adapters.key,
        states=state_rows(shapes, settings, launches_ahead),
    )
    step_costs, draft_switch = None, None
    if speculative is not None and speculative.measures_costs:
        limit = speculative.default_limit(weights.device.type)
        # A match says of each draft token how likely it is, so that the cost of one decides, and not that of whole drafts.
        step_costs, draft_switch = (StepCosts(limit), None) if speculative.method == "suffix" else (None, DraftSwitch(limit, weights.device.type))
    proposer = make_proposer(speculative, draft, shapes, settings, batch, step_costs)
    if ranks is not None:
        sizes = {
            "num_blocks": settings.num_blocks, "swap_blocks": settings.swap_blocks, "kv_cache_dtype": settings.kv_cache_dtype,
            "state_rows": num_state_rows(settings, launches_ahead), "swap_states": settings.swap_states,
        }  # fmt: skip
        ranks.run("allocate", sizes, lambda: None)
    caches = allocate_kv_cache(decoder, settings, launches_ahead)
    host = host_pool(caches + (proposer.caches if proposer is not None else []), settings.swap_blocks, settings.swap_states)
    first = settings.max_num_seqs + launches_ahead + settings.state_snapshots
    runner = ModelRunner(decoder, caches, batch, adapters, ranks, host, proposer, pooler, range(first, first + settings.draft_states))
    if launches_ahead and weights.device.type == "cuda" and not settings.enforce_eager and shapes.linear_attention is None:
        runner.make_graphs()
    meter = PreemptionCostMeter(shapes, settings.num_blocks, runner.measure_swap)
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        batching=settings.admission,
        watermark_blocks=int(settings.watermark * settings.num_blocks),
        speculative_batch_limit=0 if speculative is None else speculative.batch_limit(weights.device.type, settings.max_num_seqs),
        max_draft_tokens=settings.draft_states if shapes.linear_attention is not None else None,
    )
    policy = PreemptionPolicy(settings.preemption_mode if settings.swap_blocks else "recompute", meter.costs)
    prefill_budget = None if settings.max_prefill_slowdown is None else PrefillBudget(settings.max_prefill_slowdown)
    read_back = lambda sequences: batch.read_back(sequences, kv_cache.weight_version)
    scheduler = Scheduler(config, kv_cache, read_back, policy, step_costs, prefill_budget, draft_switch)
    return EngineComponents(scheduler, runner, launches_ahead, meter)


def allocate_kv_cache(decoder: Decoder, settings: EngineSettings, launches_ahead: bool) -> list[CacheLayer]:
    """Returns an empty KV cache for ``decoder``. With ``launches_ahead`` it has one more block than the scheduler allocates, and one more row
    of states, for padding rows."""
    return make_cache(decoder, settings.num_blocks + launches_ahead, settings.kv_cache_dtype, num_state_rows(settings, launches_ahead))


def num_state_rows(settings: EngineSettings, launches_ahead: bool) -> int:
    """Returns the rows of states of each layer with linear attention: of running sequences, of snapshots and of draft tokens, in this order."""
    return settings.max_num_seqs + launches_ahead + settings.state_snapshots + settings.draft_states


def state_rows(shapes: ModelShapes, settings: EngineSettings, launches_ahead: bool) -> StateRows | None:
    """Returns the rows for states of linear attention behind those of running sequences; ``None`` for a model without them."""
    first = settings.max_num_seqs + launches_ahead
    return None if shapes.linear_attention is None else StateRows(range(first, first + settings.state_snapshots), settings.swap_states)


def widest_window(shapes: ModelShapes) -> int:
    """Returns the size of the widest layer's attention window in tokens; 0: unlimited."""
    windows = [shapes.window(layer) for layer in range(shapes.num_hidden_layers)]
    return 0 if None in windows else max(window or 0 for window in windows)


def launches_steps_ahead(settings: EngineSettings, device: torch.device, has_ranks: bool, has_speculation: bool) -> bool:
    """Returns whether an engine launches steps ahead. Raises ``UserError`` if ``async_scheduling`` is set and not supported."""
    reason = "speculation needs each token before the next step" if has_speculation else "other ranks follow each step" if has_ranks else ""
    if settings.async_scheduling and reason:
        raise UserError(f"engine async_scheduling is on and {reason}; leave it out")
    return device.type == "cuda" and not reason if settings.async_scheduling is None else settings.async_scheduling
