"""The policy of batching: static, dynamic, continuous, or continuous with chunked prefill."""


class BatchingPolicy:
    """Decides which waiting requests join the running ones, and when an ended sequence gives its row and blocks back.

    ``static``: a batch forms while requests wait and rows and blocks last, over as many steps as its prefills take; it keeps its rows and
    blocks until its last sequence has ended. ``dynamic``: the same, but an ended sequence gives them back at once. ``continuous``: every
    request that fits with its whole prompt joins. ``chunked``: every request joins, its prompt in the pieces that the budget leaves.

    ``held``: (row, block table) of ended sequences of a static batch.
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
        """Ends the forming of a batch: no other request could be admitted."""
        self._is_forming = is_idle

    def hold(self, row: int, table: list[int], is_idle: bool) -> bool:
        """Keeps what an ended sequence held until its static batch has ended. Returns False where it is given back at once."""
        if self.kind != "static" or is_idle:
            return False
        self.held.append((row, table))
        return True

    def take_held(self) -> list[tuple[int, list[int]]]:
        """Returns what ended sequences hold, which is given back: the batch has ended, or it is short of blocks."""
        held, self.held = self.held, []
        return held
