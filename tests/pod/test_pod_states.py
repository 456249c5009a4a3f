"""The cycle of the figure, written down independently of the code as its edges, and its diagram."""

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree

import pytest

from tandem.pod.diagram import diagram
from tandem.pod.states import ROLLOUT_TRANSITIONS, TRAINER_TRANSITIONS, RolloutState, TrainerState, check_rollout, check_trainer
from tandem.pod.transitions import Transitions

TRAINER_EDGES = """
    down -> start                       the sidecar comes up
    start -> train                      at a checkpoint, with the step's samples in the journal
    start -> inference
    start -> offload
    start -> checkpoint                 the checkpoint of step 0, or one that a death interrupted
    train -> offload                    the figure's cycle, from here ...
    offload -> convert
    convert -> register
    register -> update_weight
    update_weight -> wait_rollout
    wait_rollout -> onload
    onload -> train                     ... to here
    onload -> inference                 the frozen models go first
    inference -> train
    inference -> offload                a reward model scored this round, and another follows
    inference -> inference              the round's passes for the rewards, then those for the update
    train -> train                      steps that are repeated from the journal
    train -> checkpoint
    checkpoint -> offload
    checkpoint -> train
    checkpoint -> inference             the next step's samples were in the journal already
    train -> inference                  the same, between two checkpoints
    register -> onload                  the rollout sidecar died
    update_weight -> onload
    update_weight -> register           the weights arrived damaged
    onload -> offload
    onload -> checkpoint                the last step, which evaluations have followed already
"""
ROLLOUT_EDGES = """
    down -> start_engine
    start_engine -> update_weight       the figure's cycle, from here ...
    update_weight -> rollout
    rollout -> terminate_engine
    terminate_engine -> start_engine    ... to here
    rollout -> keep_engine              where both fit
    keep_engine -> update_weight
    keep_engine -> terminate_engine
    rollout -> sleep_engine             its process stays, without weights and cache
    evaluate -> sleep_engine
    sleep_engine -> update_weight
    update_weight -> evaluate
    evaluate -> evaluate
    evaluate -> rollout
    evaluate -> keep_engine
    evaluate -> terminate_engine
    rollout -> rollout
    update_weight -> update_weight      the weights arrived damaged
    rollout -> evaluate
"""


def edges(text: str) -> set[tuple[str, str]]:
    found = set()
    for line in text.strip().splitlines():
        before, arrow, after = line.split()[:3]
        assert arrow == "->"
        found.add((before, after))
    return found


@pytest.mark.parametrize("before", TrainerState)
@pytest.mark.parametrize("after", TrainerState)
def test_trainer_goes_where_the_figure_says_and_nowhere_else(before: TrainerState, after: TrainerState) -> None:
    if (before, after) in edges(TRAINER_EDGES) or after == "down":
        check_trainer(before, after)
    else:
        with pytest.raises(AssertionError, match=f"trainer sidecar: {before} -> {after}"):
            check_trainer(before, after)


@pytest.mark.parametrize("before", RolloutState)
@pytest.mark.parametrize("after", RolloutState)
def test_rollout_goes_where_the_figure_says_and_nowhere_else(before: RolloutState, after: RolloutState) -> None:
    if (before, after) in edges(ROLLOUT_EDGES) or after == "down":
        check_rollout(before, after)
    else:
        with pytest.raises(AssertionError, match=f"rollout sidecar: {before} -> {after}"):
            check_rollout(before, after)


