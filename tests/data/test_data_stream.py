"""The order of training data: a function of (seed, index), the same for any number of ranks, no token lost or repeated."""

import threading
import time
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tandem.data.loader import Loader, batch_indices
from tandem.data.mixture import BLOCK, Mixture, mixed
from tandem.data.shards import ShardReader, ShardWriter
from tandem.data.stream import Piece, TokenStream
from tandem.data.tokenizing.tokenize import TokenizedDataset
from tandem.types import RunError, UserError


def make_dataset(folder: Path, lengths: list[list[int]], dtype: str = "uint16") -> tuple[TokenizedDataset, list[list[list[int]]]]:
    """Writes shards with documents of the given lengths and random tokens; also returns the tokens."""
    random, shards, texts = Random(5), [], []
    for number, shard_lengths in enumerate(lengths):
        writer = ShardWriter(folder, f"shard-{number:06d}", dtype)
        texts.append([[random.randrange(60_000) for _ in range(length)] for length in shard_lengths])
        for tokens in texts[-1]:
            writer.add(tokens)
        shards.append(writer.close())
    return TokenizedDataset("", 60_000, None, dtype, tuple(shards)), texts


def stream_of(folder: Path, dataset: TokenizedDataset, seed: int = 0, length: int = 16) -> TokenStream:
    def open_shard(number: int) -> ShardReader:
        shard = dataset.shards[number]
        return ShardReader(folder / f"{shard.name}.tar", folder / f"{shard.name}.lengths", shard, dataset.dtype)

    return TokenStream(dataset, open_shard, seed=seed, length=length)


LENGTHS = [[3, 40, 0, 7, 1], [], [25, 2, 2, 2], [100]]
TOTAL = sum(map(sum, LENGTHS))


def positions(pieces: list[Piece]) -> list[tuple[int, int, int]]:
    return [(piece.shard, piece.document, piece.start + i) for piece in pieces for i in range(len(piece.tokens))]


