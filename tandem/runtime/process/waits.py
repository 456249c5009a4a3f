"""What this process waits for: each wait has an owner, a peer, a deadline and an id. Imports no torch.

A wait is alive as long as its peer gives signs of life: progress of the call, a beat of a rank's heartbeat, or a message that tells of either behind the peer.
The deadline of a wait counts from the newest sign. What a process itself waits for goes to the one who waits for it (``heartbeat_meta``), so that the
controller can name the process at the end of a chain of waits.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.learned_deadline import LearnedDeadline

LATE_S, LATE_FACTOR, LATE_UNKNOWN_S = 5.0, 3.0, 30.0
"""A wait is late, and shown, after so many seconds, and so many times the longest before; where nothing was measured, after ``LATE_UNKNOWN_S``."""
LEARNS_AFTER = 3
"""Waits of a kind after which the learned deadline holds: the first ones are not like the others."""
TOLD_S = 10.0
"""How long what a peer told of its own waits counts as the present."""
MOST_TOLD = 16

StateOfPeer = Callable[[], tuple[str, float]]
"""Returns what is known of a peer without asking it, and the monotonic seconds of its newest sign of life (0: none)."""


def unknown() -> tuple[str, float]:
    """Returns the state of a peer of which nothing is known."""
    return "", 0.0


@dataclass
class Wait:
    """One wait. ``peer``: who is waited for; ``what``: the call. ``limit``: of the seconds without a sign of life, learned from the waits of the same kind.
    ``trouble``: why it does not go on. ``longest_gap_s``: between two signs of life."""

    id: str
    owner: str
    peer: str
    what: str
    limit: LearnedDeadline
    state_of_peer: StateOfPeer = unknown
    trouble: str = ""
    longest_gap_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._since_s, self._began_s = time.time(), time.monotonic()
        self._sign_s = self._told_s = self._began_s
        self._told: list[tuple[str, bool]] = []
        self._deadline = Deadline(self.limit())

    def sign(self, ago_s: float = 0.0) -> None:
        """Records a sign of life that the peer gave ``ago_s`` seconds ago; one that is older than the newest changes nothing."""
        at = time.monotonic() - ago_s
        if at <= self._sign_s:
            return
        self.longest_gap_s = max(self.longest_gap_s, at - self._sign_s)
        self._sign_s = at
        self._deadline = Deadline(self.limit() - ago_s)

    def heard(self, meta: Mapping[str, Any], *, is_progress: bool) -> None:
        """Takes what a message of the peer tells: progress is a sign of life, and any message may tell of the peer's own waits (``heartbeat_meta``)."""
        if is_progress:
            self.sign()
        told, silent_s = meta.get("waits"), meta.get("silent_s")
        if isinstance(told, list):
            self._told, self._told_s = [(str(text), bool(is_late)) for text, is_late in told], time.monotonic()
        if isinstance(silent_s, int | float):
            self.sign(float(silent_s))

    @property
    def behind(self) -> list[tuple[str, bool]]:
        """What the peer waits for itself, and whether that is late, as it told a moment ago."""
        return self._told if time.monotonic() - self._told_s < TOLD_S else []

    @property
    def silent_s(self) -> float:
        """Seconds since the newest sign of life."""
        if at := self.state_of_peer()[1]:
            self.sign(max(0.0, time.monotonic() - at))
        return time.monotonic() - self._sign_s

    @property
    def is_overdue(self) -> bool:
        """Whether the deadline has passed. A pause of this process does not use it up."""
        return self._deadline.passed

    @property
    def is_late(self) -> bool:
        """Whether it lasts longer than such waits do, itself or behind its peer."""
        if self.trouble and time.monotonic() - self._began_s > LATE_S:
            return True
        longest = self.limit.longest_s
        return any(late for _, late in self.behind) or self.silent_s > (max(LATE_S, LATE_FACTOR * longest) if longest else LATE_UNKNOWN_S)

    def describe(self) -> str:
        """Returns one line: who waits for whom, in which call, since when, and what is known of the reason."""
        since = time.strftime("%H:%M:%S", time.localtime(self._since_s))
        text = f"{self.owner} waits for {self.peer} in '{self.what}' since {since}, {time.monotonic() - self._began_s:.1f} s ({self.id})"
        known = "; ".join(each for each in (self.state_of_peer()[0], self.trouble) if each)
        return f"{text}: {known}" if known else text


