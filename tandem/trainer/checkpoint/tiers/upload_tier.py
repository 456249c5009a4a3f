"""The farthest tier: copies of the run's checkpoints in object storage, of which the newest whole one is fetched where the folder has none."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tandem.storage.files import open_storage
from tandem.trainer.checkpoint.checkpointer import wait_for
from tandem.trainer.checkpoint.remote import fetch_newest


def fetch_copy(url: str, checkpoints: Path, beat: Callable[[], None] | None = None) -> int | None:
    """Downloads the newest whole copy at ``url`` to ``checkpoints`` and calls ``beat`` meanwhile. Returns its step, ``None`` if there is none."""
    storage = open_storage(url)
    with ThreadPoolExecutor(1, thread_name_prefix="fetch") as thread:
        pending = thread.submit(fetch_newest, storage, checkpoints)
        wait_for(pending, beat)
        return pending.result()
