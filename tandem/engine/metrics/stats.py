"""Engine statistics as plain numbers."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current statistics. ``num_requests_running``: sequences that hold a row. ``num_requests_waiting``: those that hold none.
    ``kv_cache_usage``: the fraction of the cache's blocks that is held. ``num_preemptions``: since the start. ``step_tokens``: tokens that the
    last step computed. ``num_requests``: unfinished requests. ``num_swaps``: preemptions by swap. ``num_drafts``: proposals since the start, of
    ``num_draft_tokens`` tokens in total, of which ``num_accepted_tokens`` were accepted."""

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
    """Statistics since the start. ``computed_tokens``: inputs of the model. ``drawn_tokens``: sampled tokens. ``busy_s``: wall time of all
    steps. ``padding_tokens``: tokens that a padded static batch would spend on prompts shorter than its longest and on finished rows; they
    are counted, not computed. ``kv_slots``: token slots of the cache that sequences held, summed over samples; ``kv_unused``: those of them
    that were empty. ``first_token_s``: time to first token of the latest 4,096 requests."""

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
        """The fraction of padding in all tokens that a padded batch would compute."""
        return self.padding_tokens / max(1, self.padding_tokens + self.computed_tokens)

    @property
    def kv_waste(self) -> float:
        """The fraction of the held slots that is empty."""
        return self.kv_unused / self.kv_slots if self.kv_slots else 0.0
