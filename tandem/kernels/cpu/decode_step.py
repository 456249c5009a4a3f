"""A decoding step in one call (``kernels.decode_step``): its description for ``decode_step.cpp`` and ``record.cpp``, and the calls."""

from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING

from torch import Tensor, empty, float32, int32, int64

from tandem.kernels.api import KVLayer, PackedWeight, SampledRows
from tandem.kernels.cpu.dense_matrix import Matrix, described, has_format
from tandem.kernels.cpu.library import Library
from tandem.kernels.decode_step import DecodeEnds, DecodeRows, DrawnRows
from tandem.kernels.dense_layers import DenseProduct, LayerInputs

if TYPE_CHECKING:
    from tandem.kernels.cpu.dense_program import CpuDenseProgram

_WORKING_BYTES = 16 << 20
"""The most that a step's logits, and what they are computed from, may take: it stays with its thread."""
_NOT_FINITE, _IS_FULL = -2, -3


class _Rows(Structure):
    _fields_ = (*((name, c_void_p) for name in DecodeRows._fields), ("rows", c_int64), ("columns", c_int64))


class _Ends(Structure):
    _fields_ = (
        ("head", Matrix), ("embedding", c_void_p), ("is_packed", c_int64), ("head_precision", c_int64),
        *((name, c_float) for name in ("embedding_factor", "head_factor", "cap")),
    )  # fmt: skip


class _Drawn(Structure):
    _fields_ = (*((name, c_void_p) for name in DrawnRows._fields), ("columns", c_int64))


class CpuDecodeProgram:
    """See ``DecodeProgram``. ``head_precision``: of the products of the head."""

    def __init__(self, library: Library, layers: "CpuDenseProgram", ends: DecodeEnds, rows: DecodeRows, head_precision: int) -> None:
        self._call = library.decode_step
        self._layers = layers
        self._tensors = ends, rows  # what is read by address
        vocabulary, hidden = ends.head.rows, ends.head.columns
        embedding = ends.embedding.data if isinstance(ends.embedding, PackedWeight) else ends.embedding
        self._ends = _Ends(
            described(DenseProduct(ends.head, None)), embedding.data_ptr(), isinstance(ends.embedding, PackedWeight), head_precision,
            ends.embedding_factor, ends.head_factor, ends.cap or 0.0,
        )  # fmt: skip
        self._rows = _Rows(*(column.data_ptr() for column in rows), *rows.block_tables.shape)
        self._at = addressof(self._ends), addressof(self._rows)
        self.most_rows = min(layers.most_tokens, _WORKING_BYTES // (4 * (vocabulary + 2 * hidden)))

    def run(self, caches: Sequence[KVLayer], index: Tensor, states: LayerInputs | None = None) -> SampledRows:
        count = len(index)
        # What the process may have set as its defaults, as modules of transformers do, is no part of the layout.
        tokens, raw, sampling = (empty(count, dtype=dtype, device="cpu") for dtype in (int64, float32, float32))
        code = self._call(
            *self._layers.at(caches), *self._at, index.data_ptr(), count, tokens.data_ptr(), raw.data_ptr(), sampling.data_ptr(),
            *self._layers.kept(states, count),
        )  # fmt: skip
        if code:
            if code == 1:
                raise IndexError(f"a decoding step's row is not one of {self._rows.rows}, or has no token, or more than its block table holds")
            if code == 2:
                raise IndexError(f"a decoding step's token is outside the vocabulary of {self._ends.head.rows}")
            self._layers.raise_for(code, len(caches[0].keys))
            raise RuntimeError(f"a decoding step ended with the code {code}")
        return SampledRows(tokens, raw, sampling)


def is_decodable(ends: DecodeEnds, rows: DecodeRows, hidden: int) -> bool:
    """Returns whether ``decode_step.cpp`` has the ``ends`` of layers of width ``hidden``, and the state of ``rows``: dense tensors on the CPU, whose sizes and
    dtypes fit."""
    head, embedding = ends.head, ends.embedding
    data = embedding.data if isinstance(embedding, PackedWeight) else embedding
    shape = (embedding.rows, embedding.columns) if isinstance(embedding, PackedWeight) else tuple(embedding.shape)
    integers, numbers = rows[:4], rows[4:7]
    return (
        has_format(head) and head.columns == hidden and shape == (head.rows, hidden)
        and data.dtype is float32 and all(column.is_cpu and column.is_contiguous() for column in (data, head.data, *rows))
        and all(column.dtype is int64 for column in integers) and all(column.dtype is float32 for column in numbers) and rows.block_tables.dtype is int32
    )  # fmt: skip


class CpuRowRecorder:
    """See ``RowRecorder``."""

    def __init__(self, library: Library, rows: DrawnRows) -> None:
        self._call = library.record
        self._tensors = rows  # what is written by address
        self._rows = _Drawn(*(column.data_ptr() for column in rows), rows.tokens.shape[1])
        self._at = addressof(self._rows)
        self._ended = empty(len(rows.length), dtype=int64, device="cpu")

    def record(self, index: Tensor, stop_tokens: Tensor, sampled: SampledRows) -> list[int] | None:
        tokens, raw, sampling = (values.contiguous() for values in sampled)
        if tokens.dtype is not int64 or raw.dtype is not float32 or sampling.dtype is not float32:
            raise TypeError(f"drawn tokens must be int64 and their log-probabilities float32, not {tokens.dtype}, {raw.dtype} and {sampling.dtype}")
        count = self._call(
            self._at, stop_tokens.data_ptr(), stop_tokens.shape[1], index.data_ptr(), len(index), tokens.data_ptr(), raw.data_ptr(), sampling.data_ptr(),
            self._ended.data_ptr(),
        )  # fmt: skip
        if count == _NOT_FINITE:
            return None
        if count == _IS_FULL:
            raise IndexError(f"a row has no place for the token that it has drawn: there are {self._rows.columns} for each")
        return self._ended[:count].tolist() if count else []


def is_recordable(rows: DrawnRows) -> bool:
    """Returns whether ``record.cpp`` writes to ``rows``: dense tensors on the CPU, with log-probabilities in fp32."""
    return rows.raw.dtype is float32 and all(column.is_cpu and column.is_contiguous() for column in rows)
