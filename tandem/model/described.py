"""What is known of a network without its weights."""

from typing import Protocol

import torch

from tandem.layout.shapes import ModelShapes


class DescribedModel(Protocol):
    """A network of ``shapes`` whose weights have ``dtype`` on ``device``: a ``Decoder``, or the model of another library."""

    @property
    def shapes(self) -> ModelShapes: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...
