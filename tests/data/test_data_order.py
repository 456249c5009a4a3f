import pytest

from tandem.data.order import prompt_indices
from tandem.types import UserError


def test_an_endless_stream_goes_on_from_step_to_step() -> None:
    assert [i for step in range(5) for i in prompt_indices(step, 3, 0, None)] == list(range(15))


@pytest.mark.parametrize(("size", "prompts"), [(12, 4), (13, 4), (7, 7), (100, 32), (5, 1)])
def test_within_an_epoch_no_prompt_comes_twice_and_epochs_differ(size: int, prompts: int) -> None:
    steps = size // prompts
    epochs = [[i for s in range(steps) for i in prompt_indices(e * steps + s, prompts, 7, size)] for e in range(6)]
    for epoch in epochs:
        assert len(epoch) == len(set(epoch)) == steps * prompts
        assert set(epoch) <= set(range(size))
    assert len({tuple(epoch) for epoch in epochs}) > 1 or size == 1


def test_prompts_that_sit_one_epoch_out_are_others_in_the_next() -> None:
    left_out = [set(range(10)) - {i for s in range(2) for i in prompt_indices(2 * e + s, 4, 0, 10)} for e in range(12)]
    assert set().union(*left_out) == set(range(10))


def test_a_step_is_the_same_whichever_steps_were_asked_for_before() -> None:
    forward = [prompt_indices(step, 3, 5, 11) for step in range(20)]
    backward = [prompt_indices(step, 3, 5, 11) for step in reversed(range(20))]
    assert forward == backward[::-1]
    assert forward != [prompt_indices(step, 3, 6, 11) for step in range(20)]


def test_the_order_of_an_epoch_is_pinned_across_versions() -> None:
    assert prompt_indices(0, 8, 0, 8) == [6, 7, 5, 3, 0, 1, 2, 4]


def test_too_few_prompts_for_one_step_are_refused() -> None:
    with pytest.raises(UserError, match=r"4 training prompts, fewer than rollout.prompts_per_step \(5\)"):
        prompt_indices(0, 5, 0, 4)
