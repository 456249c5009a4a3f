"""Hidden states of chosen layers of a decoder, as the head of an EAGLE-3 draft reads them."""

from torch import Tensor

from tandem.kernels.dense_layers import LayerInputs


class AuxHiddenStates:
    """Receives the inputs of ``layers`` in a forward pass, as vLLM counts them: j is the residual stream [T, H] that layer j reads. Each is kept as often as
    ``layers`` names it. Of a packed batch whose ranks divide the tokens, a rank receives its own."""

    def __init__(self, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self._by_layer: dict[int, Tensor] = {}

    def receive(self, layer: int, x: Tensor | None, residual: Tensor) -> None:
        """Keeps the input of ``layer``, which is the residual stream with the output ``x`` of the layer before it, if it was asked for."""
        if layer in self.layers:
            self._by_layer[layer] = residual if x is None else x + residual

    def inputs_of(self, residual: Tensor) -> LayerInputs:
        """Returns what receives them from a program of all layers that begins with ``residual[T, H]``."""
        tokens, hidden = residual.shape
        inputs = LayerInputs(self.layers, residual.new_empty(tokens, len(self.layers) * hidden))
        self._by_layer.update(zip(self.layers, inputs.to.split(hidden, dim=1), strict=True))
        return inputs

    @property
    def states(self) -> list[Tensor]:
        """The states in the order of ``layers``."""
        return [self._by_layer[layer] for layer in self.layers]