class Waits:
    """The open waits of this process, and the deadlines that were learned from those that ended. Thread-safe.

    ``owner``: the name of this process. ``factor``, ``least_s``: of learned deadlines. ``on_expired``: takes the stacks of all parties and returns where they
    are; ``stacks_elsewhere``: those on other machines, by the names of the processes."""

    def __init__(self, owner: str = "this process") -> None:
        self.owner, self.factor, self.least_s = owner, 10.0, 60.0
        self.on_expired: Callable[[Wait], str] = lambda wait: ""
        self.stacks_elsewhere: Callable[[], Mapping[str, str]] = dict
        self._lock = threading.Lock()
        self._open: dict[str, Wait] = {}
        self._learned: dict[tuple[str, str], LearnedDeadline] = {}
        self._count = 0
        self._telling = threading.local()

    def begin(self, owner: str, *, factor: float | None = None, least_s: float | None = None) -> None:
        """Names this process, forgets what was learned before, and sets how deadlines are learned."""
        with self._lock:
            self.owner, self._learned = owner, {}
            self.factor, self.least_s = factor or self.factor, least_s or self.least_s

    @contextlib.contextmanager
    def wait(
        self, peer: str, what: str, most_s: float, *, learns: bool = False, least_s: float = 0.0, state_of_peer: StateOfPeer = unknown
    ) -> Iterator[Wait]:
        """Inside, this process waits for ``peer``, at most ``most_s`` without a sign of life. ``learns``: the deadline follows earlier waits for the same, and
        is at least ``least_s`` and that of ``begin``; without it only the display does."""
        with self._lock:
            self._count += 1
            limit = self._learned.setdefault((peer, what), LearnedDeadline(self.factor, max(least_s, self.least_s), most_s, after=LEARNS_AFTER))
            limit.most_s = most_s
            if not learns:
                limit.least_s = most_s
            opened = Wait(f"{self.owner.replace(' ', '-')}-{self._count}", self.owner, peer, what, limit, state_of_peer)
            self._open[opened.id] = opened
        try:
            yield opened
            limit.answered(max(opened.longest_gap_s, opened.silent_s))
        finally:
            with self._lock:
                del self._open[opened.id]

    def expired(self, wait: Wait) -> str:
        """Records that ``wait`` is overdue: the next such wait may take twice as long. Returns what to add to the error's line: the id, and where the stacks of
        all parties are."""
        wait.limit.missed()
        where = self.on_expired(wait)
        return f"wait {wait.id}; {where}" if where else f"wait {wait.id}"

    @contextlib.contextmanager
    def telling(self, tell: Callable[[Mapping[str, Any]], None]) -> Iterator[None]:
        """Inside, ``tell`` takes to the one who waits for this thread what troubles a wait of this thread."""
        self._telling.tell = tell
        try:
            yield
        finally:
            self._telling.tell = None

    def troubled(self, wait: Wait, trouble: str) -> None:
        """Records why ``wait`` does not go on, although this process does what it can: that is a sign of life."""
        wait.trouble = trouble
        wait.sign()
        tell = getattr(self._telling, "tell", None)
        if tell is not None:
            tell({"waits": [[wait.describe(), wait.is_late]], "silent_s": 0.0})

    def open(self) -> list[Wait]:
        """Returns the open waits, the oldest first."""
        with self._lock:
            return list(self._open.values())

    def late(self) -> list[Wait]:
        """Returns the open waits that are late, the oldest first."""
        return [wait for wait in self.open() if wait.is_late]

    def heartbeat_meta(self) -> dict[str, Any]:
        """Returns what a heartbeat of this process tells: its open ``waits`` with whether each is late, and ``silent_s``, the seconds since the newest sign of
        life in any of them; nothing without a wait."""
        waits = self.open()
        if not waits:
            return {}
        told = [[wait.describe(), wait.is_late] for wait in waits] + [[text, late] for wait in waits for text, late in wait.behind]
        return {"waits": told[:MOST_TOLD], "silent_s": min(wait.silent_s for wait in waits)}


WAITS = Waits()
"""Those of this process."""
