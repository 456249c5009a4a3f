"""Offloads the activations saved for the backward pass to a file: written behind the forward pass, prefetched by the backward pass
(Rajbhandari et al., 2021, "ZeRO-Infinity", section 5, there for checkpointed activations)."""

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tandem.estimate.training_bytes import ACTIVATIONS_IN_FLIGHT_BYTES
from tandem.model.decoder import Decoder
from tandem.trainer.offload.tensor_file import TensorFile
from tandem.types import RunError

SMALLEST_BYTES = 64 << 10
"""Smaller tensors stay in memory."""


class _Page:
    """A tensor saved ``wanted`` times and unpacked ``given`` times, stored at byte ``at`` of the file. ``tensor``: set until it is written,
    and again from its prefetch to its last unpacking."""

    def __init__(self, number: int, at: int, tensor: Tensor) -> None:
        self.number, self.at = number, at
        self.shape, self.dtype, self.nbytes = tensor.shape, tensor.dtype, tensor.nbytes
        self.tensor: Tensor | None = tensor
        self.writing: Future[None] | None = None
        self.reading: Future[None] | None = None
        self.wanted, self.given = 1, 0


class ActivationOffload:
    """Installs hooks around the forward passes of ``model`` that a backward pass follows.

    At most ``passes`` forward passes may await their backward pass; the next one replaces the oldest. At most ``in_flight_bytes`` of
    tensors being written, and as many of prefetched tensors, are in memory, but always at least one tensor. Each pass has an unnamed file
    in ``folder`` that is deleted with the process; ``expected_bytes`` are allocated at once, more on demand.

    Raises ``RunError`` if the folder has no room."""

    def __init__(
        self, model: Decoder, folder: Path, expected_bytes: int, in_flight_bytes: int = ACTIVATIONS_IN_FLIGHT_BYTES, passes: int = 1
    ) -> None:
        self._model = model
        # A single thread keeps writes and reads in order.
        worker = ThreadPoolExecutor(1, thread_name_prefix="activations")
        self._passes = deque(_SavedPass(folder, expected_bytes, in_flight_bytes, worker) for _ in range(passes))
        self._hooks: AbstractContextManager[Any] | None = None
        model.register_forward_pre_hook(lambda *_: self._enter())
        model.register_forward_hook(lambda *_: self._leave(), always_call=True)

    @property
    def written_bytes(self) -> int:
        """Bytes written in the last forward pass."""
        return self._passes[-1].written_bytes

    def _enter(self) -> None:
        if not torch.is_grad_enabled():
            return
        for each in self._passes:
            each.release()
        self._passes.rotate(-1)
        # Weights and the rotary tables stay in memory.
        order = self._model.rotary_order
        constants = (*self._model.rotary_tables, *(() if order is None else (order,)))
        stays = {t.untyped_storage()._cdata for t in (*self._model.parameters(), *constants)}
        newest = self._passes[-1]
        newest.begin(stays)
        self._hooks = saved_tensors_hooks(newest.pack, newest.unpack)
        self._hooks.__enter__()

    def _leave(self) -> None:
        if self._hooks is not None:
            self._hooks.__exit__(None, None, None)
            self._hooks = None


class _SavedPass:
    """The activations saved by one forward pass."""

    def __init__(self, folder: Path, expected_bytes: int, in_flight_bytes: int, worker: ThreadPoolExecutor) -> None:
        self._folder, self._most_bytes, self._worker = folder, in_flight_bytes, worker
        self.written_bytes = 0
        self._file = TensorFile(folder, self._failed, expected_bytes)
        self._pages: list[_Page] = []
        self._writing: deque[_Page] = deque()
        self._by_memory: dict[tuple[int, torch.Size, torch.dtype], _Page] = {}
        self._writing_bytes = self._ahead_bytes = 0
        self._next_ahead: int | None = None
        self._stays: set[int] = set()

    def begin(self, stays: set[int]) -> None:
        """Starts a forward pass and discards the previous one, whose backward pass is done. ``stays``: storages that are not offloaded."""
        self.release()
        self._pages, self.written_bytes, self._stays = [], 0, stays

    def release(self) -> None:
        """Releases all tensors in memory."""
        self._let_go(0)
        for page in self._pages:
            if page.reading is not None:
                page.reading.result()
                page.tensor = page.reading = None
        self._ahead_bytes, self._next_ahead = 0, None

    def pack(self, saved: Tensor) -> Any:
        if saved.nbytes < SMALLEST_BYTES or saved.untyped_storage()._cdata in self._stays or not saved.is_contiguous():
            return saved
        key = (saved.data_ptr(), saved.shape, saved.dtype)
        if key in self._by_memory:
            # Same address, shape and dtype mean the same tensor, saved by several operations: a page is removed before its memory is
            # reused.
            self._by_memory[key].wanted += 1
            return self._by_memory[key]
        page = _Page(len(self._pages), self.written_bytes, saved)
        self.written_bytes += page.nbytes
        if self.written_bytes > self._file.size:
            self._file.grow(self.written_bytes + self.written_bytes // 4)
        page.writing = self._worker.submit(self._file.write, saved, page.at)
        self._pages.append(page)
        self._writing.append(page)
        self._by_memory[key] = page
        self._writing_bytes += page.nbytes
        self._let_go(max(self._most_bytes, page.nbytes))
        return page

    def _let_go(self, left_bytes: int) -> None:
        """Releases tensors, oldest first, until at most ``left_bytes`` of those being written are in memory."""
        while self._writing_bytes > left_bytes:
            page = self._writing.popleft()
            self._writing_bytes -= page.nbytes
            assert page.writing is not None
            page.writing.result()
            if page.tensor is not None:
                del self._by_memory[page.tensor.data_ptr(), page.shape, page.dtype]
                page.tensor = None

    def unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Page):
            return cast(Tensor, saved)
        page = saved
        if page.number >= len(self._pages) or self._pages[page.number] is not page:
            raise RuntimeError("the backward pass of these activations comes too late: a later forward pass has replaced them")
        self._begin_read(page)
        self._read_ahead(page)
        if page.reading is not None:
            page.reading.result()
        tensor = page.tensor
        assert tensor is not None
        page.given += 1
        if page.given >= page.wanted:
            if page.reading is not None:
                self._ahead_bytes -= page.nbytes
                page.tensor = page.reading = None
            elif (key := (tensor.data_ptr(), page.shape, page.dtype)) in self._by_memory:
                del self._by_memory[key]
                page.tensor = None
        return tensor

    def _read_ahead(self, page: _Page) -> None:
        """Prefetches pages in reverse order, which is about the order in which the backward pass needs them."""
        following = page.number - 1 if self._next_ahead is None else min(self._next_ahead, page.number - 1)
        while following >= 0 and self._ahead_bytes + self._pages[following].nbytes <= self._most_bytes:
            self._begin_read(self._pages[following])
            following -= 1
        self._next_ahead = following

    def _begin_read(self, page: _Page) -> None:
        if page.tensor is None:
            page.tensor = torch.empty(page.shape, dtype=page.dtype)
            self._ahead_bytes += page.nbytes
            page.reading = self._worker.submit(self._file.read, page.tensor, page.at)

    def _failed(self, reason: str) -> RunError:
        return RunError(
            f"'{self._folder}' cannot hold the offloaded activations (more than {self.written_bytes / 2**20:,.0f} MiB): {reason}; make room, "
            "name another folder in 'trainer.offload_folder', or lower trainer.micro_batch_tokens"
        )
