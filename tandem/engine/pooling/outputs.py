"""The outputs of pooling requests, with vLLM's names."""

import array
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tandem.types import WeightVersion


@dataclass(frozen=True, slots=True)
class PooledData:
    """Numbers of a pooling request as they travel. ``shape``: [D] for a vector or the scores of labels, [T, D] for those of each token. ``data``: fp32 in
    the byte order of the machine, row by row. ``weight_version``: the weights that computed them."""

    shape: tuple[int, ...]
    data: bytes
    weight_version: WeightVersion

    def rows(self) -> list[list[float]]:
        """Returns the numbers of each row; a vector is one row."""
        width, values = self.shape[-1], array.array("f", self.data).tolist()
        return [values[i : i + width] for i in range(0, len(values), width)]


@dataclass(frozen=True, slots=True)
class PoolingOutput:
    """``data``: an fp32 ``torch.Tensor``, [D] or [T, D]."""

    data: Any


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """``embedding``: the vector of the text."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """``probs``: the score of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """``score``: how well two texts belong together."""

    score: float


O = TypeVar("O")  # noqa: E741 - as in vLLM's generic outputs.


@dataclass(frozen=True, slots=True)
class PoolingRequestOutput(Generic[O]):
    """The output of one pooling request. ``num_cached_tokens``: tokens that the prefix cache held."""

    request_id: str
    outputs: O
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
