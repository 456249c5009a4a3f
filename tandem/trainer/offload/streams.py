"""Ordered streams of work on a device: copies to a GPU, computation, and copies back overlap. On a CPU all work is serial."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

StreamName = Literal["host_to_device", "compute", "device_to_host"]


class Streams(Protocol):
    """Runs work in order within a stream. Streams are independent of each other except where one waits for an event of another."""

    def run(self, stream: StreamName, work: Callable[[], object]) -> None: ...

    def record_event(self, stream: StreamName) -> Any:
        """Returns an event that completes with all work given to this stream so far."""
        ...

    def wait(self, stream: StreamName, event: Any) -> None:
        """Makes later work on ``stream`` wait for ``event`` (``None``: no wait)."""
        ...

    def synchronize(self) -> None:
        """Waits until all streams are done."""
        ...


class SerialStreams:
    """Runs work immediately, for a CPU."""

    def run(self, stream: StreamName, work: Callable[[], object]) -> None:
        work()

    def record_event(self, stream: StreamName) -> None:
        return None

    def wait(self, stream: StreamName, event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


class CudaStreams:
    """Two CUDA streams for copies in addition to the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[StreamName, torch.cuda.Stream] = {name: torch.cuda.Stream(device) for name in ("host_to_device", "device_to_host")}  # type: ignore[misc]

    def run(self, stream: StreamName, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream(stream)):
            work()

    def record_event(self, stream: StreamName) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: StreamName, event: Any) -> None:
        if event is not None:
            self._stream(stream).wait_event(event)

    def synchronize(self) -> None:
        for stream in self._copies.values():
            stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def _stream(self, stream: StreamName) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if stream == "compute" else self._copies[stream]


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()
