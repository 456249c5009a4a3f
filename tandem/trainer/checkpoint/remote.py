"""Checkpoints in object storage: copied file by file, each read back and compared, the marker last; downloaded in the same way.

Objects under ``step-N/`` without a ``step-N/COMMIT`` are ignored, so an interrupted upload is not a copy, and the next attempt continues
with the files already there.
"""

import logging
import re
import shutil
from pathlib import Path
from time import sleep

from tandem.storage.files import Storage, read_blocks
from tandem.storage.folder_manifest import sync_path
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.format.manifest import Damaged, verify
from tandem.types import RunError

logger = logging.getLogger(__name__)

PAUSES_S = (0.2, 1.0, 4.0)
"""Seconds between the attempts to copy a file."""


def uploaded_steps(storage: Storage) -> list[int]:
    """Returns the steps whose copies are complete, ascending."""
    matches = (re.fullmatch(rf"step-(\d+)/{MARKER}", file.name) for file in storage.files())
    return sorted(int(match[1]) for match in matches if match)


def upload(storage: Storage, folder: Path) -> int:
    """Uploads the committed checkpoint ``folder``; returns the bytes sent. Raises ``RunError`` if the storage rejects them or returns other
    bytes."""
    there = {file.name: file.size for file in storage.files()}
    sent = 0
    names = sorted(path.name for path in folder.iterdir() if path.name != MARKER)
    for name in (*names, MARKER):
        source, target = folder / name, f"{folder.name}/{name}"
        size = source.stat().st_size
        if there.get(target) == size and _is_same(storage, target, source):
            continue
        _copy(storage, target, source)
        sent += size
    return sent


def _copy(storage: Storage, target: str, source: Path) -> None:
    for pause in (*PAUSES_S, None):
        try:
            storage.copy(target, source)
            if not _is_same(storage, target, source):
                raise RunError(f"'{storage.url}/{target}' reads back differently from what was written")
            return
        except RunError:
            if pause is None:
                raise
            sleep(pause)


def _is_same(storage: Storage, name: str, source: Path) -> bool:
    with source.open("rb") as here:
        return all(here.read(len(block)) == block for block in read_blocks(storage, name)) and not here.read(1)


def prune_uploads(storage: Storage, keep: int) -> list[int]:
    """Removes all but the newest ``keep`` complete copies, and incomplete copies of older steps; returns the removed steps. The marker is
    deleted first, so that a half-deleted copy is ignored."""
    whole = uploaded_steps(storage)
    kept = set(whole[-keep:])
    names: dict[int, list[str]] = {}
    for file in storage.files():
        match = re.match(r"step-(\d+)/", file.name)
        if match:
            names.setdefault(int(match[1]), []).append(file.name)
    removed = [step for step in sorted(names) if step not in kept and whole and step < whole[-1]]
    for step in removed:
        for name in sorted(names[step], key=lambda name: not name.endswith(f"/{MARKER}")):
            storage.remove(name)
    return removed


def fetch_newest(storage: Storage, checkpoints: Path, newer_than: int = -1) -> int | None:
    """Downloads the newest undamaged copy of a step above ``newer_than`` to ``checkpoints``; returns its step. Damaged copies are logged
    and skipped."""
    for step in reversed(uploaded_steps(storage)):
        if step <= newer_than:
            return None
        fresh, final = checkpoints / f".step-{step}.tmp", checkpoints / f"step-{step}"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            for file in storage.files():
                folder, _, name = file.name.partition("/")
                if folder == final.name:
                    fetch_file(storage, file.name, fresh / name)
            verify(fresh)
        except Damaged as error:
            logger.warning("the copy '%s/step-%d' is skipped: %s", storage.url, step, error)
            shutil.rmtree(fresh, ignore_errors=True)
            continue
        if final.exists():
            shutil.rmtree(final)
        fresh.rename(final)
        sync_path(checkpoints)
        return step
    return None


def fetch_file(storage: Storage, name: str, target: Path) -> None:
    """Downloads one file and flushes it to the disk."""
    with target.open("wb") as out:
        for block in read_blocks(storage, name):
            out.write(block)
    sync_path(target)
