"""Batches in the order of the steps, prefetched by a thread, with a measure of how long compute waited for data."""

import queue
import threading
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Generic, TypeVar

from tandem.types import UserError

T = TypeVar("T")


def batch_indices(step: int, batch_size: int, rank: int = 0, ranks: int = 1) -> range:
    """Returns the sequences of the endless stream that ``rank`` of ``ranks`` takes in ``step``. All ranks together take
    ``step * batch_size`` to ``(step + 1) * batch_size - 1`` for any number of ranks; shares differ by at most one."""
    first = step * batch_size
    return range(first + batch_size * rank // ranks, first + batch_size * (rank + 1) // ranks)


class Loader(Generic[T]):
    """Batches of ``sequence(i)`` from ``first_step`` on, up to ``ahead`` of them prefetched. ``idle_s``: seconds that the consumer has
    waited after the first batch. Close it, or leave its ``with`` block, to end the thread."""

    def __init__(
        self, sequence: Callable[[int], T], batch_size: int, *, first_step: int = 0, rank: int = 0, ranks: int = 1, ahead: int = 4
    ) -> None:
        if batch_size < ranks:
            raise UserError(f"the batch has {batch_size} sequences for {ranks} data-parallel ranks; give each at least one")
        self.idle_s = 0.0
        self._sequence, self._batch_size, self._step = sequence, batch_size, first_step
        self._rank, self._ranks = rank, ranks
        self._ready: queue.Queue[list[T] | BaseException] = queue.Queue(maxsize=ahead)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read_ahead, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[tuple[int, list[T]]]:
        """Yields (step, this rank's sequences) without end. Raises what reading raised."""
        step = self._step
        while True:
            began = perf_counter()
            batch = self._ready.get()
            if isinstance(batch, BaseException):
                raise batch
            if step > self._step:
                self.idle_s += perf_counter() - began
            yield step, batch
            step += 1

    def _read_ahead(self) -> None:
        step = self._step
        while not self._ended.is_set():
            try:
                indices = batch_indices(step, self._batch_size, self._rank, self._ranks)
                sequences: list[T] = []
                for index in indices:
                    if self._ended.is_set():
                        return
                    sequences.append(self._sequence(index))
                batch: list[T] | BaseException = sequences
            except BaseException as error:
                batch = error
            while not self._ended.is_set():
                try:
                    self._ready.put(batch, timeout=0.2)
                    break
                except queue.Full:
                    continue
            if isinstance(batch, BaseException):
                return
            step += 1

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def __enter__(self) -> "Loader[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
