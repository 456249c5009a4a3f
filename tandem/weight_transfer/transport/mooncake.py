"""The Mooncake transfer engine (kvcache-ai/Mooncake), over RDMA or TCP: one-sided reads of another pod's memory by address. No torch.

A one-sided read asks nobody, so the receiver itself reads the label of the segment, before and after the weights. Mooncake has no credential: whoever
reaches its ports can read and write registered memory, so it is used only where a pod is told to.
"""

import ctypes
import functools
import os
import socket
import types
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tandem.runtime.process.deadline import LOOK_S, Deadline
from tandem.types.errors import RunError, UserError
from tandem.weight_transfer.copying import address_of
from tandem.weight_transfer.manifest import ALIGNMENT_BYTES
from tandem.weight_transfer.publication import describe
from tandem.weight_transfer.shared_memory import LABEL_BYTES, Contents, Segment, decode_label, file_bytes
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, Protocol
from tandem.weight_transfer.transport.pieces import Piece, SourceLost, SourceStuck, VersionMoved, buckets_of

NAMES: dict[Protocol, str] = {"rdma": "rdma", "mooncake": "tcp"}
"""Mooncake's names of the protocols."""
_BUCKET_BYTES = 64 * 2**20
_TRANSFER_S = 30
"""After as many seconds without an end Mooncake gives a transfer up."""
STUCK_S = 2 * _TRANSFER_S
"""After as many seconds it is not going to."""


@functools.cache
def module() -> types.ModuleType | None:
    """Returns Mooncake's Python module, ``None`` if it or a library that it needs is not installed."""
    os.environ.setdefault("MC_TRANSFER_TIMEOUT", str(_TRANSFER_S))
    os.environ.setdefault("MC_LOG_LEVEL", "WARNING")
    try:
        from mooncake import engine
    except ImportError:
        return None
    return engine  # type: ignore[no-any-return]


def available() -> tuple[Protocol, ...]:
    """Returns the protocols that this machine can use through Mooncake."""
    if module() is None:
        return ()
    devices = Path("/sys/class/infiniband")
    return ("rdma", "mooncake") if devices.is_dir() and any(devices.iterdir()) else ("mooncake",)


@functools.cache
def transfer_engine(protocol: Protocol, host: str) -> Any:
    """Returns this process's engine for ``protocol``, known to other pods by its address ``host``. Raises ``UserError`` if Mooncake is missing or does not
    start."""
    found = module()
    if found is None:
        raise UserError(f"the protocol '{protocol}' needs Mooncake: pip install 'tandem-rl[mooncake]', and the system's libibverbs1")
    if protocol == "mooncake":
        # Without it Mooncake takes an RDMA device where it finds one.
        os.environ["MC_FORCE_TCP"] = "1"
    engine = found.TransferEngine()
    status = engine.initialize(host, "P2PHANDSHAKE", NAMES[protocol], "")
    if status != 0:
        raise UserError(f"Mooncake did not start with the protocol '{NAMES[protocol]}' on {host} (status {status}); its messages are in the shim's log")
    return engine


class MooncakeService:
    """Lets other pods read ``segments``, which this process owns."""

    def __init__(self, protocol: Protocol, segments: Sequence[Segment], host: str) -> None:
        self._engine = transfer_engine(protocol, host)
        self._addresses = [address_of(segment.memory) for segment in segments]
        for address, segment in zip(self._addresses, segments, strict=True):
            _register(self._engine, address, file_bytes(segment.size_bytes))
        self.offer = Offer(protocol, host, int(self._engine.get_rpc_port()), tuple(self._addresses))

    def close(self) -> None:
        for address in self._addresses:
            self._engine.unregister_memory(address)


