"""The running batch: the policy by which requests join it, its sequences, and their rows and blocks."""

from collections.abc import Callable, Iterable

from tandem.engine.core.request import Prefill, Sequence
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.types.kv_cache import BLOCK_TOKENS

BlockOwner = Sequence | Prefill
"""Owns blocks of the KV cache: a decoding sequence, or a group under prefill."""


class BatchingPolicy:
    """Decides which waiting requests join the running batch, and when a finished sequence frees its row and blocks.

    ``static``: a batch forms while requests wait and rows and blocks suffice, over as many steps as its prefills take; its rows and blocks are
    freed when its last sequence has finished. ``dynamic``: the same, but each sequence frees them when it finishes. ``continuous``: every
    request joins whose whole prompt fits. ``chunked``: every request joins, its prompt divided to fit the remaining token budget.

    ``held``: (row, block table) of the finished sequences of a static batch.
    """

    def __init__(self, kind: str = "chunked") -> None:
        self.kind = kind
        self.held: list[tuple[int, list[int]]] = []
        self._is_forming = False

    @property
    def splits_prompts(self) -> bool:
        """Whether a prompt may be computed in several steps."""
        return self.kind == "chunked"

    def may_join(self, is_idle: bool) -> bool:
        """Returns whether a new request may join. ``is_idle``: no sequence is running."""
        if self.kind in ("continuous", "chunked"):
            return True
        if is_idle and not self.held:
            self._is_forming = True
        return self._is_forming

    def close(self, is_idle: bool) -> None:
        """Closes the forming batch, because a request could not be admitted. It stays open while no sequence of it runs."""
        self._is_forming = is_idle

    def hold(self, row: int, table: list[int], is_idle: bool) -> bool:
        """Keeps the row and blocks of a finished sequence until its static batch has finished. Returns False if they are freed at once."""
        if self.kind != "static" or is_idle:
            return False
        self.held.append((row, table))
        return True

    def take_held(self) -> list[tuple[int, list[int]]]:
        """Returns the held rows and tables for freeing: the batch has finished, or blocks are short."""
        held, self.held = self.held, []
        return held


class RunningSequences:
    """Up to ``max_num_seqs`` sequences by row.

    ``prefilling``: the group whose prompt is being computed. ``speculating``: the decoding sequences that may feed draft tokens.
    Sequences are indexed by the step before which they need a block, so that a step examines only those that are due. ``read_back``
    moves the new tokens of sequences from their rows to their lists.
    """

    def __init__(
        self, max_num_seqs: int, kv_cache: KVCacheManager, batching: BatchingPolicy, read_back: Callable[[list[Sequence]], None]
    ) -> None:
        self.by_row: dict[int, Sequence] = {}
        self.speculating: dict[int, Sequence] = {}
        self.prefilling: Prefill | None = None
        self.free_rows = list(range(max_num_seqs - 1, -1, -1))
        self.batching = batching
        self.read_back = read_back
        self._kv_cache = kv_cache
        self._due: dict[int, list[Sequence]] = {}
        self._rows: tuple[int, ...] | None = ()

    def __len__(self) -> int:
        """The number of sequences that decode."""
        return len(self.by_row)

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows that decode: the same object until a sequence joins or leaves."""
        if self._rows is None:
            self._rows = tuple(self.by_row)
        return self._rows

    def invalidate_rows(self) -> None:
        """Makes ``rows`` a new object, for callers that cache what they prepared for the old one."""
        self._rows = None

    @property
    def block_owners(self) -> list[BlockOwner]:
        owners: list[BlockOwner] = [] if self.prefilling is None else [self.prefilling]
        return owners + list(self.by_row.values())

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def start_decoding(self, prefill: Prefill, step: int, first_fed: int) -> None:
        """Lets the sequences of the current prefill decode after ``step``, from position ``first_fed`` on. They share its blocks."""
        tables = [prefill.blocks] + [self._kv_cache.fork(prefill.blocks) for _ in prefill.sequences[1:]]
        for sequence, row, table in zip(prefill.sequences, prefill.rows, tables, strict=True):
            sequence.row, sequence.blocks, sequence.block_hashes = row, table, prefill.block_hashes
            sequence.offset = first_fed - step - 1
            sequence.due = step + 1
            self.by_row[row] = sequence
            if sequence.request.draft_tokens:
                self.speculating[row] = sequence
        self._due.setdefault(step + 1, []).extend(prefill.sequences)
        self._rows = None
        self.prefilling = None

    def leave(self, sequences: Iterable[Sequence], keep_cache: bool = True, has_ended: bool = False) -> None:
        """Frees the rows and blocks of decoding sequences whose tokens were read back.

        Args:
            sequences: Sequences that decode.
            keep_cache: Whether their full blocks enter the prefix cache, without the last token, whose keys and values were never computed.
            has_ended: Whether they have finished, so that a static batch may hold their rows and blocks.
        """
        for sequence in sequences:
            if keep_cache:
                self._kv_cache.cache_sequence(sequence, sequence.num_known_tokens - 1)
            if self._kv_cache.states is not None:
                self._kv_cache.states.release(sequence)
            row, table = sequence.row, sequence.blocks
            del self.by_row[row]
            self.speculating.pop(row, None)
            sequence.row, sequence.blocks, sequence.block_hashes = -1, [], []
            if not (has_ended and self.batching.hold(row, table, is_idle=not self.by_row)):
                self._free(row, table)
        self._rows = None

    def stop_prefill(self, prefill: Prefill) -> None:
        """Frees the rows and blocks of the current prefill."""
        assert self.prefilling is prefill
        self.prefilling = None
        self._kv_cache.free(prefill.blocks)
        self.free_rows.extend(reversed(prefill.rows))
        prefill.blocks, prefill.rows, prefill.num_computed_tokens = [], [], 0

    def free_held(self) -> None:
        """Frees the rows and blocks of the finished sequences of a static batch."""
        for row, table in self.batching.take_held():
            self._free(row, table)

    def free_held_when_idle(self) -> None:
        """As ``free_held``, if no sequence of the batch runs any more."""
        if not self.by_row and self.prefilling is None:
            self.free_held()

    def _free(self, row: int, table: list[int]) -> None:
        self._kv_cache.free(table)
        self.free_rows.append(row)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def take_due(self, step: int) -> list[Sequence]:
        """Removes and returns the sequences that may need a block in ``step``."""
        return [sequence for sequence in dict.fromkeys(self._due.pop(step, ())) if sequence.row >= 0 and sequence.due == step]

    def set_due(self, sequence: Sequence, step: int) -> None:
        """Records when ``sequence``, which has a slot for ``step``, needs its next block."""
        sequence.due = step + BLOCK_TOKENS - (sequence.offset + step) % BLOCK_TOKENS
        self._due.setdefault(sequence.due, []).append(sequence)

    def num_due(self, step: int) -> int:
        """Returns an upper bound of the number of sequences that need a block in ``step``."""
        return len(self._due.get(step, ()))
