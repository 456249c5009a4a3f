"""What a pooling request asks for."""

from dataclasses import dataclass
from typing import Literal, get_args

from tandem.config.arguments import explained
from tandem.config.vllm_names import POOLING
from tandem.types import UserError

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


@explained(POOLING)
@dataclass(frozen=True, slots=True)
class PoolingParams:
    """The parameters of a pooling request, with vLLM's names.

    Args:
        task: ``embed``: a vector for the text. ``classify``: its score. ``token_embed``, ``token_classify``: one for each token. ``None``: what the
            model does.
        use_activation: Whether a vector is normalized to length 1, and a score mapped to 0 to 1. ``None``: as the model's folder says.
        dimensions: Keep the first components of a vector alone.
    """

    task: PoolingTask | None = None
    use_activation: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in TASKS:
            raise UserError(f"pooling task is {self.task!r}; it must be one of {', '.join(TASKS)}")
        if self.dimensions is not None and self.dimensions < 1:
            raise UserError(f"pooling dimensions is {self.dimensions}; it must be at least 1")
