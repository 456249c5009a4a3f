"""What the scheduler knows: plain Python, no tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.engine.block_allocator import BlockAllocator
from tandem.engine.prefix_cache import PrefixCache
from tandem.engine.request import Prefill, Sequence
from tandem.types import WeightVersion


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_num_seqs``: rows, that is sequences that decode at once. ``max_num_batched_tokens``: the budget of one
    step; at least ``max_num_seqs``, so that every decoding sequence advances in every step."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool = True


@dataclass
class SchedulerState:
    """Everything a decision depends on.

    ``adapter_key`` says what the prefix cache knows a request's adapter by. ``read_back`` moves the new tokens of
    sequences from their rows' buffers to their lists. ``waiting`` is a heap by ``Prefill.order``. ``decode_rows`` is the
    tuple of the last decision while nobody joined or left. ``due[t]``: the sequences that need a block, or one of their
    own, before step t: a calendar, so that a step looks at nobody else.
    """

    limits: Limits
    allocator: BlockAllocator
    prefix_cache: PrefixCache
    version: WeightVersion
    read_back: Callable[[list[Sequence]], None]
    adapter_key: Callable[[str], str] = str
    waiting: list[tuple[tuple[int, int, int], Prefill]] = field(default_factory=list)
    prefilling: Prefill | None = None
    decoding: dict[int, Sequence] = field(default_factory=dict)
    decode_rows: tuple[int, ...] | None = ()
    free_rows: list[int] = field(default_factory=list)
    due: dict[int, list[Sequence]] = field(default_factory=dict)
    step: int = 0

    def __post_init__(self) -> None:
        self.free_rows = list(range(self.limits.max_num_seqs - 1, -1, -1))
