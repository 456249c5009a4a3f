import itertools
import math
from collections import Counter

import pytest

from tandem.data.order import ordered_indices, prompt_indices, weighted_indices
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


def test_draws_in_proportion_to_weights_have_the_probabilities_of_the_closed_form() -> None:
    """Two of four without replacement: the ordered pair (i, j) has probability w_i / W * w_j / (W - w_i)."""
    weights, draws = (1.0, 0.5, 0.25, 0.05), 20_000
    total = sum(weights)
    probability = {(i, j): weights[i] / total * weights[j] / (total - weights[i]) for i, j in itertools.permutations(range(4), 2)}
    assert math.isclose(sum(probability.values()), 1.0)
    counts = Counter(tuple(weighted_indices(draw, 2, 11, weights)) for draw in range(draws))
    chi_square = sum((counts[pair] - draws * p) ** 2 / (draws * p) for pair, p in probability.items())
    assert chi_square < 31.26, "11 degrees of freedom: a true sampler exceeds this with probability 0.001"
    uniform = sum((counts[pair] - draws / 12) ** 2 / (draws / 12) for pair in probability)
    assert uniform > 1000, "the test can tell other probabilities"


def test_draws_by_weight_are_a_function_of_seed_and_draw_and_leave_out_what_the_step_has() -> None:
    weights = [1.0] * 30
    assert weighted_indices(5, 8, 1, weights) == weighted_indices(5, 8, 1, weights) != weighted_indices(6, 8, 1, weights)
    assert weighted_indices(5, 8, 2, weights) != weighted_indices(5, 8, 1, weights)
    first = weighted_indices(0, 10, 3, weights)
    second = weighted_indices(1, 10, 3, weights, first)
    assert len({*first, *second}) == 20


def test_ordered_draws_go_through_the_order_again_and_again_without_leaving_any_out() -> None:
    order = [4, 2, 0, 1, 3]
    assert [ordered_indices(draw, 2, order) for draw in range(5)] == [[4, 2], [0, 1], [3, 4], [2, 0], [1, 3]]
    assert ordered_indices(2, 2, order, taken=[4]) == [3, 2]
