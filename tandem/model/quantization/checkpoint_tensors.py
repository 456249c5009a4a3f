"""The tensors of a quantized folder while they are read."""

from torch import Tensor

from tandem.types import UserError

Tensors = dict[str, Tensor]
"""Those that are not read yet, by name."""


def take(name: str, tensors: Tensors, shape: tuple[int, ...]) -> Tensor:
    """Removes and returns ``name``. Raises ``UserError`` if it is missing or of another shape."""
    if name not in tensors:
        raise UserError(f"tensor '{name}' is missing from the weights; config.json requires it")
    tensor = tensors.pop(name)
    if tuple(tensor.shape) != shape:
        raise UserError(f"tensor '{name}' has shape {list(tensor.shape)}; config.json requires {list(shape)}")
    return tensor
