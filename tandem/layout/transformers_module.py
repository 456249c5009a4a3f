"""What is known of a network that a module of transformers computes, as plain data. Imports no torch."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformersModule:
    """A causal language model of transformers.

    Attributes:
        class_name: Its class, for messages.
        parameters: (name, shape) of every parameter, as its folder names them, in its own order; a tied head is not listed.
        names: The names of the parameters in the module that they are parts of, in the same order.
        starts: The elements of those at which they begin: 0 but for the matrices of several experts in one parameter.
        embedding: The name of the embedding of tokens [V, H].
        head: The name of the head's weight, which a folder may have too where it is tied.
        attention: The names of the modules that call attention, one for each layer.
        layers: The name of the list of layers.
        linears: The names, without ``.weight``, of the linear layers that an adapter can change, which the folder and the module name alike.
        head_parameter: The name of the head's weight in the module.
        routers: The names in the module of the matrices that choose experts, and of those that weigh shared ones.
        expert_names: The last parts of the names of the experts' matrices, which PEFT takes for all experts of a layer wherever an adapter names them.
        loss_routers: The names of the modules whose outputs have the logits of a loss of routers, one for each mixture; empty if the class has none.
        logits_index: Where those outputs have them.
        num_experts: The experts of each mixture with that loss, and ``experts_per_token``: those of the largest probabilities that it counts.
        router_loss: The coefficient of the loss that ``config.json`` asks for (``output_router_logits``, ``router_aux_loss_coef``); 0 if it does not.
        ignored: Patterns of the names of tensors that a folder may have beside the parameters.
        trust_remote_code: The class is the code in the model's folder, which the user has allowed to run.
    """

    class_name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    names: tuple[str, ...]
    starts: tuple[int, ...]
    embedding: str
    head: str
    attention: tuple[str, ...]
    layers: str
    linears: tuple[str, ...] = ()
    head_parameter: str = ""
    routers: tuple[str, ...] = ()
    expert_names: tuple[str, ...] = ()
    loss_routers: tuple[str, ...] = ()
    logits_index: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    router_loss: float = 0.0
    ignored: tuple[str, ...] = ()
    trust_remote_code: bool = False

    @property
    def adaptable(self) -> tuple[str, ...]:
        """What PEFT's ``target_modules`` can name: the last parts of the names of ``linears``."""
        return tuple(dict.fromkeys(name.rpartition(".")[2] for name in self.linears))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor ``name`` of the folder."""
        return next(shape for own, shape in self.parameters if own == name)

    def check_adapted(self, target_modules: Iterable[str]) -> None:
        """Raises ``ValueError`` if there are no linear layers to adapt, or for the first of ``target_modules`` that experts have."""
        if not self.adaptable:
            raise ValueError("model has no linear layers that an adapter can change; leave trainer.lora out")
        for name in target_modules:
            if name in self.expert_names:
                possible = ", ".join(self.adaptable)
                raise ValueError(f"model has a mixture of experts, whose '{name}' can have no adapter; set target_modules to some of {possible}")

    def rows_of(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the rows of each matrix that is stacked in the parameter of this ``shape`` that ends in ``name``: those that the folder has apart, and of a
        tensor with gate and up those of both. The columns of the other matrix of an MLP of two say which that is: K, where the first has 2 K rows."""
        own = next((owner for owner in self.names if owner == name or owner.endswith(f".{name}")), name)
        apart = self._parts(own)
        if len(shape) == 3 and len(apart) > shape[0]:
            return tuple(part[-2] for part in apart[: len(apart) // shape[0]])
        block = _block(own)
        others = [other for other in dict.fromkeys(self.names) if other != own and _block(other) == block and not other.endswith("bias")]
        beside = [part for part in (self._parts(other)[0] for other in others) if len(part) > 1]
        if block in self.attention or len(beside) != 1 or (shape[-2], shape[-1]) != (2 * beside[0][-1], beside[0][-2]):
            return (shape[-2],)
        return (shape[-2] // 2,) * 2

    def _parts(self, own: str) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of the tensors of the folder that the parameter ``own`` of the module consists of."""
        return tuple(shape for owner, (_, shape) in zip(self.names, self.parameters, strict=True) if owner == own)

    def is_router(self, name: str) -> bool:
        """Returns whether the parameter that ends in ``name`` is one of ``routers``."""
        return any(own == name or own.endswith(f".{name}") for own in self.routers)

    def is_hidden(self, name: str, rows: int) -> bool:
        """Returns whether the parameter ``name`` of the decoder, a matrix of ``rows`` rows, is one that optimizers treat as a matrix of a layer."""
        return rows > 1 and not self.is_router(name) and name.removeprefix("network.") != self.head_parameter

    def ignores(self, name: str) -> bool:
        """Returns whether a folder may have the tensor ``name`` although it is no parameter."""
        return any(re.search(pattern, name) for pattern in self.ignored)


def _block(own: str) -> str:
    """Returns the name of the module whose parts include the linear layer, or the tensor of all experts, ``own``."""
    return own.removesuffix(".weight").rpartition(".")[0]
