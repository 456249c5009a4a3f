"""Sends the rows of ``metrics.jsonl`` to a tracker. The file is the queue: it is bounded by nothing but the disk, and what a tracker lacks is in it."""

import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from tandem.trackers.sent_rows import SentRows
from tandem.trackers.tracker import AppendOnlyTracker, RunFacts, SampleRow, Tracker
from tandem.types.one_line import describe

MOST_ROWS = 200
"""Rows between two flushes."""
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
"""Seconds until a tracker that failed is made anew, at first and at most."""


class Follower:
    """Follows the run of ``facts`` for one tracker.

    Args:
        make: makes the tracker, again after each failure.
        sent: what it has of the run.
        samples_of: returns the samples of a step that are to be shown.
        say: is told once of a failure, and when the tracker has come up again.
        settled: returns the step of the newest committed checkpoint: rows before it are not cut again. A tracker that cannot remove points is
            sent no others, until the run has finished.
    """

    def __init__(
        self, facts: RunFacts, make: Callable[[], Tracker], sent: SentRows, samples_of: Callable[[int], Sequence[SampleRow]], say: Callable[[str], None],
        settled: Callable[[], int],
    ) -> None:  # fmt: skip
        self._facts, self._make, self._sent, self._samples_of, self._say, self._settled = facts, make, sent, samples_of, say, settled
        self.tracker: Tracker | None = None
        # Held open, so that no later file has its inode.
        self._file: BinaryIO | None = None
        self._offset = 0
        self._failed, self._wait_s, self._not_before = False, FIRST_WAIT_S, 0.0

    def catch_up(self, *, all_settled: bool = False) -> bool:
        """Sends what is new. Returns whether the tracker has every row that was there and may be sent. ``all_settled``: no row is cut any more."""
        if time.monotonic() < self._not_before:
            return False
        try:
            rows = self._new_rows()
            if rows and not all_settled and isinstance(self.tracker, AppendOnlyTracker):
                settled = self._settled()
                rows = [row for row in rows if _step(row) < settled]
            for first in range(0, len(rows), MOST_ROWS):
                self._send(rows[first : first + MOST_ROWS])
        except Exception as error:
            self.fail(error)
            return False
        if self._failed and rows:
            self._failed, self._wait_s = False, FIRST_WAIT_S
            self._say("works again and has all rows")
        return True

    def fail(self, error: Exception) -> None:
        """The tracker is made anew after a while, and continues where it had come to."""
        if not self._failed:
            self._say(f"failed and is tried again, the run does not wait for it: {describe(error)}")
        self._failed, self.tracker = True, None
        self._not_before = time.monotonic() + self._wait_s
        self._wait_s = min(2 * self._wait_s, LONGEST_WAIT_S)

    def _new_rows(self) -> list[bytes]:
        """Returns the rows that the tracker lacks, after it has gone back where rows that it has were cut."""
        path = self._facts.directory / "metrics.jsonl"
        if not path.exists():
            return []
        if self.tracker is not None and self._file is not None and path.stat().st_ino == os.fstat(self._file.fileno()).st_ino:
            self._file.seek(self._offset)
            return self._file.read().split(b"\n")[:-1]
        if self._file is not None:
            self._file.close()
        self._file = path.open("rb")
        return self._go_back(self._file.read().split(b"\n")[:-1])

    def _go_back(self, rows: list[bytes]) -> list[bytes]:
        """Begins at the first of ``rows``, all of the file, that was not sent; returns those from there on."""
        same = self._sent.common(rows)
        if self.tracker is None or same < len(self._sent):
            tracker = self.tracker or self._make()
            if same < len(self._sent) and isinstance(tracker, AppendOnlyTracker):
                tracker.restart(self._facts)
                same = 0
            first = _step(rows[same]) if same < len(rows) else _step(rows[-1]) + 1 if rows else 0
            self._sent.cut(same)
            wanted = tracker.begin(self._facts, first)
            if wanted is not None and wanted < first:
                same = sum(_step(row) < wanted for row in rows)
                self._sent.cut(same)
            self.tracker = tracker
        self._offset = sum(len(row) + 1 for row in rows[:same])
        return rows[same:]

    def _send(self, rows: Sequence[bytes]) -> None:
        assert self.tracker is not None
        for line in rows:
            row: dict[str, Any] = json.loads(line)
            step = int(row["step"])
            samples = self._samples_of(step)
            if samples:
                self.tracker.samples(step, samples)
            self.tracker.log(step, row)
        self.tracker.flush()
        self._sent.add(rows)
        self._offset += sum(len(row) + 1 for row in rows)


def _step(row: bytes) -> int:
    return int(json.loads(row)["step"])


def missing_rows(directory: Path, sent: Path) -> int:
    """Returns how many rows of the run in ``directory`` are not in the file ``sent``."""
    rows = (directory / "metrics.jsonl").read_bytes().split(b"\n")[:-1] if (directory / "metrics.jsonl").exists() else []
    digests = sent.read_text("ascii").split("\n")[:-1] if sent.exists() else []
    return max(0, len(rows) - len(digests))
