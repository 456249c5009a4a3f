"""Recognises checkpoints in the layout of an older version, by the names of their files alone. Imports no torch."""

from pathlib import Path

MANIFEST = "MANIFEST.json"
OLD_STATE = "trainer.json"
"""The file that checkpoints of version 0.1 have instead of a manifest."""


def is_of_older_version(checkpoint: Path) -> bool:
    """Returns whether the folder ``checkpoint`` was written by version 0.1."""
    return (checkpoint / OLD_STATE).is_file() and not (checkpoint / MANIFEST).exists()


def checkpoint_of_older_version(run_directory: Path) -> Path | None:
    """Returns a checkpoint of the run that was written by version 0.1, ``None`` if there is none."""
    return next((folder for folder in sorted(run_directory.glob("checkpoints/step-*")) if is_of_older_version(folder)), None)
