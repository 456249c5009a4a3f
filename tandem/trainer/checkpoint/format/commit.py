"""The marker that commits a checkpoint's folder, and the removal of folders.

A folder is written under a fresh name, flushed, marked with ``COMMIT`` and renamed. A process that dies at any moment leaves at most a folder that
readers ignore.
"""

import errno
import secrets
import shutil
from pathlib import Path

MARKER = "COMMIT"
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def discard(folder: Path) -> None:
    """Removes ``folder`` so that readers see all of it or nothing."""
    shutil.rmtree(folder.rename(folder.parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"), ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes what dead writers left under ``parent``."""
    for left in sorted(parent.glob(".*.tmp")):
        shutil.rmtree(left, ignore_errors=True)
