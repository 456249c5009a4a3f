"""Verifies the model that a run starts from, which is also the reference model of reinforcement learning. Imports no torch."""

from pathlib import Path

from tandem.runtime.records.journal import Journal
from tandem.storage.folder_manifest import OnBytes, damaged_files, folder_digests, parse_files, read_manifest, to_json
from tandem.types import RunError

KEY = "start_model"
"""The journal's key of the folder and the digests of its files."""


def check_start_model(folder: Path, journal: Journal, weights_are_used: bool = True, on_bytes: OnBytes = lambda count: None) -> list[str]:
    """Compares every file of ``folder`` with its digest in the journal, or, at the run's first start, with its manifest if it has one, and
    records the digests.

    Returns what is wrong with its weights if ``weights_are_used`` is false. Raises ``RunError`` for all other damage."""
    saved = journal.get(KEY)
    files = parse_files(saved["files"]) if saved is not None else read_manifest(folder)
    if files is None:
        files, damaged = folder_digests(folder, on_bytes=on_bytes), []
    else:
        damaged = damaged_files(folder, files, on_bytes)
    tolerated = [] if weights_are_used else [found for found in damaged if ".safetensors'" in found]
    for found in damaged:
        if found not in tolerated:
            raise RunError(f"{found}: it belongs to the model that the run starts from; restore it from a copy, or start a new run")
    if saved is None:
        # A run's own folder may be moved.
        run = journal.path.parent
        journal.set(KEY, {"folder": str(folder.relative_to(run) if folder.is_relative_to(run) else folder), "files": to_json(files)})
    return tolerated
