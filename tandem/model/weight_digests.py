"""Digests of the weights that a decoder holds."""

import ctypes
from collections.abc import Iterator

from torch import Tensor

from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import to_huggingface


def weight_digests(decoder: Decoder) -> dict[str, str]:
    """Returns the xxh3-128, in hexadecimal, of every tensor's bytes by Hugging Face name, in the decoder's own dtype; for a packed decoder
    (a quantized folder is read as one), of every parameter and packed tensor by its name in the decoder."""
    # An optional dependency, not needed for generation.
    import xxhash

    digests = {}
    for name, tensor in packed_tensors(decoder) if decoder.is_packed else to_huggingface(decoder):
        held = tensor.detach().contiguous().cpu()
        memory = (ctypes.c_char * held.nbytes).from_address(held.data_ptr())
        digests[name] = str(xxhash.xxh3_128_hexdigest(memory))
    return digests


def packed_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    yield from decoder.named_parameters()
    for index, matrices in enumerate(decoder.packed_matrices()):
        for name, matrix in matrices.items():
            yield from _tensors_of(f"layers.{index}.{name}", matrix)


def _tensors_of(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, list | tuple):
        fields = getattr(value, "_fields", range(len(value)))
        for field, part in zip(fields, value, strict=True):
            yield from _tensors_of(f"{name}.{field}", part)
