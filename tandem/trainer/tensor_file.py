"""Named tensors in a safetensors file, written in one pass from where they lie in memory.

The format (huggingface/safetensors): an 8-byte little-endian length, a JSON header, the tensors' bytes. Reading is the
library's; writing is here because the library's writer holds all bytes a second time and asks for numpy.
"""

import ctypes
import json
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]], metadata: dict[str, str]) -> None:
    """Write ``tensors`` in their order. Raises ``OSError`` as the system does, a full disk included."""
    held = [(name, tensor.detach().to("cpu").contiguous()) for name, tensor in tensors]
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in held:
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        _write_all(file, memoryview(struct.pack("<Q", len(text)) + text))
        for _, tensor in held:
            size = tensor.numel() * tensor.element_size()
            if size:
                _write_all(file, memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B"))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of the file. Raises ``ValueError`` where it is no safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"'{path}' is not a safetensors file: {error}") from None


def _write_all(file: object, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]  # type: ignore[attr-defined]