FIGURE_ARROWS = """
    trainer   Train           -> Offload
    trainer   Offload         -> Wait rollout
    trainer   Wait rollout    -> Onload
    trainer   Onload          -> Train
    trainer   Convert HF      -> Register Shard
    trainer   Register Shard  -> Update Weight
    rollout   Rollout         -> Dummy Start
    rollout   Rollout         -> Terminate
    rollout   Start vLLM      -> Update Weight
    rollout   Dummy Start     -> Update Weight
    rollout   Terminate       -> Terminate vLLM
    rollout   Terminate vLLM  -> Update Weight
"""
NAMES = {
    "Train": {"train"}, "Offload": {"offload"}, "Wait rollout": {"wait_rollout"}, "Onload": {"onload"}, "Convert HF": {"convert"},
    "Register Shard": {"register"}, "Update Weight": {"update_weight"}, "Rollout": {"rollout"},
    # An engine without weights: a new one, or one whose process stays and has none.
    "Dummy Start": {"start_engine", "sleep_engine"}, "Start vLLM": {"start_engine"},
    # The sidecar's step and its checkpoint engine's are one state.
    "Terminate": {"terminate_engine"}, "Terminate vLLM": {"terminate_engine"},
}  # fmt: skip
BETWEEN = {
    # Its checkpoint engine works while the sidecar goes from one step to the next.
    ("Offload", "Wait rollout"): ("convert", "register", "update_weight"),
    # The next round's engine is started first.
    ("Terminate vLLM", "Update Weight"): ("start_engine",),
}


def way(table: dict[str, set[str]], starts: Collection[str], ends: Collection[str], through: Collection[str]) -> tuple[str, ...] | None:
    """The shortest way in ``table`` whose inner states are of ``through``."""
    waiting = deque((start,) for start in starts)
    while waiting:
        states = waiting.popleft()
        for after in sorted(table[states[-1]]):
            if after in ends:
                return (*states, after)
            if after in through and after not in states:
                waiting.append((*states, after))
    return None


def arrows() -> Iterator[tuple[str, str, str]]:
    for line in FIGURE_ARROWS.strip().splitlines():
        sidecar, _, rest = line.strip().partition(" ")
        before, after = (name.strip() for name in rest.split("->"))
        yield sidecar, before, after


TABLES = {"trainer": TRAINER_TRANSITIONS, "rollout": ROLLOUT_TRANSITIONS}


@pytest.mark.parametrize(("sidecar", "before", "after"), list(arrows()))
def test_every_arrow_of_the_figure_is_a_way_in_the_table_of_transitions_and_is_recorded(sidecar: str, before: str, after: str) -> None:
    if NAMES[before] == NAMES[after]:
        return
    table = {str(state): set(map(str, ends)) for state, ends in TABLES[sidecar].items()}
    found = way(table, NAMES[before], NAMES[after], BETWEEN.get((before, after), ()))
    assert found is not None, f"no way from {before} to {after}"
    recorded = list[tuple[str, str]]()

    @contextmanager
    def phase(state: StrEnum, step: int, of: str) -> Iterator[dict[str, Any]]:
        recorded.append((of, state.value))
        yield {}

    transitions = Transitions(cast(Any, SimpleNamespace(phase=phase)), TrainerState.DOWN, RolloutState.DOWN)
    setattr(transitions, sidecar, (TrainerState if sidecar == "trainer" else RolloutState)(found[0]))
    for state in found[1:]:
        if sidecar == "trainer":
            transitions.trainer_enters(TrainerState(state), 0)
        else:
            transitions.rollout_enters(RolloutState(state), 0)
    assert recorded == [(sidecar, state) for state in found[1:]]
    for one, other in pairwise(found):
        less = {state: ends - ({other} if state == one else set()) for state, ends in table.items()}
        again = way(less, NAMES[before], NAMES[after], BETWEEN.get((before, after), ()))
        assert again is None or len(NAMES[before]) > 1, "the table has a second way"


def test_the_committed_diagram_is_that_of_the_code_and_has_every_state_and_transition() -> None:
    committed = (Path(__file__).parents[2] / "docs" / "figures" / "pod-states.svg").read_text(encoding="utf-8")
    assert committed == diagram(), "run python -m tandem.pod.diagram docs/figures/pod-states.svg"
    page = ElementTree.fromstring(committed)
    namespace = {"svg": "http://www.w3.org/2000/svg"}
    drawn = [title.text for title in page.iterfind(".//svg:path/svg:title", namespace)]
    written = [" to ".join(pair) for text in (TRAINER_EDGES, ROLLOUT_EDGES) for pair in edges(text)]
    assert sorted(drawn, key=str) == sorted(written)
    boxes = [text.text for text in page.iterfind(".//svg:g/svg:text", namespace)]
    assert sorted(boxes, key=str) == sorted(state.value.replace("_", " ") for states in (TrainerState, RolloutState) for state in states)
