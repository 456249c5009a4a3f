"""What the scheduler knows: plain Python, no tensors."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from tandem.engine.core.costs import PreemptionCosts
from tandem.engine.core.lifecycle import Transition
from tandem.engine.core.request import Prefill, Sequence
from tandem.engine.kv_cache.block_pool import BlockAllocator
from tandem.engine.kv_cache.block_table import BlockCopy, blocks_for
from tandem.engine.kv_cache.prefix_cache import PrefixCache
from tandem.engine.settings import EngineSettings
from tandem.layout.shapes import ModelShapes
from tandem.types import WeightVersion


class PauseMode(StrEnum):
    """What becomes of requests under way while an engine is paused. ``ABORT``: they are answered as aborted. ``WAIT``: those
    that have begun go on to their end, and nobody else begins. ``RECOMPUTE``: they stand still, and their keys and values
    are computed again where the weights change. ``KEEP``: they stand still, and go on with the keys and values they have."""

    ABORT = "abort"
    WAIT = "wait"
    RECOMPUTE = "recompute"
    KEEP = "keep"


@dataclass(frozen=True, slots=True)
class Limits:
    """``max_num_seqs``: rows, that is sequences that decode at once. ``max_num_batched_tokens``: the budget of one
    step; at least ``max_num_seqs``, so that every decoding sequence advances in every step. ``joins``, ``preemption``: as
    ``EngineSettings`` has them. ``watermark``: blocks that an admission leaves free. ``reservation``: blocks side by side that
    a sequence takes at its admission (0: what its tokens need). ``window``: tokens that the widest layer looks back (0: all).
    ``guessing_seqs``: sequences that decode at most in a step in which any of them guesses."""

    max_num_seqs: int
    max_num_batched_tokens: int
    joins: str = "chunked"
    preemption: str = "recompute"
    watermark: int = 0
    reservation: int = 0
    window: int = 0
    guessing_seqs: int = 0


def limits_of(settings: EngineSettings, shapes: ModelShapes, guessing_seqs: int) -> Limits:
    """The limits of an engine with ``settings`` and a model of ``shapes``."""
    windows = [shapes.window(layer) for layer in range(shapes.num_layers)]
    return Limits(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        joins=settings.admission,
        preemption=settings.preemption_mode if settings.swap_blocks else "recompute",
        watermark=int(settings.watermark * settings.num_blocks),
        reservation=blocks_for(settings.max_model_len) if settings.cache_implementation == "static" else 0,
        window=0 if None in windows else max(window or 0 for window in windows),
        guessing_seqs=guessing_seqs,
    )


@dataclass
class SchedulerState:
    """Everything a decision depends on.

    ``adapter_key`` says what the prefix cache knows a request's adapter by. ``read_back`` moves the new tokens of
    sequences from their rows' buffers to their lists. ``waiting`` is a heap by ``Prefill.order``. ``decode_rows`` is the
    tuple of the last decision while nobody joined or left. ``due[t]``: the sequences that need a block, or one of their
    own, before step t: a calendar, so that a step looks at nobody else.
    ``speculating``: the decoding ones whose tokens may come several a step, which a step looks at all. ``host``: the blocks of
    the swap space. ``ended``: (row, table) of sequences of a static batch that ended before it. ``is_forming``: a batch takes in
    who waits. ``counts``: how often each transition was made.
    """

    limits: Limits
    allocator: BlockAllocator
    prefix_cache: PrefixCache
    version: WeightVersion
    read_back: Callable[[list[Sequence]], None]
    adapter_key: Callable[[str], str] = str
    host: BlockAllocator = field(default_factory=lambda: BlockAllocator(0))
    costs: PreemptionCosts | None = None
    waiting: list[tuple[tuple[int, int, int], Prefill]] = field(default_factory=list)
    prefilling: Prefill | None = None
    decoding: dict[int, Sequence] = field(default_factory=dict)
    decode_rows: tuple[int, ...] | None = ()
    speculating: dict[int, Sequence] = field(default_factory=dict)
    free_rows: list[int] = field(default_factory=list)
    due: dict[int, list[Sequence]] = field(default_factory=dict)
    step: int = 0
    pause: PauseMode | None = None
    ended: list[tuple[int, list[int]]] = field(default_factory=list)
    is_forming: bool = False
    swap_outs: list[BlockCopy] = field(default_factory=list)
    counts: Counter[Transition] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.free_rows = list(range(self.limits.max_num_seqs - 1, -1, -1))
