"""Asynchronous checkpoints: a step waits only for the copy of its state into staging memory; a background thread writes it.

The thread computes digests, writes and verifies in calls that release the GIL, and is bound by the disk. It votes over its own
communicator, so that its collectives never interleave with those of training.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.deadline import LOOK_S, Deadline
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.trainer.checkpoint.find import prune
from tandem.trainer.checkpoint.format.shard import Key, Piece, Shard, divide, piece_of
from tandem.trainer.checkpoint.staging import Staging
from tandem.trainer.checkpoint.tiers.tier import CopyTier, Written
from tandem.trainer.checkpoint.write import Committed, Work, write_checkpoint
from tandem.types import CollectiveError, RunError

BEAT_S = LOOK_S
SLOW_DISK_S = 3600.0
"""A write that takes longer is no slow disk: its rank counts as hung."""


def wait_for(future: Future[Any], beat: Callable[[], None] | None) -> None:
    """Waits until ``future`` is done and calls ``beat`` every ``BEAT_S``, for ``SLOW_DISK_S`` at most, so that a writer that hangs is found."""
    slow = Deadline(SLOW_DISK_S)
    while not wait([future], timeout=BEAT_S).done:
        if beat is not None and not slow.passed:
            beat()


class Checkpointer:
    """Writes ``checkpoints/step-N`` and keeps the newest ``keep``.

    ``ranks``: the ranks that hold the state together, over a communicator that nothing else uses. ``asynchronous``: ``save`` returns once
    the state is staged. On rank 0, ``on_committed`` is called with each committed step in the writing thread, and the steps ``in_use`` are
    not removed. ``staging_folder``: stages to a file in this folder instead of memory."""

    def __init__(
        self, checkpoints: Path, keep: int, ranks: Communicator, mesh: Mapping[str, int], *, asynchronous: bool = True,
        on_committed: Callable[[int], None] | None = None, in_use: Callable[[], Collection[int]] = tuple, fault_point: FaultPoint = no_fault,
        staging_folder: Path | None = None,
    ) -> None:
        self.checkpoints, self.keep, self.ranks, self.mesh, self.asynchronous = checkpoints, keep, ranks, mesh, asynchronous
        self._fault_point, self._on_committed, self._in_use, self._staging_folder = fault_point, on_committed, in_use, staging_folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Committed | None] | None = None
        self._held: tuple[Piece, ...] = ()
        self._chosen: set[tuple[Key, ShardOffsets]] = set()
        self._staging: Staging | None = None
        self._written: deque[Written] = deque()
        self._left_out: set[str] = set()

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Agrees which rank writes which of ``shards`` and allocates the staging memory before the first save. Every rank calls it."""
        self._plan(shards)
        if self._staging is not None:
            self._thread.submit(self._staging.touch)

    def save(
        self, step: int, shards: Sequence[Shard], state: Mapping[str, Any], own: Mapping[str, Any] | None = None,
        companions: Sequence[Path] = (), span: AbstractContextManager[None] | None = None, copies: Sequence[CopyTier] = (), in_folder: bool = True,
    ) -> float:
        """Starts the checkpoint of ``step`` and returns the seconds for which training was blocked. ``copies``: the tiers that it is written to first;
        ``in_folder``: it is one of the folder too.

        Waits for the previous save first. Every rank calls it in the same step. ``span`` is entered around the write, in the writing
        thread. Raises ``RunError`` if this checkpoint or the previous one fails."""
        began = perf_counter()
        self.wait()
        self._plan(shards)
        staging = self._staging
        assert staging is not None
        # The thread may still be touching the pages of the staging memory.
        self._thread.submit(int).result()
        staging.fill([shard for shard in shards if (shard.key, shard.offsets) in self._chosen])
        self._fault_point(f"after:checkpoint_stage:{step}")
        work = Work(step, staging, state, own or {}, companions)
        self._under_way = self._thread.submit(self._write, work, span or nullcontext(), copies, in_folder)
        if not self.asynchronous:
            self.wait()
        return perf_counter() - began

    def take_committed(self) -> Committed | None:
        """Returns the checkpoint committed since the last call, or ``None``. Raises ``RunError`` if the write failed."""
        if self._under_way is None or not self._under_way.done():
            return None
        done, self._under_way = self._under_way, None
        return done.result()

    def take_written(self) -> list[Written]:
        """Returns what was written since the last call, and to which tiers it was not."""
        # The writing thread may add to it meanwhile.
        return [self._written.popleft() for _ in range(len(self._written))]

    @property
    def is_busy(self) -> bool:
        """Whether a write is in progress."""
        return self._under_way is not None and not self._under_way.done()

    def wait(self, beat: Callable[[], None] | None = None) -> None:
        """Waits until no write is in progress and calls ``beat`` meanwhile. Raises ``RunError`` if the write failed; the result is left
        for ``take_committed``."""
        if self._under_way is not None:
            wait_for(self._under_way, beat)
            self._under_way.result()

    def close(self) -> None:
        """Stops the thread after its current work."""
        self._thread.shutdown()

    def _write(self, work: Work, span: AbstractContextManager[None], copies: Sequence[CopyTier], in_folder: bool) -> Committed | None:
        with span:
            for tier in copies:
                self._copy(tier, work)
            done = write_checkpoint(self.checkpoints, self.ranks, self.mesh, work, self._fault_point) if in_folder else None
        work.staged.release_pages()
        if done is None:
            return None
        every = gather_values(self.ranks, len(work.staged.content), "the bytes of the checkpoint")
        self._written.append(Written("folder", work.step, sum(every), done.write_s))
        if self.ranks.rank == 0:
            if self._on_committed is not None:
                self._on_committed(work.step)
            prune(self.checkpoints, self.keep, self._in_use())
        self._fault_point(f"after:checkpoint_prune:{work.step}")
        return done

    def _copy(self, tier: CopyTier, work: Work) -> None:
        """Writes ``work`` to ``tier``. One that cannot take it is left out from then on, on all ranks: the others, and the run, go on."""
        if tier.name in self._left_out:
            return
        try:
            self._written.append(tier.write(self.ranks, self.mesh, work))
        except CollectiveError:
            raise
        except RunError as error:
            self._left_out.add(tier.name)
            self._written.append(Written(tier.name, work.step, trouble=str(error)))

    def _plan(self, shards: Sequence[Shard]) -> None:
        """Assigns parts to ranks. Recomputed only if some rank's parts changed, as when the first moments appear."""
        held = tuple(map(piece_of, shards))
        is_new = held != self._held or self._staging is None
        if not any(gather_values(self.ranks, is_new, "whether the checkpoint's parts changed")):
            return
        told = [[*piece.key, piece.whole, *piece.offsets, piece.dtype] for piece in held]
        everyone = [
            [
                Piece(Key(state, name), tuple(whole), ShardOffsets(tuple(start), tuple(stop)), dtype)
                for state, name, whole, start, stop, dtype in pieces
            ]
            for pieces in gather_values(self.ranks, told, "checkpoint parts of every rank")
        ]
        self._chosen = divide(everyone)[self.ranks.rank]
        self._held = held
        own = [piece for piece in held if (piece.key, piece.offsets) in self._chosen]
        pinned = any(shard.tensor.is_cuda for shard in shards)
        self._staging = Staging(own, pinned, self._staging_folder)