class MooncakeSource:
    """Reads the segments of ``endpoint`` through ``offer``. While a bucket arrives, the one before it is digested. Memory stays registered until ``close``,
    which must come before the memory is freed."""

    def __init__(self, endpoint: Endpoint, offer: Offer) -> None:
        self.peer = f"pod {endpoint.pod} at {offer.host}:{offer.port}"
        self._session, self._size_bytes = f"{offer.host}:{offer.port}", endpoint.size_bytes
        self._addresses = dict(zip(endpoint.segments, offer.addresses, strict=True))
        self._engine = transfer_engine(offer.protocol, _own_address(offer.host))
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mooncake")
        self._label = ctypes.create_string_buffer(LABEL_BYTES)
        self._registered: set[int] = set()
        self._register(ctypes.addressof(self._label), LABEL_BYTES)

    def read(self, segment: str, contents: Contents, pieces: Sequence[Piece], into: memoryview, deadline: Deadline) -> None:
        """See ``Source.read``."""
        remote, local = self._addresses[segment], address_of(into)
        self._register(local, len(into))
        self._check_label(remote, contents)
        with ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
            for bucket in buckets_of(pieces, _BUCKET_BYTES):
                if deadline.passed:
                    raise TimeoutError(f"{self.peer} did not send the weights within {deadline.seconds:g} s")
                runs = runs_of(bucket)
                self._transfer([local + at for at, _ in runs], [remote + at for at, _ in runs], [size for _, size in runs])
                pool.submit(_digest, bucket, into)
        self._check_label(remote, contents)

    def close(self) -> None:
        self._pool.shutdown(wait=False)
        for address in self._registered:
            self._engine.unregister_memory(address)
        self._registered.clear()

    def _register(self, address: int, size_bytes: int) -> None:
        if address not in self._registered:
            _register(self._engine, address, size_bytes)
            self._registered.add(address)

    def _check_label(self, remote: int, contents: Contents) -> None:
        self._transfer([ctypes.addressof(self._label)], [remote + self._size_bytes], [LABEL_BYTES])
        held = decode_label(self._label.raw)
        if held != contents:
            what = "nothing" if held is None else f"the weights {describe(held.version)}"
            raise VersionMoved(f"{self.peer} refused to send weights: it holds {what} in the place of the weights {describe(contents.version)}")

    def _transfer(self, local: Sequence[int], remote: Sequence[int], sizes: Sequence[int]) -> None:
        if local:
            # In a thread of its own, so that this one looks at the clock: see ``PauseClock``.
            running = self._pool.submit(self._engine.batch_transfer_sync_read, self._session, list(local), list(remote), list(sizes))
            limit = Deadline(STUCK_S)
            while wait([running], LOOK_S).not_done:
                if limit.passed:
                    text = f"a transfer of Mooncake's from {self.peer} did not end within {STUCK_S:g} s and may still write to this pod's memory"
                    raise SourceStuck(f"{text}; start the sidecar again")
            status = running.result()
            if status != 0:
                raise SourceLost(f"the connection to {self.peer} broke: Mooncake's status is {status}")


def runs_of(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """Returns what is missing of ``pieces`` as few ranges (offset, bytes), which have the gaps that align tensors."""
    runs: list[tuple[int, int]] = []
    for offset, size in sorted(piece.missing for piece in pieces if not piece.is_complete):
        if runs and offset - sum(runs[-1]) < ALIGNMENT_BYTES:
            runs[-1] = (runs[-1][0], offset + size - runs[-1][0])
        else:
            runs.append((offset, size))
    return runs


def _digest(pieces: Sequence[Piece], memory: memoryview) -> None:
    for piece in pieces:
        piece.arrived(memory, piece.missing[1])


def _register(engine: Any, address: int, size_bytes: int) -> None:
    status = engine.register_memory(address, size_bytes)
    if status != 0:
        raise RunError(f"Mooncake could not register {size_bytes} bytes of memory (status {status}); for RDMA, raise the limit of locked memory (ulimit -l)")


def _own_address(host: str) -> str:
    """Returns the address of this machine from which ``host`` is reached. Sends nothing."""
    family, kind, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
