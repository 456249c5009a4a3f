"""Where a rank of DeepSpeed holds its part of each parameter: runs of the flat fp32 tensors that its optimizer updates.

Under ZeRO 1 and 2 a rank owns an equal part of each parameter group laid end to end (``tensor_fragment`` of DeepSpeed), under ZeRO 3 an equal part of each
parameter (``ds_tensor``). Both are runs of flattened parameters.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn


class Fragment(NamedTuple):
    """Elements ``first`` and following, ``size`` of them, of the flattened parameter ``name`` are elements ``at`` and following of the flat tensor
    ``group``."""

    name: str
    first: int
    size: int
    group: int
    at: int

    def of(self, flat: Tensor) -> Tensor:
        """Returns the fragment's live elements of a tensor that is laid out as its group's."""
        return flat.detach().narrow(0, self.at, self.size)


def fragments_of(optimizer: Any, stage: int, parameters: Mapping[str, nn.Parameter], rank: int) -> list[Fragment]:
    """Returns the fragments of ``parameters`` that ``rank`` owns; padding is in none."""
    found = []
    for name, parameter in parameters.items():
        held: Any = parameter
        if stage == 3:
            group, at, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
            first = rank * length
            size = min(length, held.ds_numel - first)
            if size > 0:
                found.append(Fragment(name, first, size, group, at))
        elif (mapping := held._hp_mapping) is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            found.append(Fragment(name, here.start, here.numel, mapping.param_group_index, there.start))
    return found
