"""The score of a reward model beside those of reward functions, in each state of a score."""

import math

import pytest

from tandem.rl.rewards.model_scores import with_model_scores
from tandem.trainer.micro_batch import counted_indices, forward_tokens
from tandem.trainer.sequence_scores import scored_sequence
from tandem.types import Score, ScoreState


def test_a_reward_model_is_a_weighted_component_and_no_fault_is_scored() -> None:
    scores = [
        Score("a", ScoreState.NUMBER, 1.0, {"correct": 1.0}, correct=True), Score("b", ScoreState.MODEL_FAULT, -1.0, {"correct": -1.0}),
        Score("c", ScoreState.NOT_APPLICABLE, None), Score("d", ScoreState.INFRASTRUCTURE_FAULT, None, reason="down"),
        Score("e", ScoreState.NUMBER, 1.0, {"correct": 1.0}),
    ]  # fmt: skip
    a, b, c, d, e = with_model_scores(scores, [2.0, 3.0, 4.0, 5.0, math.nan], 0.5)
    assert (a.value, a.components, a.correct) == (2.0, {"correct": 1.0, "reward_model": 2.0}, True)
    assert (b.state, b.value) == (ScoreState.MODEL_FAULT, 0.5)
    assert (c.state, c.value, c.components) == (ScoreState.NUMBER, 2.0, {"reward_model": 4.0})
    assert d == scores[3]
    assert (e.state, e.value) == (ScoreState.INFRASTRUCTURE_FAULT, None) and "nan for sample 'e'" in e.reason


@pytest.mark.parametrize(("tokens", "read"), [((5, 6, 7), 2), ((5, 6, 0, 0), 1), ((5, 0, 7, 0), 2), ((0, 0), 0)])
def test_the_state_that_is_scored_is_that_of_the_last_token_that_is_not_padding(tokens: tuple[int, ...], read: int) -> None:
    sequence = scored_sequence("a", tokens, pad_token_id=0)
    assert forward_tokens(sequence) == read + 1
    assert [index - 1 for index in counted_indices(sequence)] == [read]
    assert sequence.token_ids[: read + 1] == tokens[: read + 1]
