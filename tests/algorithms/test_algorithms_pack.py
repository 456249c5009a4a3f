"""Best-Fit packing: what a packing must be, on lengths drawn at random and on cases worked by hand."""

import random

import pytest

from tandem.trainer.packing import best_fit


def lengths_of(seed, count=200, longest=100):
    generator = random.Random(seed)
    return [generator.randint(1, longest) for _ in range(count)]


def test_best_fit_takes_the_fullest_bin_that_still_holds_a_sequence():
    # Capacity 10, longest first: 7 | 6 | 3 into the bin of 7 (3 left, not 4) | 2 into the bin of 6 | 2 again, now full.
    assert best_fit([2, 6, 3, 7, 2], 10) == [(2, 3), (0, 1, 4)]


@pytest.mark.parametrize("seed", range(5))
def test_every_sequence_is_in_exactly_one_bin_and_no_bin_overflows(seed):
    lengths = lengths_of(seed)
    bins = best_fit(lengths, 128)
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 128 for b in bins)


@pytest.mark.parametrize("seed", range(5))
def test_the_number_of_bins_is_within_the_proved_bound(seed):
    lengths = lengths_of(seed)
    at_least = -(-sum(lengths) // 128)
    assert len(best_fit(lengths, 128)) <= 11 / 9 * at_least + 1


def test_a_sequence_longer_than_the_capacity_has_a_bin_of_its_own():
    assert best_fit([5, 30, 4], 10) == [(1,), (0, 2)]


def test_nothing_packs_into_nothing():
    assert best_fit([], 10) == []
