"""What runs: the sequences that decode, the group under prefill, and their rows and blocks."""

from collections.abc import Callable, Iterable

from tandem.engine.core.batching import BatchingPolicy
from tandem.engine.core.request import Prefill, Sequence
from tandem.engine.kv_cache.kv_cache_manager import KVCacheManager
from tandem.kernels.api import BLOCK_TOKENS

Holder = Sequence | Prefill
"""What holds blocks: a decoding sequence, or a group under prefill."""


class RunningSequences:
    """Up to ``max_num_seqs`` sequences by row.

    ``speculating``: those of them that may feed draft tokens. They need blocks at any step; the others are found in a calendar by the step
    before which they need one, so that a step looks at no other sequence. ``prefilling``: the group whose prompt is being computed.
    ``read_back`` moves the new tokens of sequences from their rows to their lists.
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
        """Makes ``rows`` another object, for callers that keep what they have prepared for it."""
        self._rows = None

    @property
    def holders(self) -> list[Holder]:
        under_way: list[Holder] = [] if self.prefilling is None else [self.prefilling]
        return under_way + list(self.by_row.values())

    # -- joining and leaving -------------------------------------------------------------------------------------------

    def start_decoding(self, prefill: Prefill, step: int, first_fed: int) -> None:
        """Lets the sequences of the prefill under way decode after ``step``, all of them over its blocks, from position ``first_fed``
        on."""
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
        """Takes rows and blocks of decoding sequences whose tokens were read back. With ``keep_cache`` their full blocks can be found
        again; keys and values of the last token were never computed. ``has_ended``: they do not come back."""
        for sequence in sequences:
            if keep_cache:
                self._kv_cache.cache_sequence(sequence, len(sequence.known_tokens) - 1)
            row, table = sequence.row, sequence.blocks
            del self.by_row[row]
            self.speculating.pop(row, None)
            sequence.row, sequence.blocks, sequence.block_hashes = -1, [], []
            if not (has_ended and self.batching.hold(row, table, is_idle=not self.by_row)):
                self._free(row, table)
        self._rows = None

    def stop_prefill(self, prefill: Prefill) -> None:
        """Takes rows and blocks of the prefill under way."""
        assert self.prefilling is prefill
        self.prefilling = None
        self._kv_cache.free(prefill.blocks)
        self.free_rows.extend(reversed(prefill.rows))
        prefill.blocks, prefill.rows, prefill.computed = [], [], 0

    def free_held(self) -> None:
        """Gives back what the ended sequences of a static batch hold."""
        for row, table in self.batching.take_held():
            self._free(row, table)

    def free_held_when_idle(self) -> None:
        """As ``free_held``, where the last sequence of the batch has ended."""
        if not self.by_row and self.prefilling is None:
            self.free_held()

    def _free(self, row: int, table: list[int]) -> None:
        self._kv_cache.free(table)
        self.free_rows.append(row)

    # -- slots ---------------------------------------------------------------------------------------------------------

    def take_due(self, step: int) -> list[Sequence]:
        """Returns the sequences that may need a block in ``step``."""
        due = [sequence for sequence in self._due.pop(step, ()) if sequence.row >= 0 and sequence.due == step]
        return list(dict.fromkeys([*due, *self.speculating.values()])) if self.speculating else due

    def set_due(self, sequence: Sequence, step: int) -> None:
        """Notes when ``sequence``, which has a slot for ``step``, needs its next block."""
        if sequence.row not in self.speculating:
            sequence.due = step + BLOCK_TOKENS - (sequence.offset + step) % BLOCK_TOKENS
            self._due.setdefault(sequence.due, []).append(sequence)

    def num_due(self, step: int) -> int:
        """Returns how many sequences may need a block in ``step``, at most."""
        return len(self._due.get(step, ())) + len(self.speculating)
