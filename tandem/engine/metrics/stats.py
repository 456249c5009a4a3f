"""What an engine does now, as plain numbers."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """``num_requests_running``: sequences that hold a row. ``num_requests_waiting``: those that hold nothing.
    ``kv_cache_usage``: share of the cache's blocks that somebody holds. ``num_preemptions``: since the start.
    ``step_tokens``: tokens that the last step computed. ``num_requests``: requests that are not answered yet. ``num_swaps``: of
    the preemptions, those by swap. ``num_drafts``: proposals of ``num_draft_tokens`` tokens in all, of which
    ``num_accepted_tokens`` were right, since the start."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float
    num_preemptions: int
    step_tokens: int
    num_requests: int
    num_swaps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
