"""What is known of the mixtures of experts in a module of transformers: their routers, the names of their matrices, and their size for estimates."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from tandem.model.transformers_module.experts import STACKED, is_mixture, visited_experts
from tandem.model.transformers_module.folder_names import Stored


class InnerSize(NamedTuple):
    """The MLP of a layer as estimates count it: ``rows`` inner numbers, with or without a gate."""

    rows: int
    has_gate: bool


def router_names(network: nn.Module) -> tuple[str, ...]:
    """Returns the names of the matrices in the blocks around mixtures that are parts of neither their experts nor an MLP: routers, gates of shared experts."""
    return tuple(dict.fromkeys(name for block in _blocks(network) for name, is_router in _beside_experts(network, block) if is_router))


def expert_names(network: nn.Module, stored: Iterable[Stored]) -> tuple[str, ...]:
    """Returns the last parts of the names of the experts' matrices, in the folder, which has them as ``stored``, and in the module."""
    mixtures = {name for name, module in network.named_modules() if is_mixture(module)}
    if not mixtures:
        return ()
    of_folder = [each.name.removesuffix(".weight").rpartition(".")[2] for each in stored if each.own.rpartition(".")[0] in mixtures]
    return tuple(dict.fromkeys((*of_folder, *STACKED)))


def inner_size(network: nn.Module, hidden: int, layers: int, dense: int) -> InnerSize | None:
    """Returns the mean over ``layers`` layers of what one token visits, of which those without a mixture have ``dense`` inner numbers; ``None`` without
    mixtures. ``network`` has been observed without numbers."""
    rows, has_gate, count = 0.0, True, 0
    for name, mixture in network.named_modules():
        if is_mixture(mixture):
            one = sum(parameter[0].numel() for key, parameter in mixture.named_parameters() if key in STACKED)
            block = name.rpartition(".")[0]
            shared = sum(network.get_parameter(each).numel() for each, is_router in _beside_experts(network, block) if not is_router)
            has_gate = bool(mixture.has_gate)
            rows += (visited_experts(mixture) * one + shared) / ((3 if has_gate else 2) * hidden)
            count += 1
    return InnerSize(max(1, round((rows + max(0, layers - count) * dense) / layers)), has_gate) if count else None


def _blocks(network: nn.Module) -> list[str]:
    return [name.rpartition(".")[0] for name, module in network.named_modules() if is_mixture(module)]


def _beside_experts(network: nn.Module, block: str) -> Iterator[tuple[str, bool]]:
    """Yields the names of the matrices in ``block`` beside its experts, and whether each is a router."""
    for name, module in network.get_submodule(block).named_modules(prefix=block):
        if is_mixture(module):
            continue
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 2:
                yield f"{name}.{key}", not (isinstance(module, nn.Linear) and _is_in_mlp(network, name, block))


def _is_in_mlp(network: Any, linear: str, block: str) -> bool:
    owner = linear.rpartition(".")[0]
    return owner != block and sum(isinstance(each, nn.Linear) for each in network.get_submodule(owner).children()) > 1
