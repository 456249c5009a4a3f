"""From the trainer's decoder to Hugging Face's names: what is transferred to engines."""

from collections.abc import Iterator

from torch import Tensor

from tandem.layout.shapes import parameters
from tandem.model.decoder import Decoder
from tandem.model.huggingface import to_huggingface
from tandem.types.errors import RunError


def convert(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """(name, view of the decoder's own memory) of every parameter, in the order in which checkpoints list them.

    Raises ``RunError`` where a parameter of the Hugging Face form is missing, is not expected or has another shape:
    such weights would leave a part of the engine as it was, in silence.
    """
    expected = dict(parameters(decoder.shapes))
    for name, tensor in to_huggingface(decoder):
        shape = expected.pop(name, None)
        if shape != tuple(tensor.shape):
            raise RunError(f"the weights' conversion gives '{name}' as {list(tensor.shape)}; the architecture has {shape}")
        yield name, tensor
    if expected:
        raise RunError(f"the weights' conversion leaves out '{next(iter(expected))}' and {len(expected) - 1} more")
