"""The trainer's side: write the converted weights to the buffer that is free and publish them."""

from collections.abc import Iterable

import torch
from torch import Tensor

from tandem.runtime.coordination.store import Store
from tandem.types.errors import RunError
from tandem.types.sample import WeightVersion
from tandem.types.weights import TensorEntry, WeightManifest
from tandem.weight_transfer.copying import Threads, address_of, copy_and_digest
from tandem.weight_transfer.manifest import aligned, make_manifest
from tandem.weight_transfer.publication import check_newer, current, publish
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers


class WeightWriter:
    """Registers one version after another in ``buffers``, which a shim owns and outlives this process with."""

    def __init__(self, buffers: WeightBuffers, store: Store, threads: int = 2) -> None:
        self.buffers, self.store = buffers, store
        self._threads = Threads(threads)
        self._touched: set[str] = set()

    def publish(self, tensors: Iterable[tuple[str, Tensor]], version: WeightVersion) -> WeightManifest:
        """Copy every tensor, digest it and make this ``version`` the current one, all or nothing.

        The buffer that holds the published version is not written to. Raises ``RunError`` where the tensors do not fit,
        or where ``version`` is not newer than the published one (a trainer that has been replaced meanwhile loses).
        """
        found = current(self.store)
        check_newer(version, None, found[0] if found else None)
        published = found[0].tensors[0].segment if found and found[0].tensors else None
        manifest = self._write(self.buffers.other(published), tensors, version)
        publish(self.store, manifest, found)
        return manifest

    def _write(self, segment: Segment, tensors: Iterable[tuple[str, Tensor]], version: WeightVersion) -> WeightManifest:
        named = list(tensors)
        sizes = [tensor.numel() * tensor.element_size() for _, tensor in named]
        offsets = place(sizes)
        needed = aligned(offsets[-1] + sizes[-1]) if named else 0
        if needed > segment.size_bytes:
            raise RunError(f"the weights take {needed} bytes and their shared memory has {segment.size_bytes}; they changed shape")
        if segment.name not in self._touched:
            segment.touch()
            self._touched.add(segment.name)
        base = address_of(segment.memory)

        def write(i: int) -> str:
            source = named[i][1].detach().cpu().contiguous()
            return copy_and_digest(base + offsets[i], source.data_ptr(), sizes[i], of_source=True)

        digests = self._threads.map(write, range(len(named)), sizes)
        entries = [
            TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), segment.name, offsets[i], sizes[i], digests[i])
            for i, (name, tensor) in enumerate(named)
        ]
        return make_manifest(version, entries)

    def close(self) -> None:
        """End the threads and let go of the buffers; their owner removes them."""
        self._threads.close()
        self.buffers.close()


def place(sizes: Iterable[int]) -> list[int]:
    """The offset of each tensor, one behind the other, each aligned."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end = aligned(end + size)
    return offsets


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
