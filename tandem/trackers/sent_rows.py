"""Which rows of ``metrics.jsonl`` a tracker has: their digests, in a file of the run's folder, one line for each row in the order of the file."""

from collections.abc import Sequence
from pathlib import Path

from tandem.runtime.records.metrics import row_digest
from tandem.storage.folder_manifest import replace_file


class SentRows:
    """The rows that were sent, in ``path``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text("ascii").split("\n") if path.exists() else [""]
        # The last line may be torn.
        self._digests = lines[:-1]
        self.cut(len(self._digests))

    def __len__(self) -> int:
        return len(self._digests)

    def common(self, rows: Sequence[bytes]) -> int:
        """Returns how many of ``rows``, from the first on, are those that were sent."""
        same = 0
        for digest, row in zip(self._digests, rows, strict=False):
            if digest != row_digest(row):
                break
            same += 1
        return same

    def add(self, rows: Sequence[bytes]) -> None:
        """Records that ``rows``, the next ones, were sent."""
        digests = [row_digest(row) for row in rows]
        with self._path.open("a", encoding="ascii") as file:
            file.writelines(f"{digest}\n" for digest in digests)
        self._digests += digests

    def cut(self, count: int) -> None:
        """Keeps the first ``count``."""
        del self._digests[count:]
        replace_file(self._path, "".join(f"{digest}\n" for digest in self._digests))
