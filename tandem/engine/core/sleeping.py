"""An engine gives the memory of its KV cache back for a while."""

from tandem.engine.core import preemption
from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.parts import Parts, model_cache
from tandem.engine.kv_cache.cache_tensors import make_cache
from tandem.engine.settings import EngineSettings
from tandem.engine.spec_decode.draft_model import DraftModel


def fall_asleep(parts: Parts) -> None:
    """Give the caches back, while no step is under way. Requests under way are computed again."""
    state, runner, overlap = parts
    preemption.preempt_all(state, Transition.UPDATE)
    state.allocator.forget_all()
    runner.caches = []
    if overlap is not None and overlap.graphs is not None:
        overlap.graphs.forget()
    if isinstance(runner.proposer, DraftModel):
        runner.proposer.caches = []


def wake_up(parts: Parts, settings: EngineSettings) -> None:
    """Make the caches anew."""
    _, runner, overlap = parts
    runner.caches = model_cache(runner.decoder, settings, overlap is not None)
    if isinstance(runner.proposer, DraftModel):
        runner.proposer.caches = make_cache(runner.proposer.decoder, settings.num_blocks)
