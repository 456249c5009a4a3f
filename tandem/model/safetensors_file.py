"""Named tensors in a safetensors file. Reading is the library's; writing is here.

The library's writer refuses tensors that share memory, as the rows of a fused matrix do, and asks for a copy of each.
The format (huggingface/safetensors): an 8-byte little-endian length, a JSON header, the tensors' bytes one after
another.
"""

import ctypes
import json
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.types import UserError

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e4m3fn: "F8_E4M3",
}


def write_file(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write ``tensors`` in their order and flush them to the disk. Raises ``OSError`` as the system does, on a full
    disk too."""
    held = [(name, tensor.detach().cpu().contiguous()) for name, tensor in tensors]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in held:
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in held:
            _write_bytes(file, tensor)
        file.flush()
        os.fsync(file.fileno())


def read_file(
    path: Path, names: Iterable[str] | None = None, is_wanted: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of ``path``, or those of ``names``, or of either those that are wanted. Raises ``UserError`` for a file that is missing, broken or cut
    short, and for a name that it lacks."""
    try:
        with safe_open(path, framework="pt") as file:
            # An ordered set: a mixture of experts has tens of thousands of tensors.
            held = dict.fromkeys(file.keys())
            for name in held if names is None else names:
                if name not in held:
                    raise UserError(
                        f"'{path}' has no tensor '{name}', which its index lists; download the folder again"
                    )
                if is_wanted is None or is_wanted(name):
                    yield name, file.get_tensor(name)
    except FileNotFoundError:
        raise UserError(f"'{path}' is missing; download the folder again") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"'{path}' is broken or cut short ({error}); download it again") from None


def _write_bytes(file: BinaryIO, tensor: Tensor) -> None:
    if tensor.nbytes:
        file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
