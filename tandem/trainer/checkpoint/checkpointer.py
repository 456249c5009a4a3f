"""Checkpoints beside training: a step waits for the copy of its state into staged memory, and a thread does the rest.

The thread digests, writes and reads back in calls that do not hold Python's lock, and uses no core for long: the disk is what it
waits for. It votes over a communicator of its own, so that its collectives never meet those of training.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any

from tandem.layout.shard_offsets import ShardOffsets
from tandem.model.huggingface.safetensors_file import DTYPE_NAMES
from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.faults import FaultPoint, no_fault
from tandem.trainer.checkpoint.find import prune
from tandem.trainer.checkpoint.rank_file import DTYPES
from tandem.trainer.checkpoint.shard import Key, Piece, Shard, divide, piece_of
from tandem.trainer.checkpoint.staging import Staging
from tandem.trainer.checkpoint.write import Committed, Work, write_checkpoint

BEAT_S = 1.0


def wait_for(future: Future[Any], beat: Callable[[], None] | None) -> None:
    """Until ``future`` is done; ``beat`` is called every second."""
    while not wait([future], timeout=BEAT_S).done:
        if beat is not None:
            beat()


class Checkpointer:
    """Writes ``checkpoints/step-N`` and keeps the newest ``keep``. ``ranks``: those that hold the state together, over a
    communicator that nothing else uses. ``asynchronous``: ``save`` returns when the state is staged. On rank 0 ``on_committed`` hears of
    each step, in the thread that writes, and steps ``in_use`` are not removed. ``staging_folder``: staged to a file there."""

    def __init__(
        self, checkpoints: Path, keep: int, ranks: Communicator, mesh: Mapping[str, int], *, asynchronous: bool = True,
        on_committed: Callable[[int], None] | None = None, in_use: Callable[[], Collection[int]] = tuple, fault_point: FaultPoint = no_fault,
        staging_folder: Path | None = None,
    ) -> None:
        self.checkpoints, self.keep, self.ranks, self.mesh, self.asynchronous = checkpoints, keep, ranks, mesh, asynchronous
        self._fault_point, self._on_committed, self._in_use, self._staging_folder = fault_point, on_committed, in_use, staging_folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Committed] | None = None
        self._held: tuple[Piece, ...] = ()
        self._chosen: set[tuple[Key, ShardOffsets]] = set()
        self._staging: Staging | None = None

    def prepare(self, shards: Sequence[Shard]) -> None:
        """Agree who writes what of ``shards`` and have the memory ready, before the first save asks for it. Every rank calls it."""
        self._plan(shards)
        if self._staging is not None:
            self._thread.submit(self._staging.touch)

    def save(
        self, step: int, shards: Sequence[Shard], state: Mapping[str, Any], own: Mapping[str, Any] | None = None,
        companions: Sequence[Path] = (), span: AbstractContextManager[None] | None = None,
    ) -> float:
        """Begin the checkpoint of ``step``; the seconds that training stood still for. A save before is waited for. Every rank calls
        it in the same step. ``span`` stands around the writing, in its thread. Raises ``RunError`` where this checkpoint or the one before fails."""
        began = perf_counter()
        self.wait()
        self._plan(shards)
        staging = self._staging
        assert staging is not None
        # The thread may still be touching the pages.
        self._thread.submit(int).result()
        staging.fill([shard for shard in shards if (shard.key, shard.box) in self._chosen])
        self._fault_point(f"after:checkpoint_stage:{step}")
        work = Work(step, staging, state, own or {}, companions)
        self._under_way = self._thread.submit(self._write, work, span or nullcontext())
        if not self.asynchronous:
            self.wait()
        return perf_counter() - began

    def take_committed(self) -> Committed | None:
        """The checkpoint that was committed since the last call, if one was. Raises ``RunError`` where it failed."""
        if self._under_way is None or not self._under_way.done():
            return None
        done, self._under_way = self._under_way, None
        return done.result()

    def wait(self, beat: Callable[[], None] | None = None) -> None:
        """Until nothing is under way; ``beat`` is called every second. Raises ``RunError`` where it failed; a success is left for
        ``take_committed``."""
        if self._under_way is not None:
            wait_for(self._under_way, beat)
            self._under_way.result()

    def close(self) -> None:
        """End the thread, after what it is doing."""
        self._thread.shutdown()

    def _write(self, work: Work, span: AbstractContextManager[None]) -> Committed:
        with span:
            done = write_checkpoint(self.checkpoints, self.ranks, self.mesh, work, self._fault_point)
        work.staged.rest()
        if self.ranks.rank == 0:
            if self._on_committed is not None:
                self._on_committed(work.step)
            prune(self.checkpoints, self.keep, self._in_use())
        self._fault_point(f"after:checkpoint_prune:{work.step}")
        return done

    def _plan(self, shards: Sequence[Shard]) -> None:
        """Who writes what. Settled anew only where the form of some rank's state has changed, as with the first moments."""
        held = tuple(map(piece_of, shards))
        is_new = held != self._held or self._staging is None
        if not any(gather_values(self.ranks, is_new, "whether the checkpoint has a new form")):
            return
        told = [[*piece.key, piece.whole, *piece.box, DTYPE_NAMES[piece.dtype]] for piece in held]
        everyone = [
            [
                Piece(Key(state, name), tuple(whole), ShardOffsets(tuple(start), tuple(stop)), DTYPES[dtype])
                for state, name, whole, start, stop, dtype in pieces
            ]
            for pieces in gather_values(self.ranks, told, "what every rank holds of the checkpoint")
        ]
        self._chosen = divide(everyone)[self.ranks.rank]
        self._held = held
        own = [piece for piece in held if (piece.key, piece.box) in self._chosen]
        pinned = any(shard.tensor.is_cuda for shard in shards)
        self._staging = Staging(own, pinned, self._staging_folder)
