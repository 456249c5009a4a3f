"""The rows of states of linear attention that no running sequence computes in: snapshots in the prefix cache, and those of swapped-out sequences in host
memory. Holds no tensors.

Cached keys and values serve a prompt up to any block, a state only at the token after which it was kept, and it takes the memory of many blocks. As in Marconi
(Pan et al., 2024, arXiv 2411.19379, section 4.1) it is therefore kept where another prompt is likely to go on: after the last full block of a prompt, where a
prompt leaves a cached one, and after the last full block of a sequence. The least recently used one is dropped for a new one, and each with the hash of its
block.
"""

from collections import OrderedDict
from collections.abc import Collection, Container, Iterable
from typing import NamedTuple

from tandem.engine.core.request import Prefill, Sequence
from tandem.engine.kv_cache.block_pool import BlockCopy
from tandem.types.kv_cache import BLOCK_TOKENS


class StateCopies(NamedTuple):
    """Copies of rows of states that a step makes before it computes anything, in this order: to host memory, from there, to snapshots and from snapshots."""

    swap_outs: tuple[BlockCopy, ...] = ()
    swap_ins: tuple[BlockCopy, ...] = ()
    saves: tuple[BlockCopy, ...] = ()
    loads: tuple[BlockCopy, ...] = ()


class StateRows:
    """Allocates rows of states. ``snapshots``: those for snapshots, in the tensors of the running sequences' states; ``num_host_rows``: those in host memory.

    A snapshot that a step writes serves from the next step on, and its row has no other writer in that step.
    """

    def __init__(self, snapshots: range, num_host_rows: int) -> None:
        self.num_host_rows = num_host_rows
        self.free_host_rows = list(range(num_host_rows - 1, -1, -1))
        self._rows = snapshots
        self._free = list(reversed(snapshots))
        self._by_hash: OrderedDict[bytes, int] = OrderedDict()
        self._new: set[bytes] = set()
        self._dropped: list[int] = []
        self._num_decoding = 0
        self._swap_outs: list[BlockCopy] = []
        self._swap_ins: list[BlockCopy] = []
        self._saves: list[BlockCopy] = []
        self._loads: list[BlockCopy] = []

    def begin_step(self) -> None:
        """Lets the snapshots of the last step serve."""
        self._new.clear()
        self._free += self._dropped
        self._dropped.clear()

    def take_copies(self) -> StateCopies:
        """Removes and returns the copies of the step that is being scheduled."""
        lists = (self._swap_outs, self._swap_ins, self._saves, self._loads)
        copies = StateCopies(*map(tuple, lists))
        for each in lists:
            each.clear()
        return copies

    # -- prompts -------------------------------------------------------------------------------------------------------

    def num_served(self, hashes: list[bytes]) -> int:
        """Returns how many of the first blocks with ``hashes`` end at a snapshot."""
        return next((count for count in range(len(hashes), 0, -1) if hashes[count - 1] in self._by_hash and hashes[count - 1] not in self._new), 0)

    def load(self, prefill: Prefill) -> None:
        """Lets an admitted ``prefill`` begin with the snapshot after its computed tokens, if there are any."""
        if prefill.num_computed_tokens:
            block_hash = prefill.block_hashes[prefill.num_computed_tokens // BLOCK_TOKENS - 1]
            self._by_hash.move_to_end(block_hash)
            self._loads.append(BlockCopy(self._by_hash[block_hash], prefill.rows[0]))

    def keep(self, prefill: Prefill, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Returns the snapshots that the chunk from ``start`` to ``end - 1`` of ``prefill`` writes: the place of a token in the chunk, and a row."""
        kept = []
        for count in sorted({prefill.num_matched_blocks, (len(prefill.tokens) - 1) // BLOCK_TOKENS}):
            if start < count * BLOCK_TOKENS <= end and count <= len(prefill.block_hashes):
                block_hash = prefill.block_hashes[count - 1]
                row = None if block_hash in self._by_hash else self._new_row()
                if row is not None:
                    self._by_hash[block_hash] = row
                    self._new.add(block_hash)
                    kept.append((count * BLOCK_TOKENS - 1 - start, row))
        return tuple(kept)

    # -- sequences that decode -----------------------------------------------------------------------------------------

    def save(self, sequence: Sequence, num_tokens: int) -> None:
        """Copies the state of ``sequence`` after ``num_tokens`` tokens, full blocks of it. Sequences that decode have at most half of the rows."""
        if sequence.snapshot_row < 0 and 2 * self._num_decoding < len(self._rows) - 1 and (row := self._new_row()) is not None:
            sequence.snapshot_row = row
            self._num_decoding += 1
        if sequence.snapshot_row >= 0:
            sequence.snapshot_tokens = num_tokens
            self._saves.append(BlockCopy(sequence.row, sequence.snapshot_row))

    def publish(self, sequence: Sequence, hashes: list[bytes], cached: Container[bytes]) -> None:
        """Lets the copied state of ``sequence``, whose full blocks have ``hashes``, serve prompts if its block is among those ``cached``."""
        count = sequence.snapshot_tokens // BLOCK_TOKENS
        if sequence.snapshot_row >= 0 and count <= len(hashes) and hashes[count - 1] in cached and hashes[count - 1] not in self._by_hash:
            self._by_hash[hashes[count - 1]] = sequence.snapshot_row
            self._num_decoding -= 1
            sequence.snapshot_row = -1

    def release(self, sequence: Sequence) -> None:
        """Frees the row of a ``sequence`` that leaves, if it has one."""
        if sequence.snapshot_row >= 0:
            self._free.append(sequence.snapshot_row)
            self._num_decoding -= 1
            sequence.snapshot_row = -1

    # -- the swap space ------------------------------------------------------------------------------------------------

    def swap_out(self, sequence: Sequence) -> int:
        """Returns the host row to which the step copies the state of ``sequence``. The caller checks ``free_host_rows`` first."""
        host_row = self.free_host_rows.pop()
        self._swap_outs.append(BlockCopy(sequence.row, host_row))
        return host_row

    def swap_in(self, prefill: Prefill) -> None:
        """Lets the step restore the state of the swapped-out sequence of ``prefill``."""
        self._swap_ins.append(BlockCopy(prefill.host_row, prefill.rows[0]))

    def free_host_row(self, prefill: Prefill) -> None:
        """Frees the swapped-out state of ``prefill``."""
        self.free_host_rows.append(prefill.host_row)
        prefill.host_row = -1

    # -- snapshots -----------------------------------------------------------------------------------------------------

    def drop(self, block_hash: bytes) -> None:
        """Drops the snapshot after the block of ``block_hash``, if there is one."""
        row = self._by_hash.pop(block_hash, None)
        if row is not None:
            (self._dropped if block_hash in self._new else self._free).append(row)
            self._new.discard(block_hash)

    def clear(self) -> None:
        """Drops every snapshot."""
        for block_hash in list(self._by_hash):
            self.drop(block_hash)

    def _new_row(self) -> int | None:
        if not self._free:
            oldest = next((block_hash for block_hash in self._by_hash if block_hash not in self._new), None)
            if oldest is None:
                return None
            self.drop(oldest)
        return self._free.pop()

    def check_integrity(self, decoding: Iterable[int], swapped: Iterable[int], cached: Collection[bytes]) -> None:
        """Raises ``AssertionError`` unless each row is free, a snapshot's, or one of ``decoding`` sequences, each host row free or in ``swapped``, and each
        snapshot one of a block that is ``cached``."""
        held = list(decoding)
        rows = [*self._free, *self._dropped, *self._by_hash.values(), *held]
        assert sorted(rows) == list(self._rows), "a row of states is lost or held twice"
        assert len(held) == self._num_decoding, "the rows of decoding sequences are not counted"
        assert sorted([*self.free_host_rows, *swapped]) == list(range(self.num_host_rows)), "a host row of states is lost or held twice"
        assert self._by_hash.keys() <= set(cached), "a snapshot is of no cached block"
