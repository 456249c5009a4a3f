"""A key that is there as long as its process lives, as a persistent ephemeral node of Apache Curator: written again if its lease has ended meanwhile."""

import contextlib
import logging
import threading

from tandem.runtime.coordination.session import Session
from tandem.runtime.coordination.store import Store
from tandem.types.errors import RunError

logger = logging.getLogger(__name__)


class LeasedKey:
    """``key`` has ``value`` on a lease of ``lease_s``; another process may have had it. Where the process or the store was away for longer, one thread
    writes it again."""

    def __init__(self, store: Store, key: str, value: bytes, lease_s: float) -> None:
        self._store, self._key, self._value, self._lease_s = store, key, value, lease_s
        self._session = self._write()
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="leased-key", daemon=True)
        self._keeper.start()

    def close(self) -> None:
        """Removes the key. One of a store that does not answer ends with its lease."""
        self._ended.set()
        self._keeper.join(timeout=1.0)
        self._session.close()

    def replace(self, value: bytes) -> None:
        """Gives the key another value, on the same lease."""
        self._value = value
        if not self._session.is_lost:
            self._store.put(self._key, value, self._session.lease)

    def _write(self) -> Session:
        session = Session(self._store, self._lease_s)
        self._store.put(self._key, self._value, session.lease)
        return session

    def _keep(self) -> None:
        while not self._ended.wait(self._lease_s / 3):
            if not self._session.is_lost:
                continue
            with contextlib.suppress(RunError, LookupError):  # It is tried again.
                self._session = self._write()
                logger.warning("key '%s' was written again after its lease had expired", self._key)
