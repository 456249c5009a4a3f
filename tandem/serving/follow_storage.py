"""The weights of a run that is elsewhere: brought from the object storage that it writes them to (``pods.weights_url``) to shared memory of this machine, where
the engines take them as those of a run here. Imports no torch."""

import secrets
import threading
from collections.abc import Callable
from pathlib import Path

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.process.temporary import temporary_folder
from tandem.runtime.rpc.calls import CallError
from tandem.storage.files import open_storage
from tandem.storage.reachable import check_reachable
from tandem.types import RunError, UserError
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.delta import DeltaMemory
from tandem.weight_transfer.shared_memory import Segment, WeightBuffers
from tandem.weight_transfer.stored.storage_source import StoredWeights
from tandem.weight_transfer.stored.stored_file import StoredVersion
from tandem.weight_transfer.transport.mirror import WeightMirror

LOOK_S = 1.0
"""Between two looks at the storage."""
_TRANSFER_S = 3600.0


class StoredRun:
    """The run that writes its weights to ``url``, as a context. ``store``: where its versions are found on this machine. ``threads`` copy. ``say`` is told what
    goes wrong, once; the weights before stay then. Raises ``UserError`` if the storage cannot be used, or numpy is missing."""

    def __init__(self, url: str, threads: int, say: Callable[[str], None]) -> None:
        if not elementwise.is_available():
            raise UserError("weights in a storage are read with numpy, which is not installed; pip install 'tandem-rl[deltas]'")
        storage = open_storage(url)
        check_reachable(storage)
        self._stored, self._say, self._said = StoredWeights(storage), say, ""
        self._scratch = temporary_folder()
        self.store = str(Path(self._scratch.__enter__()) / "store.sqlite")
        pod = "follower" + secrets.token_hex(4)
        self._own = EmbeddedStore(Path(self.store))
        self._mirror = WeightMirror(
            None, self._own, lambda size_bytes: WeightBuffers.create(pod, size_bytes), None, stored=self._stored, threads=threads,
            delta_memory=DeltaMemory(lambda number, size_bytes: Segment.create(pod, f"delta-{number}", size_bytes)),
        )  # fmt: skip
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="weights of the storage", daemon=True)

    def newest(self) -> StoredVersion | None:
        """Returns what the storage has now; ``None`` if that is nothing, or cannot be read."""
        try:
            return self._stored.newest()
        except (RunError, OSError):
            return None

    def __enter__(self) -> "StoredRun":
        self._thread.start()
        return self

    def _follow(self) -> None:
        while True:
            try:
                if self._stored.newest() is None:
                    raise RunError(f"'{self._stored.url}' has no weights")
                self._mirror.bring(None, (), Deadline(_TRANSFER_S))
                self._said = ""
            except (UserError, CallError, OSError) as error:
                if str(error) != self._said:
                    self._said = str(error)
                    self._say(f"the weights stay as they are: {self._said}")
            if self._ended.wait(LOOK_S):
                return

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(LOOK_S)
        if not self._thread.is_alive():
            self._mirror.close()
            self._own.close()
        self._scratch.__exit__(None, None, None)
