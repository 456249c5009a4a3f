"""Where the parameters of a Megatron-Core rank hold the tensors of the whole model: parts of Hugging Face tensors, each contiguous in its parameter."""

from collections.abc import Iterator

from tandem.layout.shapes import ModelShapes, parameters
from tandem.layout.shard_offsets import ShardOffsets, whole_offsets
from tandem.model.megatron.layout import Entry, MegatronMesh, MegatronRank, entries, padded_vocabulary
from tandem.trainer.checkpoint.codes import Part


def parts_of(shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank) -> list[Part]:
    """Returns the parts in the parameters of ``rank``, by the names of the local specification (``model.megatron.layout``).

    The rows of the vocabulary's padding are in no part. With several stages a tied embedding is in a parameter of the first and one of the last stage."""
    whole = {name: tuple(shape) for name, shape in parameters(shapes)}
    return [part for entry in entries(shapes, mesh, rank, "local") for part in _parts(entry, whole, shapes, mesh, rank)]


def _parts(entry: Entry, whole: dict[str, tuple[int, ...]], shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank) -> Iterator[Part]:
    if entry.is_replicated:
        yield Part(entry.name, 0, entry.names[0], whole[entry.names[0]], whole_offsets(whole[entry.names[0]]))
    elif "word_embeddings" in entry.name or "output_layer" in entry.name:
        yield from _vocabulary(entry, shapes, mesh, rank)
    elif "linear_qkv" in entry.name:
        yield from _query_groups(entry, whole, shapes, mesh, rank)
    elif "linear_fc1" in entry.name:
        first = 0
        for name in entry.names:
            rows = whole[name][0] // mesh.tensor
            part = _rows(entry, first, name, whole[name], rank.tensor * rows, rows)
            first += part.offsets.numel
            yield part
    else:
        [name] = entry.names
        rows, columns = whole[name]
        width = columns // mesh.tensor
        yield Part(entry.name, 0, name, whole[name], ShardOffsets((0, rank.tensor * width), (rows, (rank.tensor + 1) * width)))


def _rows(entry: Entry, first: int, name: str, whole: tuple[int, ...], start: int, count: int) -> Part:
    """Returns the part of ``count`` rows from ``start`` on of tensor ``name``, at element ``first`` of the parameter."""
    return Part(entry.name, first, name, whole, ShardOffsets((start, *(0 for _ in whole[1:])), (start + count, *whole[1:])))


def _vocabulary(entry: Entry, shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank) -> Iterator[Part]:
    rows = padded_vocabulary(shapes, mesh.tensor) // mesh.tensor
    start, stop = rank.tensor * rows, min((rank.tensor + 1) * rows, shapes.vocab_size)
    if start < stop:
        yield _rows(entry, 0, entry.names[0], (shapes.vocab_size, shapes.hidden_size), start, stop - start)


def _query_groups(entry: Entry, whole: dict[str, tuple[int, ...]], shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank) -> Iterator[Part]:
    """Yields the queries, the key and the value of each query group, which follow each other."""
    groups, head = shapes.num_key_value_heads // mesh.tensor, shapes.head_dim
    heights, first = (shapes.query_size // shapes.num_key_value_heads, head, head), 0
    for group in range(rank.tensor * groups, (rank.tensor + 1) * groups):
        for name, height in zip(entry.names, heights, strict=True):
            part = _rows(entry, first, name, whole[name], group * height, height)
            first += part.offsets.numel
            yield part
