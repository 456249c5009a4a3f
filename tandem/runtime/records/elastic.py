"""The steps that a run took with fewer data-parallel ranks than its recipe asks for (``run.elastic``), from the events in its journal."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tandem.runtime.records.journal import Event

FEWER_RANKS = "fewer_ranks"
"""The event of a supervisor that continues with fewer ranks: ``step``, ``asked``, ``now`` and the lost ``ranks``."""


@dataclass(frozen=True, slots=True)
class FewerRanks:
    """Steps from ``first`` on, up to but without ``end`` (``None``: to the end), that ``now`` instead of ``asked`` data-parallel ranks took."""

    first: int
    asked: int
    now: int
    end: int | None = None

    def __str__(self) -> str:
        steps = f"from step {self.first} on" if self.end is None else f"from step {self.first} to step {self.end}"
        return f"{steps} it was trained with {self.now} of {self.asked} data-parallel ranks"


def fewer_ranks(events: Iterable[Event]) -> list[FewerRanks]:
    """Returns the steps with fewer ranks that are part of the run's result, in order. A later return to a checkpoint takes back what followed
    it."""
    spans: list[FewerRanks] = []
    asked = now = 0
    for event in events:
        if event.kind == FEWER_RANKS:
            asked, now = int(event.detail["asked"]), int(event.detail["now"])
        elif event.kind == "resume":
            step, data = int(event.detail["step"]), event.detail.get("data")
            spans = [span if span.end is not None and span.end <= step else replace(span, end=step) for span in spans if span.first < step]
            if asked and data == now:
                spans.append(FewerRanks(step, asked, now))
            else:
                asked = now = 0
    return _joined(spans)


def _joined(spans: Iterable[FewerRanks]) -> list[FewerRanks]:
    """Returns ``spans`` without the seams at restarts with the same ranks."""
    joined: list[FewerRanks] = []
    for span in spans:
        if joined and (joined[-1].end, joined[-1].asked, joined[-1].now) == (span.first, span.asked, span.now):
            span = replace(span, first=joined.pop().first)
        joined.append(span)
    return joined


def describe_fewer_ranks(spans: Iterable[FewerRanks]) -> str:
    """Returns one line about ``spans``, empty without any."""
    parts = "; ".join(map(str, spans))
    return f"run.elastic: {parts}: the results are not those of all ranks" if parts else ""
