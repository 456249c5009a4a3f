"""Verifies the files of a version."""

from pathlib import Path

from tandem.model_registry.versions import Version
from tandem.types import RunError, UserError


def check_files(version: Version) -> None:
    """Reads every byte of the checkpoint of ``version`` and compares it with the digest that was registered. Raises ``UserError`` if the files no
    longer exist, and ``RunError`` if they are damaged or others."""
    # It needs torch, which listing versions does not.
    from tandem.trainer.checkpoint.format.manifest import Damaged, verify

    folder = Path(version.entry.path)
    if not folder.is_dir():
        raise UserError(
            f"the files of '{version.reference}' no longer exist in '{folder}' (its run has pruned them, or it was moved); promote a version whose "
            "files exist"
        )
    try:
        _, digest = verify(folder)
    except Damaged as error:
        raise RunError(f"the files of '{version.reference}' in '{folder}' are damaged: {error}; restore them from a copy, or promote another version") from None
    if digest != version.entry.digest:
        raise RunError(f"'{folder}' holds another checkpoint than the one registered as '{version.reference}'; restore it, or promote another version")
