"""Sleeping: an engine frees the memory of its KV cache for a while."""

from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.parts import Parts, model_cache
from tandem.engine.kv_cache.cache_tensors import make_cache
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.draft_model import DraftModel


def fall_asleep(parts: Parts) -> None:
    """Frees the caches, while no step is in flight. Running requests are computed again."""
    scheduler, runner = parts.scheduler, parts.runner
    scheduler.preemption.preempt_all(Transition.UPDATE)
    scheduler.kv_cache.reset_prefix_cache()
    runner.caches = []
    if runner.graphs is not None:
        runner.graphs.forget()
    if isinstance(runner.proposer, DraftModel):
        runner.proposer.caches = []


def wake_up(parts: Parts, settings: EngineSettings) -> None:
    """Allocates the caches again."""
    runner = parts.runner
    runner.caches = model_cache(runner.decoder, settings, parts.launches_ahead)
    if isinstance(runner.proposer, DraftModel):
        runner.proposer.caches = make_cache(runner.proposer.decoder, settings.num_blocks)
