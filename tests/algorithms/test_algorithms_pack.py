"""Best-Fit packing: what a packing must be, on lengths drawn at random and on cases worked by hand."""

import random

import pytest

from tandem.rl.pack import best_fit, pack_for_ranks


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
    assert pack_for_ranks([], 10, 2) == [[], []]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("seed", range(3))
def test_all_ranks_have_the_same_number_of_bins_and_together_every_sequence(seed, ranks):
    lengths = lengths_of(seed, count=37)
    packed = pack_for_ranks(lengths, 128, ranks)
    assert len({len(bins) for bins in packed}) == 1
    assert sorted(i for bins in packed for b in bins for i in b) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in b) <= 128 for bins in packed for b in bins)
    assert all(b for bins in packed for b in bins)


def test_tokens_are_dealt_to_ranks_within_one_longest_sequence_of_each_other():
    lengths = lengths_of(9)
    tokens = [sum(lengths[i] for b in bins for i in b) for bins in pack_for_ranks(lengths, 128, 4)]
    assert max(tokens) - min(tokens) <= max(lengths)


def test_more_ranks_than_sequences_leaves_empty_bins_rather_than_a_rank_that_does_not_take_part():
    assert pack_for_ranks([4, 4], 10, 3) == [[(0,)], [(1,)], [()]]
