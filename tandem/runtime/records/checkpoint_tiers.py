"""What the journal has of the tiers of checkpoints: the newest whole copy in each, how fast it was written, and which node keeps what."""

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.runtime.records.journal import Journal

KEY = "checkpoint_tiers"
"""The journal's key of the states, by tier."""
EVENT_LOADED = "checkpoint_loaded"
EVENT_LEFT_OUT = "checkpoint_tier_left_out"
"""Kinds of events: a checkpoint was loaded; a tier could not take one and is left out."""
ORDER = ("memory", "local", "folder", "upload")
"""The tiers, the nearest first."""


@dataclass(frozen=True, slots=True)
class TierState:
    """The newest checkpoint of ``tier`` that is whole, of ``step``: its ``size_bytes``, the ``seconds`` that it took in the background, when it was complete
    (``time_s``), and the ranks whose files each node keeps (``where``; empty: all are in one folder). ``copies``, ``all_bytes`` and ``all_seconds``: of all
    that were written. ``left_out``: why the tier takes none any more, empty while it does."""

    tier: str
    step: int = -1
    size_bytes: int = 0
    seconds: float = 0.0
    time_s: float = 0.0
    where: Mapping[str, Sequence[int]] = field(default_factory=dict)
    copies: int = 0
    all_bytes: int = 0
    all_seconds: float = 0.0
    left_out: str = ""

    @property
    def megabytes_per_s(self) -> float:
        """The rate of the newest one, 10**6 bytes a second."""
        return self.size_bytes / 1e6 / self.seconds if self.seconds else 0.0

    def age_s(self, now_s: float) -> float | None:
        """Returns the seconds since the newest one was complete, ``None`` without one."""
        return None if self.step < 0 else max(0.0, now_s - self.time_s)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checkpoint of ``step`` that ranks have loaded from ``tier``, verified. ``read_bytes``: what was read for it, by tier, whole or not; ``where``: the node
    of each file in memory."""

    step: int
    tier: str
    size_bytes: int
    seconds: float
    read_bytes: Mapping[str, int]
    where: Mapping[str, str] = field(default_factory=dict)


def record_loaded(journal: Journal, loaded: Loaded) -> str:
    """Records ``loaded`` and returns a line for a person; empty for one of the run's folder, as every resume has one."""
    detail: dict[str, Any] = {
        "step": loaded.step, "tier": loaded.tier, "seconds": round(loaded.seconds, 3), "bytes": loaded.size_bytes, "read_bytes": dict(loaded.read_bytes),
    }  # fmt: skip
    journal.record_event(EVENT_LOADED, {**detail, **({"where": dict(loaded.where)} if loaded.where else {})})
    cut_tiers(journal, loaded.step)
    place = {"memory": "the memory of the nodes", "local": "the local disk" if not loaded.where else "the local disks"}.get(loaded.tier)
    return f"the checkpoint of step {loaded.step} is loaded from {place} in {loaded.seconds:.2f} s" if place else ""


def describe_fetched(step: int, url: str) -> str:
    return f"no checkpoint in the run's folder is whole; that of step {step} is fetched from '{url}'"


def states_of(recorded: Mapping[str, Any]) -> list[TierState]:
    """Returns the states in the value of ``KEY``, the nearest first."""
    return [TierState(**recorded[tier]) for tier in ORDER if tier in recorded]


def read_tiers(journal: Journal) -> list[TierState]:
    """Returns the state of each tier that was written to, the nearest first."""
    return states_of(journal.get(KEY, {}))


def tiers_of(directory: Path) -> list[TierState]:
    """Returns ``read_tiers`` of the run in ``directory``, also while it works; none without a journal."""
    path = directory / "journal.sqlite"
    if not path.is_file():
        return []
    with Journal(path, read_only=True) as journal:
        return read_tiers(journal)


def record_written(
    journal: Journal, tier: str, step: int, size_bytes: int, seconds: float, where: Mapping[str, Sequence[int]], trouble: str = ""
) -> bool:
    """Records that the checkpoint of ``step`` was written to ``tier``, or why not (``trouble``). Returns whether the tier is left out from now on."""
    states = journal.get(KEY, {})
    before = TierState(**states[tier]) if tier in states else TierState(tier)
    if trouble:
        journal.record_event(EVENT_LEFT_OUT, {"tier": tier, "step": step, "reason": trouble})
        now = replace(before, left_out=trouble)
    else:
        if tier == "local" and not where:
            where = {socket.gethostname(): []}
        now = TierState(
            tier, step, size_bytes, round(seconds, 4), time.time(), dict(where), before.copies + 1, before.all_bytes + size_bytes,
            round(before.all_seconds + seconds, 4),
        )  # fmt: skip
    journal.set(KEY, {**states, tier: asdict(now)})
    return bool(trouble)


def cut_tiers(journal: Journal, step: int) -> None:
    """Forgets the newest checkpoints of steps above ``step``, which are repeated: whether a tier still has an older one is not known."""
    states = {state.tier: state for state in read_tiers(journal)}
    stale = {tier: replace(state, step=-1, where={}) for tier, state in states.items() if state.step > step}
    if stale:
        journal.set(KEY, {tier: asdict(state) for tier, state in {**states, **stale}.items()})


def describe_tier(state: TierState, now_s: float) -> str:
    """Returns a line for a person: the newest copy, its age, its rate and the nodes that keep it."""
    if state.left_out:
        return f"left out: {state.left_out}"
    age = state.age_s(now_s)
    if age is None:
        return "no whole copy"
    kept = ", ".join(f"{node} ({_ranks(ranks)})" if ranks else node for node, ranks in sorted(state.where.items()))
    text = f"step {state.step}, {age:.0f} s old, {state.size_bytes / 1e6:,.1f} MB in {state.seconds:.2f} s ({state.megabytes_per_s:,.0f} MB/s)"
    return f"{text}, kept by {kept}" if kept else text


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
