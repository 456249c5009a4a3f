"""The loss of the routers of a module of transformers: whether its class has one, and where it reads their logits."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.utils.output_capturing import OutputRecorder

from tandem.model.transformers_module.attention import Computing
from tandem.model.transformers_module.probe import followed

FUNCTION = "load_balancing_loss_func"
"""The name of the loss in the files of transformers."""


class RouterLoss(NamedTuple):
    """``routers``: the names of the modules whose output has the logits, in the order of the layers, and ``place``: where. ``num_experts`` of each, of which
    the ``each`` largest count. ``asked``: the coefficient that ``config.json`` asks for; 0 if it does not (``output_router_logits``)."""

    routers: tuple[str, ...]
    place: int
    num_experts: int
    each: int
    asked: float


NO_LOSS = RouterLoss((), 0, 0, 0, 0.0)


def observe_router_loss(network: Any) -> RouterLoss:
    """Returns the loss of the routers of ``network``, on the ``meta`` device, whose attention and experts are observed; ``NO_LOSS`` if its class adds none.
    Without ``routers`` the class reads their logits elsewhere than from the outputs of modules, so that its loss cannot be added here."""
    names = inspect.unwrap(type(network).forward).__globals__
    recorder = (getattr(network.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    coefficient = getattr(network, "router_aux_loss_coef", None)
    if FUNCTION not in names:
        return NO_LOSS
    unknown = NO_LOSS
    if getattr(network.config, "output_router_logits", False):
        unknown = NO_LOSS._replace(asked=float(coefficient) if isinstance(coefficient, int | float) else 1.0)
    if not isinstance(recorder, OutputRecorder) or not isinstance(coefficient, int | float):
        return unknown
    routers = {
        name: module for name, module in network.named_modules()
        if recorder.target_class is not None and isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
    }  # fmt: skip
    outputs: list[Any] = []
    hooks = [module.register_forward_hook(lambda _, __, output: outputs.append(output)) for module in routers.values()]
    calls: list[tuple[Any, int, int]] = []
    before = names[FUNCTION]

    def noted(logits: Any, num_experts: int, each: int, *_: Any, **__: Any) -> Any:
        calls.append((logits, num_experts, each))
        return before(None)

    names[FUNCTION] = noted
    try:
        followed(network, output_router_logits=True)
    except Exception:
        # A folder or a recipe that asks for the loss of a class that cannot be followed so is refused.
        return unknown
    finally:
        names[FUNCTION] = before
        for hook in hooks:
            hook.remove()
    if len(calls) != 1 or not calls[0][0] or len(calls[0][0]) != len(outputs) or not all(_gates(output, recorder.index) for output in outputs):
        return unknown
    _, num_experts, each = calls[0]
    return RouterLoss(tuple(routers), recorder.index, int(num_experts), int(each), float(unknown.asked))


def attach_router_loss(network: nn.Module, computing: Computing) -> None:
    """Lets the routers of ``network`` add their loss to the backward pass wherever ``computing`` has a ``balance``."""
    described = computing.shapes.transformers
    assert described is not None
    for mixture, name in enumerate(described.loss_routers):
        network.get_submodule(name).register_forward_hook(_with_loss(computing, mixture, described.logits_index))


def _with_loss(computing: Computing, mixture: int, index: int) -> Callable[..., Any]:
    def attached(_: nn.Module, __: Any, output: tuple[Any, ...]) -> Any:
        if computing.balance is None:
            return None
        place = _gates(output, index)[0]
        return (*output[:place], computing.balance.attach(output[place], mixture, output[index]), *output[place + 1 :])

    return attached


def _gates(output: Any, index: int) -> list[int]:
    """Returns the places of the floating-point tensors in the ``output`` of a router beside its logits."""
    if not isinstance(output, tuple) or not isinstance(output[index], Tensor):
        return []
    return [place for place, each in enumerate(output) if place != index and isinstance(each, Tensor) and each.is_floating_point()]
