"""The cycle of the figure, written down independently of the code as its edges."""

import pytest

from tandem.pod.states import RolloutState, TrainerState, check_rollout, check_trainer

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
