"""The steps that a run took with fewer ranks, from its events, and the waits between restarts."""

from typing import Any

import pytest

from tandem.runtime.process.backoff import FIRST_S, MOST_S, Backoff
from tandem.runtime.records.elastic import FewerRanks, describe_fewer_ranks, fewer_ranks
from tandem.runtime.records.journal import Event

THREE_TO_TWO = ("fewer_ranks", {"step": 7, "asked": 3, "now": 2, "ranks": [2]})


def resume(step: int, data: int) -> tuple[str, dict[str, Any]]:
    return ("resume", {"step": step, "data": data})


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ([resume(5, 3)], []),
        ([THREE_TO_TWO, resume(5, 2)], [FewerRanks(5, 3, 2)]),
        # A further restart with the same ranks is the same stretch.
        ([THREE_TO_TWO, resume(5, 2), resume(10, 2)], [FewerRanks(5, 3, 2)]),
        ([THREE_TO_TWO, resume(5, 2), ("fewer_ranks", {"step": 9, "asked": 3, "now": 1}), resume(8, 1)], [FewerRanks(5, 3, 2, 8), FewerRanks(8, 3, 1)]),
        # A resume has all ranks again; one that goes back to the same checkpoint takes the steps with fewer back.
        ([THREE_TO_TWO, resume(5, 2), resume(10, 3)], [FewerRanks(5, 3, 2, 10)]),
        ([THREE_TO_TWO, resume(5, 2), resume(5, 3)], []),
        ([THREE_TO_TWO, resume(5, 3), resume(6, 3)], []),
    ],
)
def test_steps_with_fewer_ranks_follow_from_the_events(events: list[tuple[str, dict[str, Any]]], wanted: list[FewerRanks]) -> None:
    assert fewer_ranks([Event(i, 0.0, kind, detail) for i, (kind, detail) in enumerate(events)]) == wanted


def test_line_about_fewer_ranks_names_the_steps_and_is_empty_without_any() -> None:
    assert describe_fewer_ranks([]) == ""
    line = describe_fewer_ranks([FewerRanks(5, 3, 2, 8), FewerRanks(8, 3, 1)])
    assert line == (
        "run.elastic: from step 5 to step 8 it was trained with 2 of 3 data-parallel ranks; from step 8 on it was trained with 1 of 3 "
        "data-parallel ranks: the results are not those of all ranks"
    )


def test_waits_between_restarts_double_at_the_same_step_up_to_a_cap_and_end_with_progress() -> None:
    backoff = Backoff()
    assert [backoff.wait_s(step) for step in (4, 4, 3, 4, 5, 5)] == [0.0, FIRST_S, 2 * FIRST_S, 4 * FIRST_S, 0.0, FIRST_S]
    assert [backoff.wait_s(5) for _ in range(2000)][-1] == MOST_S
