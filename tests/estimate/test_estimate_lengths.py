"""Distributions of lengths beside sums over all outcomes, closed forms and random draws."""

import itertools
import math
import random
import statistics

import pytest

from tandem.estimate.lengths import Lengths
from tandem.types import UserError


def test_the_mean_longest_of_recorded_lengths_is_that_of_all_outcomes() -> None:
    lengths = Lengths.of([7, 1, 4, 4, 30])
    for count in (1, 2, 4):
        outcomes = [max(drawn) for drawn in itertools.product((1, 4, 4, 7, 30), repeat=count)]
        assert lengths.mean_longest(count) == pytest.approx(statistics.mean(outcomes))
    assert lengths.cut(10).mean_longest(50) == pytest.approx(10, rel=1e-3)
    assert lengths.cut(10).mean == 26 / 5


def test_the_mean_longest_of_lognormal_lengths_is_that_of_draws() -> None:
    rng = random.Random(1)
    for count, spread in ((16, 0.5), (256, 1.0)):
        lengths = Lengths.around(1000, spread)
        draws = [max(rng.lognormvariate(lengths.location, spread) for _ in range(count)) for _ in range(300)]
        assert lengths.mean_longest(count) == pytest.approx(statistics.mean(draws), rel=0.06)


def test_moments_of_lognormal_lengths_are_closed_forms_also_where_they_are_cut() -> None:
    lengths = Lengths.around(500, 0.8)
    assert (lengths.mean, lengths.variation) == (pytest.approx(500), pytest.approx(math.exp(0.64)))
    cut, rng = lengths.cut(700), random.Random(2)
    draws = [min(700.0, rng.lognormvariate(lengths.location, 0.8)) for _ in range(40_000)]
    assert cut.mean == pytest.approx(statistics.mean(draws), rel=0.01)
    assert cut.moment(2) == pytest.approx(statistics.mean(draw**2 for draw in draws), rel=0.01)
    assert cut.quantile(0.9) == 700 and cut.share_below(700) == 1
    assert cut.share_below(300) == pytest.approx(statistics.mean(draw <= 300 for draw in draws), abs=0.01)
    equal = Lengths.around(64, 0)
    assert (equal.mean, equal.variation, equal.mean_longest(1000), equal.share_below(63)) == (pytest.approx(64), pytest.approx(1), pytest.approx(64), 0)


def test_a_mean_and_a_percentile_give_a_distribution_or_one_line() -> None:
    lengths = Lengths.with_p95(1000, 2500)
    assert (lengths.mean, lengths.quantile(0.95)) == (pytest.approx(1000), pytest.approx(2500))
    for p95 in (999, 4000):
        with pytest.raises(UserError, match=r"it must be from 1,000 to 3,868: change one of them"):
            Lengths.with_p95(1000, p95)
