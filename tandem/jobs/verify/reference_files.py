"""The files of the reference's log-probabilities, which DPO computes before its first step. Imports no torch."""

from pathlib import Path

from tandem.jobs.verify.finding import Finding
from tandem.runtime.records.journal import Journal
from tandem.storage.digests import bytes_digest

KEY = "reference"
"""The journal's key of the files, relative to the run's folder, and their digests."""


def reference_files(directory: Path, journal: Journal) -> list[Path]:
    """Returns the recorded files of the run in ``directory``."""
    return [directory / name for name in journal.get(KEY) or {}]


def damaged_reference_files(directory: Path, journal: Journal) -> list[str]:
    """Returns the recorded files that are missing or do not have their digest, relative to the run's folder."""

    def is_whole(name: str, digest: str) -> bool:
        try:
            return bytes_digest((directory / name).read_bytes()) == digest
        except OSError:
            return False

    return [name for name, digest in (journal.get(KEY) or {}).items() if not is_whole(name, digest)]


def verify_reference_files(directory: Path, journal: Journal) -> list[Finding]:
    """Returns a finding for each damaged or missing file."""
    depends, fix = "the loss of every later step depends on it", "nothing to do: a resume computes it again from the start model"
    return [
        Finding(f"'{directory / name}' does not have the digest it was written with, or is missing", depends, fix, stops=False)
        for name in damaged_reference_files(directory, journal)
    ]
