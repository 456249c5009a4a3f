"""Where the parameters of a Megatron-Core rank hold the tensors of the whole model: parts of Hugging Face tensors, each contiguous in its parameter."""

import re
from collections.abc import Iterator

from tandem.layout.parameters import parameters
from tandem.layout.shapes import ModelShapes
from tandem.layout.shard_offsets import ShardOffsets, whole_offsets
from tandem.model.megatron.layout import Entry, MegatronMesh, MegatronRank, entries, padded_vocabulary
from tandem.trainer.checkpoint.codes import Part
from tandem.trainer.parallel.ranks import Ranks

BY_ROWS = re.compile(r"\.linear_(q|q_up|kv_up)_proj\.")
"""The matrices of latent attention whose outputs are heads."""


def parts_of(shapes: ModelShapes, mesh: MegatronMesh, rank: MegatronRank) -> list[Part]:
    """Returns the parts in the parameters of ``rank``, by the names of the local specification (``model.megatron.layout``).

    The rows of the vocabulary's padding are in no part. With several stages a tied embedding is in a parameter of the first and one of the last stage."""
    whole = {name: tuple(shape) for name, shape in parameters(shapes)}
    return [part for entry in entries(shapes, mesh, rank, "local") for part in _parts(entry, whole, shapes, mesh, rank)]


def stage_name(name: str, stage: int, stages: int) -> str:
    """Returns the name of a parameter of one of this rank's ``stages``, which have parameters of the same names."""
    return name if stages == 1 else f"{stage}.{name}"


def parts_of_rank(shapes: ModelShapes, ranks: Ranks, stages: int) -> list[Part]:
    """Returns where the parameters of this rank's ``stages`` hold the tensors of the whole model. Of p ranks of a pipeline rank r has the stages r, r + p and
    so on."""
    tensor, pipeline, expert = (ranks.groups[axis] for axis in ("tensor", "pipeline", "expert"))
    mesh, held = MegatronMesh(tensor.size, pipeline.size * stages, expert.size), list[Part]()
    for stage in range(stages):
        parts = parts_of(shapes, mesh, MegatronRank(tensor.rank, stage * pipeline.size + pipeline.rank, expert.rank))
        held += [part._replace(parameter=stage_name(part.parameter, stage, stages)) for part in parts]
    return held


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
    elif BY_ROWS.search(entry.name):
        [name] = entry.names
        rows = whole[name][0] // mesh.tensor
        yield _rows(entry, 0, name, whole[name], rank.tensor * rows, rows)
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
    """Yields the rank's rows of the queries, the key and the value of each query group, which follow each other. With fewer groups than tensor ranks a
    rank's rows begin and end anywhere in a group: Megatron gathers the products of all ranks and takes its heads from them."""
    heads, place = (shapes.query_size // shapes.num_key_value_heads, shapes.head_dim, shapes.head_dim), 0
    own = sum(whole[name][0] for name in entry.names) // mesh.tensor
    begin, end, first = rank.tensor * own, (rank.tensor + 1) * own, 0
    for group in range(shapes.num_key_value_heads):
        for name, height in zip(entry.names, heads, strict=True):
            start, stop = max(begin, place), min(end, place + height)
            if start < stop:
                part = _rows(entry, first, name, whole[name], group * height + start - place, stop - start)
                first += part.offsets.numel
                yield part
            place += height
