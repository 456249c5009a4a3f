"""The steps in which micro-batches were computed twice with the same bits, and what was found where they were not, as events of the journal."""

from collections.abc import Collection

from tandem.runtime.records.journal import Journal

AGREEMENT = "corruption_check"
"""Micro-batches of a step were computed twice, with the same bits."""
CORRUPTION = "silent_corruption"
"""Ranks computed other bits than others."""
CORDON = "cordon"
"""A machine is not to be used until it was examined: ``host``, ``ranks`` and ``reason``, for whoever places runs on machines."""


def record_agreement(journal: Journal, step: int, compared: int) -> None:
    """Journals that ``compared`` micro-batches of ``step`` were computed twice, with the same bits."""
    journal.record_event(AGREEMENT, {"step": step, "micro_batches": compared})


def last_agreement(journal: Journal, before: int | None = None) -> int | None:
    """Returns the newest step, below ``before``, whose check found the same bits, ``None`` without one. A step that is repeated is checked again, so an
    earlier life of the run counts."""
    steps = [int(event.detail["step"]) for event in journal.events() if event.kind == AGREEMENT]
    return max((step for step in steps if before is None or step < before), default=None)


def trusted_step(journal: Journal, committed: Collection[int], before: int | None = None) -> int | None:
    """Returns the newest of the ``committed`` checkpoints that is not newer than the last agreement, ``None`` without one: the start alone is trusted."""
    agreed = last_agreement(journal, before)
    return max((step for step in committed if agreed is not None and step <= agreed), default=None)
