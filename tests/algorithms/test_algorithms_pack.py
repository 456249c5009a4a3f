"""Best-Fit packing: its invariants on random lengths, and cases worked by hand."""

import random

import pytest

from tandem.trainer.packing import best_fit, pack, pack_shares, spread
from tandem.types import TrainSequence


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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_sequences_are_spread_over_ranks_so_that_none_has_many_more_tokens(seed, ranks):
    lengths = lengths_of(seed)
    shares = spread(lengths, ranks)
    assert sorted(i for share in shares for i in share) == list(range(len(lengths)))
    assert all(list(share) == sorted(share) for share in shares)
    loads = [sum(lengths[i] for i in share) for share in shares]
    # The last sequence of the fullest rank went to the emptiest one: they differ by one sequence at most, and it was a short one.
    assert max(loads) - min(loads) <= max(lengths)
    assert max(loads) <= (4 / 3 - 1 / (3 * ranks)) * max(max(lengths), sum(lengths) / ranks) + 1


def test_spreading_gives_the_longest_to_the_rank_with_the_fewest_tokens():
    # 7 to rank 0 | 5 to rank 1 | 4 to rank 1 (5 < 7) | 3 to rank 0 (7 < 9) | 2 to rank 1 (9 < 10).
    assert spread([2, 7, 3, 5, 4], 2) == [(1, 2), (0, 3, 4)]
    assert spread([3, 3], 4) == [(0,), (1,), (), ()]


def test_each_rank_packs_its_own_share_and_one_rank_packs_all():
    sequences = [TrainSequence(f"{i}", (0,) * (n + 1), 1, (0.0,) + (1.0,) * n) for i, n in enumerate([2, 7, 3, 5, 4])]
    assert pack_shares(sequences, 1, 10) == [pack(sequences, 10)]
    # Rank 0: 7 and 3 fit into 10. Rank 1: 5 and 4 do, and 2 does not.
    assert pack_shares(sequences, 2, 10) == [[(1, 2)], [(3, 4), (0,)]]


@pytest.mark.parametrize("share_prompts", [True, False])
def test_completions_that_are_equal_fill_a_micro_batch_as_others_do(share_prompts: bool) -> None:
    """The heads see every completion, and attention gathers its keys, whatever is computed once."""
    sequences = [TrainSequence(f"{i}", (*range(11), *range(20)), 11, (0.0,) * 11 + (1.0,) * 20) for i in range(64)]
    (bins,) = pack_shares(sequences, 1, 256, share_prompts, keep_groups=True)
    assert sorted(i for chosen in bins for i in chosen) == list(range(64))
    # All but the last token of a sequence go through the network: 11 of the prompt, which are counted once or in each, and 19 of the completion.
    assert max(map(len, bins)) == ((256 - 11) // 19 if share_prompts else 256 // 30)
