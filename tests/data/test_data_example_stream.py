"""The order of examples: each whole and once per epoch, a function of (seed, index)."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tandem.data.example_stream import ExampleStream
from tandem.data.shards import ShardReader, ShardWriter
from tandem.data.stream import Piece, TokenStream
from tandem.data.tokenizing.tokenize import TokenizedDataset
from tandem.types import UserError

LENGTHS = [[3, 40, 5, 1], [], [25, 2, 2, 2, 9], [100]]
LONGEST = 40
Examples = dict[tuple[int, int], tuple[list[int], list[int]]]


def make_examples(folder: Path, dtype: str = "uint16") -> tuple[TokenizedDataset, Examples]:
    random, shards, examples = Random(5), [], Examples()
    for number, lengths in enumerate(LENGTHS):
        writer = ShardWriter(folder, f"shard-{number:06d}", dtype, has_masks=True)
        for document, length in enumerate(lengths):
            examples[number, document] = [random.randrange(60_000) for _ in range(length)], [random.randrange(2) for _ in range(length)]
            writer.add(*examples[number, document])
        shards.append(writer.close())
    return TokenizedDataset("", 60_000, None, dtype, tuple(shards)), examples


def reader_of(folder: Path, dataset: TokenizedDataset, number: int) -> ShardReader:
    shard = dataset.shards[number]
    return ShardReader(folder / f"{shard.name}.tar", folder / f"{shard.name}.lengths", shard, dataset.dtype)


def stream_of(folder: Path, dataset: TokenizedDataset, seed: int = 0, longest: int = LONGEST) -> ExampleStream:
    return ExampleStream(LENGTHS, lambda number: reader_of(folder, dataset, number), seed=seed, longest=longest)


def places(stream: ExampleStream, indices: range) -> list[tuple[int, int]]:
    found = [stream.sequence(i) for i in indices]
    assert all(len(pieces) == 1 and pieces[0].start == 0 for pieces in found), "an example is never joined with another"
    return [(pieces[0].shard, pieces[0].document) for pieces in found]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_every_example_that_is_not_too_long_comes_whole_once_an_epoch_with_its_own_mask(dtype: str, tmp_path: Path) -> None:
    dataset, examples = make_examples(tmp_path, dtype)
    stream = stream_of(tmp_path, dataset)
    fitting = {place for place, (tokens, _) in examples.items() if len(tokens) <= LONGEST}
    assert (stream.examples, stream.left_out) == (len(fitting), 1) == (9, 1)
    for epoch in range(3):
        assert Counter(places(stream, range(epoch * 9, epoch * 9 + 9))) == Counter(fitting)
    for i in range(20):
        (piece,) = stream.sequence(i)
        assert piece.learned is not None
        assert (list(piece.tokens), list(piece.learned)) == examples[piece.shard, piece.document]
    assert dataset.learned == sum(sum(mask) for _, mask in examples.values())


def test_order_follows_from_the_seed_and_differs_between_epochs(tmp_path: Path) -> None:
    dataset, _ = make_examples(tmp_path)
    first = places(stream_of(tmp_path, dataset, seed=1), range(90))
    again = stream_of(tmp_path, dataset, seed=1)
    assert [places(again, range(i, i + 1))[0] for i in reversed(range(90))] == first[::-1], "whatever was asked for before"
    assert places(stream_of(tmp_path, dataset, seed=2), range(90)) != first
    assert len({tuple(first[i : i + 9]) for i in range(0, 90, 9)}) > 5, "each epoch has its own order"


def test_dataset_of_examples_that_are_all_too_long_is_refused(tmp_path: Path) -> None:
    dataset, _ = make_examples(tmp_path)
    with pytest.raises(UserError, match="no example of at most 0 tokens"):
        stream_of(tmp_path, dataset, longest=0)


def test_pretraining_reads_every_token_of_examples_and_marks_none(tmp_path: Path) -> None:
    dataset, examples = make_examples(tmp_path)
    stream = TokenStream(dataset, lambda number: reader_of(tmp_path, dataset, number), seed=0, length=dataset.tokens)
    pieces: list[Piece] = stream.sequence(0)
    assert all(piece.learned is None for piece in pieces)
    assert {(p.shard, p.document): list(p.tokens) for p in pieces} == {place: tokens for place, (tokens, _) in examples.items()}
