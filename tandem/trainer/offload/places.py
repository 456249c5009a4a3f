"""Where offloaded bytes are stored: an unnamed file, or host memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tandem.runtime.machine.tensor_bytes import bytes_view
from tandem.storage.digests import best_algorithm, new_digest
from tandem.trainer.offload.host_memory import host_zeros, unpin
from tandem.trainer.offload.tensor_file import TensorFile
from tandem.types import RunError

STAGED_BYTES = 16 << 20
"""The buffer between a GPU and a file."""
PIECE_BYTES = 1 << 20
"""What is written and digested at once, so that it is still in the processor's cache for the second of the two."""


class Place(Protocol):
    """Where offloaded bytes are stored, by their offset."""

    def grow(self, size: int) -> None:
        """Makes room for ``size`` bytes in all. Raises ``RunError`` if there is none."""
        ...

    def read(self, content: Tensor, at: int) -> str:
        """Fills ``content[n]`` uint8, on any device, from byte ``at`` on; returns when it is done, with the digest of what was read."""
        ...

    def write(self, content: Tensor, at: int) -> str:
        """Stores ``content[n]`` uint8, on any device, at byte ``at``; returns when it is done, with its digest. A place without digests returns empty
        ones."""
        ...

    def close(self) -> None: ...


class FilePlace:
    """An unnamed file in ``folder``. ``staging``: a page-locked buffer that the bytes of a GPU pass through (``None``: content is in host
    memory)."""

    def __init__(self, folder: Path, staging: Tensor | None = None) -> None:
        self._file = TensorFile(folder, lambda reason: RunError(
            f"'{folder}' cannot hold the trainer's residents: {reason}; make room, name another folder in 'trainer.offload_folder', or set "
            "residents.plan to keep or sleep"
        ))  # fmt: skip
        self._staging, self._algorithm = staging, best_algorithm()

    @property
    def descriptor(self) -> int:
        """The file's descriptor."""
        return self._file.descriptor

    def grow(self, size: int) -> None:
        self._file.grow(size)

    def read(self, content: Tensor, at: int) -> str:
        digest = new_digest(self._algorithm)
        for piece, host, start in self._pieces(content, at):
            self._file.read(host, start)
            digest.update(bytes_view(host))
            if host is not piece:
                piece.copy_(host)
        return str(digest.hexdigest())

    def write(self, content: Tensor, at: int) -> str:
        digest = new_digest(self._algorithm)
        for piece, host, start in self._pieces(content, at):
            if host is not piece:
                host.copy_(piece)
            digest.update(bytes_view(host))
            self._file.write(host, start)
        return str(digest.hexdigest())

    def close(self) -> None:
        self._file.close()
        if self._staging is not None:
            unpin(self._staging)

    def _pieces(self, content: Tensor, at: int) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Yields each piece of ``content``, the host memory that it passes through (itself, if it is there), and its byte in the file."""
        for piece in content.split(PIECE_BYTES if self._staging is None else len(self._staging)):
            yield piece, piece if self._staging is None else self._staging[: len(piece)], at
            at += len(piece)


class HostPlace:
    """Host memory, which is allocated once and reused. ``pinned``: page-locked, for full-speed copies from a GPU. It has no digests, as the memory of
    a process has none."""

    def __init__(self, pinned: bool) -> None:
        self._is_pinned, self._size = pinned, 0
        self._blocks: list[tuple[int, Tensor]] = []

    def grow(self, size: int) -> None:
        if size > self._size:
            self._blocks.append((self._size, host_zeros(size - self._size, torch.uint8, self._is_pinned)))
            self._size = size

    def read(self, content: Tensor, at: int) -> str:
        for part, held in self._overlaps(content, at):
            part.copy_(held)
        return ""

    def write(self, content: Tensor, at: int) -> str:
        for part, held in self._overlaps(content, at):
            held.copy_(part)
        return ""

    def close(self) -> None:
        for _, block in self._blocks:
            unpin(block)
        self._blocks.clear()
        self._size = 0

    def _overlaps(self, content: Tensor, at: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields each part of ``content`` at byte ``at`` that lies in one block, with the block's part."""
        for start, block in self._blocks:
            first, last = max(at, start), min(at + len(content), start + len(block))
            if first < last:
                yield content[first - at : last - at], block[first - start : last - start]


def make_place(to: str, device: torch.device, folder: Path) -> Place | None:
    """Returns the place that residents of ``device`` are moved ``to``, ``memory`` or ``disk``; ``None`` if they are there already. ``folder``: of the
    file."""
    on_gpu = device.type == "cuda"
    if to == "disk":
        return FilePlace(folder, host_zeros(STAGED_BYTES, torch.uint8, pinned=True) if on_gpu else None)
    return HostPlace(pinned=True) if on_gpu else None
