"""Numbers in the folder of a module of transformers that no gradient changes, such as the bias on the choice of experts: they are read, published and written
as they are."""

from typing import Any

import torch
from torch import Tensor, nn

from tandem.types import UserError


def kept_names(network: Any) -> tuple[str, ...]:
    """Returns the names of these numbers in ``network``, which are buffers of it then. Raises ``UserError`` if some are no floating-point numbers."""
    for name, parameter in list(network.named_parameters()):
        if not parameter.requires_grad:
            owner, leaf = _owner(network, name)
            del owner._parameters[leaf]
            owner.register_buffer(leaf, parameter.detach())
    trained = dict(network.named_parameters(remove_duplicate=False))
    names = tuple(name for name in network.state_dict() if name not in trained)
    for name in names:
        if not network.get_buffer(name).is_floating_point():
            raise UserError(f"it keeps '{name}' in its folder, which has no floating-point numbers")
    return names


class Kept(nn.Module):
    """The numbers that ``network`` keeps, as parameters whose memory its buffers share. ``is_trained``: they have gradients, of 0."""

    def __init__(self, network: nn.Module, dtype: torch.dtype, is_trained: bool) -> None:
        super().__init__()
        self._network = [network]
        self.names = kept_names(network)
        for index, name in enumerate(self.names):
            # Weight decay leaves out what is named so.
            parameter = nn.Parameter(network.get_buffer(name).detach().to(dtype), requires_grad=is_trained)
            self.register_parameter(f"{index}_bias", parameter)
        self.bind()

    def bind(self) -> None:
        """Lets the buffers share the memory of the parameters, after that has changed."""
        for name, parameter in self.by_name().items():
            owner, leaf = _owner(self._network[0], name)
            owner._buffers[leaf] = parameter.detach()

    def by_name(self) -> dict[str, Tensor]:
        """Returns the parameters by their names in the network."""
        return dict(zip(self.names, self.parameters(), strict=True))


def _owner(network: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module that has the buffer or parameter ``name``, and the name there."""
    path, _, leaf = name.rpartition(".")
    return network.get_submodule(path), leaf
