"""A decoding step of an engine as plain data, for kernel sets that compute all of it in one call: from the last token of each row to its next one."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from tandem.kernels.api import Kernels, KVLayer, PackedWeight, SampledRows
from tandem.kernels.dense_layers import DenseProgram, LayerInputs
from tandem.kernels.quantized import PackedQuantized


class DecodeRows(NamedTuple):
    """The state of an engine's N rows, in tensors that stay where they are. int64 [N]: the ``last_token``, which is fed, the ``length`` with it,
    ``random_key`` and ``top_k``; fp32 [N]: ``temperature``, ``top_p`` and ``min_p``; ``block_tables[N, C]`` int32."""

    last_token: Tensor
    length: Tensor
    random_key: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    block_tables: Tensor


class DecodeEnds(NamedTuple):
    """What is before and after a dense decoder's layers: the ``embedding[V, H]``, whose rows are multiplied by ``embedding_factor``, and the ``head[V, H]`` of
    the last norm multiplied by ``head_factor``, whose products the soft ``cap`` bounds, if there is one."""

    embedding: Tensor | PackedWeight
    embedding_factor: float
    head: PackedWeight | PackedQuantized
    head_factor: float
    cap: float | None


class DrawnRows(NamedTuple):
    """Where the tokens that N rows draw are recorded. int64 [N]: ``length`` and ``last_token`` as in ``DecodeRows``, the ``start``, from which on tokens are
    recorded, and the ``limit``, at which a row ends. [N, L]: ``tokens`` int64, and their log-probabilities ``raw`` and ``sampling`` fp32."""

    length: Tensor
    last_token: Tensor
    start: Tensor
    limit: Tensor
    tokens: Tensor
    raw: Tensor
    sampling: Tensor


class DecodeProgram(Protocol):
    """A decoding step, prepared once and then run in one call."""

    most_rows: int
    """With more rows the calls that it saves cost nothing beside the arithmetic, and its working memory would be large."""

    def run(self, caches: Sequence[KVLayer], index: Tensor, states: LayerInputs | None = None) -> SampledRows:
        """Draws the next token of each of the rows ``index[R]``, writing keys and values to ``caches``. The state of the rows is not changed. The bits are
        those of the kernels called one by one, and of ``Kernels.sample_rows`` with the random numbers of ``engine.sample.random_numbers``. ``states``: receives
        what its layers read; of no layers, what is after the last norm [R, H]."""
        ...


class RowRecorder(Protocol):
    """Records drawn tokens in one call."""

    def record(self, index: Tensor, stop_tokens: Tensor, sampled: SampledRows) -> list[int] | None:
        """Appends one token to each of the rows ``index[R]``. Returns the rows that end by their limit or by one of their ``stop_tokens[N, K]``; ``None`` where
        a log-probability is not finite, and nothing is recorded."""
        ...


def decode_program(program: DenseProgram, ends: DecodeEnds, rows: DecodeRows) -> DecodeProgram | None:
    """Returns the program of a step of ``rows`` around that of all layers; ``None`` if the kernels have none for it."""
    make: Any = getattr(type(program), "decode_program", None)
    made: DecodeProgram | None = None if make is None else make(program, ends, rows)
    return made


def row_recorder(kernels: Kernels, rows: DrawnRows) -> RowRecorder | None:
    """Returns what records in ``rows``; ``None`` if ``kernels`` have nothing for it, or not for these tensors."""
    make: Any = getattr(kernels, "row_recorder", None)
    made: RowRecorder | None = None if make is None else make(rows)
    return made
