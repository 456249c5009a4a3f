"""Engine statistics as plain numbers."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """What an engine does now. ``num_requests_running``: sequences that hold a row. ``num_requests_waiting``: those that hold none.
    ``kv_cache_usage``: the share of the cache's blocks that is held. ``num_preemptions``: since the start.
    ``step_tokens``: tokens that the last step computed. ``num_requests``: requests that are not finished yet. ``num_swaps``: of
    the preemptions, those by swap. ``num_drafts``: proposals of ``num_draft_tokens`` tokens in all, of which
    ``num_accepted_tokens`` were accepted, since the start."""

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


@dataclass(frozen=True, slots=True)
class SpecDecodeStats:
    """Counts since the engine started: ``proposals`` (one a sequence and step), draft tokens ``proposed`` and ``accepted``. Each proposal
    also yields the model's own token, accepted or not."""

    proposals: int = 0
    proposed: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class CumulativeStats:
    """What an engine has done since it started. ``computed_tokens`` went through the model, ``drawn_tokens`` were drawn from it. ``busy_s``:
    wall time of all steps. ``padding_tokens``: those that a static batch spends on prompts shorter than its longest and on rows that ended
    before it; they are counted, not computed. ``kv_slots``: token slots of the cache that sequences held, summed over samples,
    and ``kv_unused`` those of them that were empty. ``first_token_s``: from a request's arrival to its first token, the latest
    4,096."""

    steps: int = 0
    computed_tokens: int = 0
    drawn_tokens: int = 0
    busy_s: float = 0.0
    padding_tokens: int = 0
    kv_slots: int = 0
    kv_unused: int = 0
    first_token_s: tuple[float, ...] = ()
    speculation: SpecDecodeStats = field(default_factory=SpecDecodeStats)

    @property
    def padding(self) -> float:
        """The share of padding in all tokens that a padded batch computes."""
        return self.padding_tokens / max(1, self.padding_tokens + self.computed_tokens)

    @property
    def kv_waste(self) -> float:
        """The share of the held slots that is empty."""
        return self.kv_unused / self.kv_slots if self.kv_slots else 0.0