@pytest.mark.parametrize("length", [2, 16, 61, 500])
@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_token_comes_once_an_epoch_with_its_own_value(length: int, dtype: str, tmp_path: Path) -> None:
    dataset, texts = make_dataset(tmp_path, LENGTHS, dtype)
    stream = stream_of(tmp_path, dataset, length=length)
    epochs = 3
    found = [place for i in range(-(-epochs * TOTAL // length)) for place in positions(stream.sequence(i))]
    everything = {(s, d, i) for s, documents in enumerate(LENGTHS) for d, n in enumerate(documents) for i in range(n)}
    for epoch in range(epochs):
        assert Counter(found[epoch * TOTAL : (epoch + 1) * TOTAL]) == Counter(everything)
    for i in range(20):
        pieces = stream.sequence(i)
        assert sum(len(piece.tokens) for piece in pieces) == length
        for piece in pieces:
            assert list(piece.tokens) == texts[piece.shard][piece.document][piece.start : piece.start + len(piece.tokens)]


def test_order_follows_from_the_seed_and_differs_between_epochs(tmp_path: Path) -> None:
    dataset, _ = make_dataset(tmp_path, [[8] * 50, [8] * 50])
    one, again, other = (stream_of(tmp_path, dataset, seed, length=8) for seed in (1, 1, 2))
    first = [positions(one.sequence(i)) for i in range(200)]
    assert [positions(again.sequence(i)) for i in reversed(range(200))] == first[::-1], "whatever was asked for before"
    assert [positions(other.sequence(i)) for i in range(200)] != first
    assert first[:100] != first[100:], "each epoch has its own order"


def test_run_goes_on_with_other_numbers_of_ranks_without_losing_or_repeating_a_token(tmp_path: Path) -> None:
    dataset, _ = make_dataset(tmp_path, [[11] * 40, [5] * 60])
    stream = stream_of(tmp_path, dataset)
    batch, whole = 10, [positions(stream.sequence(i)) for i in range(90)]
    taken = []
    for steps, ranks in ((range(3), 2), (range(3, 6), 4), (range(6, 9), 1)):
        for step in steps:
            parts = [list(batch_indices(step, batch, rank, ranks)) for rank in range(ranks)]
            assert max(map(len, parts)) - min(map(len, parts)) <= 1
            taken += [positions(stream.sequence(index)) for part in parts for index in part]
    assert taken == whole


def test_mixture_keeps_its_weights_and_takes_each_streams_sequences_in_turn() -> None:
    mixture = Mixture([0.7, 0.2, 0.1], seed=3)
    places = [mixture.place(i) for i in range(20_000)]
    for stream, share in enumerate((0.7, 0.2, 0.1)):
        own = [nth for found, nth in places if found == stream]
        assert own == list(range(len(own))), "none left out, none twice"
        for count in (1000, 5000, 20_000):
            assert abs(sum(found == stream for found, _ in places[:count]) - share * count) <= BLOCK * share + 1
    again = Mixture([0.7, 0.2, 0.1], seed=3)
    assert [again.place(i) for i in (19_999, 0, 7777)] == [places[i] for i in (19_999, 0, 7777)]
    assert [Mixture([0.7, 0.2, 0.1], seed=4).place(i) for i in range(100)] != places[:100]


@pytest.mark.parametrize("weights", [[1.0], [1e-5, 1.0], [1, 1, 1, 1, 1, 1, 1], [3, 0.001, 0.001]])
def test_mixture_of_awkward_weights_has_no_gap(weights: list[float]) -> None:
    mixture = Mixture(weights, seed=0)
    taken: Counter[int] = Counter()
    for i in range(5 * BLOCK):
        stream, nth = mixture.place(i)
        assert nth == taken[stream]
        taken[stream] += 1


def test_mixed_streams_give_the_sequences_that_the_mixture_names() -> None:
    both = mixed([lambda i: ("a", i), lambda i: ("b", i)], [1, 3], seed=0)
    found = [both(i) for i in range(4000)]
    assert [nth for name, nth in found if name == "b"] == list(range(sum(name == "b" for name, _ in found)))  # type: ignore[misc]
    assert 2900 < sum(name == "b" for name, _ in found) < 3100  # type: ignore[misc]


def test_loader_gives_each_rank_its_batches_in_order_and_ends_its_thread() -> None:
    before = threading.active_count()
    with Loader(lambda i: i * i, 6, first_step=4, rank=1, ranks=4) as loader:
        batches = iter(loader)
        for step in range(4, 30):
            assert next(batches) == (step, [i * i for i in batch_indices(step, 6, 1, 4)])
    assert threading.active_count() == before


def test_loader_counts_the_seconds_in_which_compute_waits() -> None:
    released = threading.Event()

    def slow(index: int) -> int:
        if index == 3:
            released.wait(10)
        return index

    with Loader(slow, 1, ahead=8) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        before = loader.idle_s
        time.sleep(0.3)
        assert loader.idle_s == before, "the time between two batches is compute's"
        threading.Timer(1.0, released.set).start()
        began = time.monotonic()
        next(batches)
        assert 0.2 < loader.idle_s - before <= time.monotonic() - began


def test_loader_ends_in_the_middle_of_a_batch_that_would_never_be_whole() -> None:
    begun = threading.Event()

    def sequence(index: int) -> int:
        begun.set()
        return index

    with Loader(sequence, 10**15, ahead=1):
        assert begun.wait(10)
    assert not any(thread.name == "loader" for thread in threading.enumerate())


def test_error_in_reading_reaches_the_consumer_at_its_step() -> None:
    def broken(index: int) -> int:
        if index == 5:
            raise RunError("the shard is gone")
        return index

    with Loader(broken, 2) as loader:
        batches = iter(loader)
        assert [next(batches), next(batches)] == [(0, [0, 1]), (1, [2, 3])]
        with pytest.raises(RunError, match="the shard is gone"):
            next(batches)


def test_nonsense_is_refused(tmp_path: Path) -> None:
    dataset, _ = make_dataset(tmp_path, [[4]])
    with pytest.raises(UserError, match="length of a training sequence is 1"):
        stream_of(tmp_path, dataset, length=1)
    empty, _ = make_dataset(tmp_path, [[0]])
    with pytest.raises(UserError, match="no tokens"):
        stream_of(tmp_path, empty)
    for weights, said in (([], "no dataset"), ([1, 0], "weight of a dataset is 0"), ([float("inf")], "is inf")):
        with pytest.raises(UserError, match=said):
            Mixture(weights, 0)
    with pytest.raises(UserError, match="2 sequences for 3"):
        Loader(lambda i: i, 2, ranks=3)
