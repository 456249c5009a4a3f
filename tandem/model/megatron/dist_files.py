"""Finds Megatron's distributed checkpoints (``torch_dist``) and checks them before anything in them is unpickled by another library.

A folder ``iter_NNNNNNN`` or ``release`` has ``metadata.json``, ``common.pt`` (``args`` and what else all ranks have in common), ``.metadata`` (where each
tensor is) and the tensors in ``*.distcp``, in the format of ``torch.distributed.checkpoint``.
"""

import json
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple

from tandem.model.megatron.files import checkpoint_folder, load_file
from tandem.types import UserError
from tandem.types.dtypes import DTYPE_BYTES

BACKEND, COMMON, PLACES = "metadata.json", "common.pt", ".metadata"
ALLOWED = {
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.planner": ("BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "collections": ("OrderedDict",),
    "builtins": ("set",),
}  # fmt: skip
"""The names that a file of places may have, beside those of dtypes: none of them does anything but hold values."""


class DistCheckpoint(NamedTuple):
    """``folder``: with the tensors. ``arguments``: Megatron's, if it has them."""

    folder: Path
    arguments: Namespace | None
    iteration: int


def is_dist_checkpoint(folder: Path) -> bool:
    """Returns whether the checkpoint in ``folder`` (the one that its tracker names, or ``folder`` itself) is a distributed one."""
    return (checkpoint_folder(folder) / BACKEND).is_file()


def open_dist_checkpoint(folder: Path) -> DistCheckpoint:
    """Returns the checkpoint in ``folder``. Raises ``UserError`` in one line for one that is damaged, of another format, or has objects that are no tensors."""
    inner = checkpoint_folder(folder)
    try:
        backend = json.loads((inner / BACKEND).read_text(encoding="utf-8")).get("sharded_backend")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"'{inner / BACKEND}' cannot be read ({error}); give a distributed checkpoint of Megatron") from None
    if backend != "torch_dist":
        raise UserError(f"the Megatron checkpoint '{inner}' has the format '{backend}'; only 'torch_dist' is supported")
    _check_places(inner / PLACES)
    common: dict[str, Any] = load_file(inner / COMMON)
    arguments = common.get("args")
    return DistCheckpoint(inner, arguments if isinstance(arguments, Namespace) else None, int(common.get("iteration") or 0))


class _Checking(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()) and not (module == "torch" and name in DTYPE_BYTES):
            raise UserError(f"it has an object of '{module}.{name}', which is not supported")
        return super().find_class(module, name)


def _check_places(path: Path) -> None:
    try:
        with path.open("rb") as file:
            _Checking(file).load()
    except UserError as error:
        raise UserError(f"'{path}' is refused: {error}") from None
    except Exception as error:  # A damaged pickle raises anything.
        raise UserError(f"'{path}' is damaged or missing ({' '.join(str(error).split())[:120]}); copy it again") from None
