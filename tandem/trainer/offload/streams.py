"""Work that a GPU does side by side: copies to it, its own, copies from it. On a CPU one after the other."""

from collections.abc import Callable
from typing import Any, Literal, Protocol

import torch

Lane = Literal["fetch", "compute", "bring back"]


class Streams(Protocol):
    """What is run on one lane is done in that order; two lanes keep to each other's only where one waits for a mark of the other."""

    def run(self, lane: Lane, work: Callable[[], object]) -> None: ...

    def mark(self, lane: Lane) -> Any:
        """What this lane has been given so far."""
        ...

    def wait(self, lane: Lane, mark: Any) -> None:
        """What is run on ``lane`` from now on begins when ``mark`` is reached (``None``: at once)."""
        ...

    def finish(self) -> None:
        """Until all lanes are done."""
        ...


class SerialStreams:
    """A CPU: work is done when it is given."""

    def run(self, lane: Lane, work: Callable[[], object]) -> None:
        work()

    def mark(self, lane: Lane) -> None:
        return None

    def wait(self, lane: Lane, mark: Any) -> None:
        pass

    def finish(self) -> None:
        pass


class CudaStreams:
    """A GPU: two streams for copies beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[Lane, torch.cuda.Stream] = {name: torch.cuda.Stream(device) for name in ("fetch", "bring back")}  # type: ignore[misc]

    def run(self, lane: Lane, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream(lane)):
            work()

    def mark(self, lane: Lane) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(lane))
        return event

    def wait(self, lane: Lane, mark: Any) -> None:
        if mark is not None:
            self._stream(lane).wait_event(mark)

    def finish(self) -> None:
        for stream in self._copies.values():
            stream.synchronize()
        torch.cuda.current_stream(self._device).synchronize()

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device) if lane == "compute" else self._copies[lane]


def streams_of(device: torch.device) -> Streams:
    return CudaStreams(device) if device.type == "cuda" else SerialStreams()
