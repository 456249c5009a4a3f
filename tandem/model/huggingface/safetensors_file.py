"""Reads and writes named tensors in a safetensors file. Reading uses the library, writing does not.

The library's writer refuses tensors that share memory, as the rows of a fused matrix do, and would need a copy of each. The format
(huggingface/safetensors): an 8-byte little-endian length, a JSON header, the tensors' bytes one after another.
"""

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.types import UserError
from tandem.types.dtypes import SAFETENSORS_NAMES
from tandem.types.input_file import open_input

DTYPE_NAMES = {getattr(torch, dtype): name for dtype, name in SAFETENSORS_NAMES.items()}


class Form(NamedTuple):
    """The name, dtype and shape of a tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


def write_file(path: Path, tensors: Iterable[tuple[str, Tensor]], forms: Sequence[Form] | None = None) -> None:
    """Writes ``tensors`` in order and flushes them to the disk.

    ``forms``: those of ``tensors``, in the same order; each tensor is then taken and written one after another, so that one is in memory at
    a time. Raises ``OSError`` as the system does, including for a full disk, and ``ValueError`` if a tensor does not have its form."""
    held = tensors
    if forms is None:
        held = list(tensors)
        forms = [_form(name, tensor) for name, tensor in held]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for form in forms:
        size = math.prod(form.shape) * form.dtype.itemsize
        header[form.name] = {"dtype": DTYPE_NAMES[form.dtype], "shape": list(form.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for form, (name, tensor) in zip(forms, held, strict=True):
            if form != _form(name, tensor):
                raise ValueError(f"tensor {_form(name, tensor)} does not match the declared form {form}")
            _write_bytes(file, tensor.detach().cpu().contiguous())
        file.flush()
        os.fsync(file.fileno())


def read_file(
    path: Path, names: Iterable[str] | None = None, is_wanted: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of ``path``, or those in ``names``, filtered by ``is_wanted``. Raises ``UserError`` for a file that is missing,
    broken or truncated, and for a missing name."""
    try:
        # The library would wait for a FIFO.
        open_input(path).close()
        with safe_open(path, framework="pt") as file:
            # An ordered set, because a mixture of experts has tens of thousands of tensors.
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
        raise UserError(f"'{path}' is broken or truncated ({error}); download it again") from None


def _form(name: str, tensor: Tensor) -> Form:
    return Form(name, tensor.dtype, tuple(tensor.shape))


def _write_bytes(file: BinaryIO, tensor: Tensor) -> None:
    file.write(bytes_view(tensor))
