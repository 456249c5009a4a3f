"""Copies checkpoints to object storage in the background."""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from time import perf_counter

from tandem.storage.files import Storage
from tandem.trainer.checkpoint.checkpointer import wait_for
from tandem.trainer.checkpoint.remote import prune_uploads, upload, uploaded_steps
from tandem.trainer.checkpoint.tiers.tier import Written
from tandem.types import RunError

logger = logging.getLogger(__name__)


class Uploader:
    """Uploads committed checkpoints, the newest first; keeps the newest ``keep`` in the storage. Before each it copies the files that
    ``companions`` returns, by their name in the storage, and before the first one the files of ``once``.

    A failed copy is reported to ``on_message`` (default: a warning in the log) and retried with the next checkpoint; ``finish`` raises if
    the last one failed."""

    def __init__(
        self, storage: Storage, checkpoints: Path, keep: int, companions: Callable[[], Mapping[str, Path]] = dict,
        once: Mapping[str, Path] | None = None, on_message: Callable[[str], None] | None = None,
    ) -> None:
        self._storage, self._checkpoints, self._keep, self._companions, self._once = storage, checkpoints, keep, companions, once or {}
        self._on_message = on_message or logger.warning
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="upload")
        self._lock = Lock()
        self._wanted: int | None = None
        self._at_work: int | None = None
        self._last: Future[None] | None = None
        self._written: deque[Written] = deque()

    def add(self, step: int) -> None:
        """Queues the committed ``step``; it replaces a step that is still queued."""
        with self._lock:
            self._wanted = step
        self._last = self._thread.submit(self._work)

    def in_use(self) -> set[int]:
        """Returns the steps whose folders must be kept until they are copied."""
        with self._lock:
            return {step for step in (self._wanted, self._at_work) if step is not None}

    def take_written(self) -> list[Written]:
        """Returns what was copied since the last call."""
        return [self._written.popleft() for _ in range(len(self._written))]

    def finish(self, beat: Callable[[], None] | None = None) -> None:
        """Waits for the copies and calls ``beat`` every second. Raises ``RunError`` if the newest checkpoint could not be copied."""
        if self._last is not None:
            wait_for(self._last, beat)
            self._last.result()

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _work(self) -> None:
        with self._lock:
            step, self._at_work, self._wanted = self._wanted, self._wanted, None
        try:
            if step is not None:
                self._copy(step)
        finally:
            with self._lock:
                self._at_work = None

    def _copy(self, step: int) -> None:
        folder, began = self._checkpoints / f"step-{step}", perf_counter()
        try:
            if step not in uploaded_steps(self._storage):
                for name, path in {**self._once, **self._companions()}.items():
                    if path.is_file():
                        self._storage.copy(name, path)
                self._once = {}
                sent = upload(self._storage, folder)
                self._written.append(Written("upload", step, sent, perf_counter() - began))
            prune_uploads(self._storage, self._keep)
        except (RunError, OSError) as error:
            line = f"the checkpoint of step {step} is complete in '{folder}' but not uploaded: {error}"
            self._on_message(line)
            raise RunError(line) from None
