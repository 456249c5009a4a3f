"""What is known of a network that a module of transformers computes, as plain data. Imports no torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransformersModule:
    """A causal language model of transformers.

    Attributes:
        class_name: Its class, for messages.
        parameters: (name, shape) of every parameter, as its folder names them, in its own order; a tied head is not listed.
        names: The names of the parameters in the module, in the same order.
        embedding: The name of the embedding of tokens [V, H].
        head: The name of the head's weight, which a folder may have too where it is tied.
        attention: The names of the modules that call attention, one for each layer.
        layers: The name of the list of layers.
        ignored: Patterns of the names of tensors that a folder may have beside the parameters.
        trust_remote_code: The class is the code in the model's folder, which the user has allowed to run.
    """

    class_name: str
    parameters: tuple[tuple[str, tuple[int, ...]], ...]
    names: tuple[str, ...]
    embedding: str
    head: str
    attention: tuple[str, ...]
    layers: str
    ignored: tuple[str, ...] = ()
    trust_remote_code: bool = False

    def ignores(self, name: str) -> bool:
        """Returns whether a folder may have the tensor ``name`` although it is no parameter."""
        return any(re.search(pattern, name) for pattern in self.ignored)
