"""Where the module of transformers has the tensors of its folder: each is a parameter, or consecutive elements of one, such as a matrix of one expert."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.core_model_loading import revert_weight_conversion

from tandem.model.transformers_module.one_line import one_line
from tandem.types import UserError


class Stored(NamedTuple):
    """A tensor of the folder: its ``name`` there and ``shape``, and the parameter ``own`` of the module whose elements from ``start`` on it has."""

    name: str
    shape: tuple[int, ...]
    own: str
    start: int


def stored_tensors(network: Any, kept: Sequence[str]) -> list[Stored]:
    """Returns what the folder of ``network`` has of every parameter, also of those that are tied to another, and of the ``kept`` buffers. Raises
    ``UserError`` if transformers converts parameters when it saves them, beyond their names and their division into consecutive parts."""
    # Each has memory of its own here, also tied ones, so that a result shows of which it is a part.
    shapes = {name: parameter.shape for name, parameter in network.named_parameters(remove_duplicate=False)}
    shapes |= {name: network.get_buffer(name).shape for name in kept}
    every = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    own = {tensor.untyped_storage()._cdata: name for name, tensor in every.items()}
    try:
        with _WithoutCopies():
            written = revert_weight_conversion(network, dict(every))
    except Exception as error:
        raise UserError(f"its parameters are converted when it is saved ({one_line(error)})") from None
    stored, counts = [], dict.fromkeys(every, 0)
    for name, tensor in written.items():
        of = own.get(tensor.untyped_storage()._cdata)
        if of is None or not tensor.is_contiguous():
            raise UserError(f"its parameters are converted when it is saved ('{name}')")
        stored.append(Stored(name, tuple(tensor.shape), of, tensor.storage_offset()))
        counts[of] += tensor.numel()
    if any(counts[name] != tensor.numel() for name, tensor in every.items()):
        raise UserError("its parameters are converted when it is saved")
    return stored


class _WithoutCopies(TorchFunctionMode):
    """Lets ``contiguous`` return views."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.contiguous:
            return args[0]
        return func(*args, **(kwargs or {}))
