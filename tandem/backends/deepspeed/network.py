"""The network as DeepSpeed sees it: our decoder, in modules whose forward passes bring the weights that they need together under ZeRO 3."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from tandem.model.decoder import Decoder
from tandem.model.layer_pass import LayerFunction
from tandem.trainer.parallel.flat_buffer import layer_number


class LayerModule(nn.Module):
    """One layer of the decoder. DeepSpeed gathers all its weights before ``forward`` and before its backward pass, and frees them after each: it is a leaf
    for DeepSpeed, because the modules inside only hold weights and are never called."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, run: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Computes ``run(x, residual)``, the pass of this layer."""
        return run(x, residual)


class Network(nn.Module):
    """``decoder`` with every layer in a module of its own. The weights outside of layers belong to the whole pass, the loss included, because a tied
    embedding is read at both ends."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.around = nn.ModuleDict({name: LayerModule(layer) for name, layer in decoder.layers.named_children()})
        decoder.around_layer = lambda index, run, x, residual: self.around[str(index)](run, x, residual)

    def ends(self) -> list[nn.Parameter]:
        """Returns the weights outside of layers: the embedding, the last norm and the head."""
        return [parameter for name, parameter in self.decoder.named_parameters() if layer_number(name) is None]

    def forward(self, compute: Callable[[Decoder], Any]) -> Any:
        """Returns what ``compute`` makes of the decoder, whose weights are there."""
        return compute(self.decoder)
