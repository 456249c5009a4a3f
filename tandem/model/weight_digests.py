"""Digests of the weights that a decoder really holds."""

import ctypes

from tandem.model.decoder import Decoder
from tandem.model.huggingface import to_huggingface


def weight_digests(decoder: Decoder) -> dict[str, str]:
    """The xxh3-128, in hexadecimal, of every tensor's bytes by Hugging Face name, in the decoder's own dtype. The decoder
    is not packed."""
    # Optional for whoever only generates.
    import xxhash

    found = {}
    for name, tensor in to_huggingface(decoder):
        held = tensor.contiguous().cpu()
        memory = (ctypes.c_char * held.nbytes).from_address(held.data_ptr())
        found[name] = str(xxhash.xxh3_128_hexdigest(memory))
    return found
