"""A lease that this process keeps alive, as the Session of etcd's concurrency package."""

import contextlib
import logging
import threading
import time
from types import TracebackType

from tandem.runtime.coordination.store import Store
from tandem.types.errors import RunError

logger = logging.getLogger(__name__)


class Session:
    """Keys written with ``lease`` exist as long as this process lives and reaches the store, and ``lease_s`` longer. One thread renews the lease."""

    def __init__(self, store: Store, lease_s: float) -> None:
        self.store, self.lease_s = store, lease_s
        self._renewed_s = _now_s()
        self.lease = store.grant_lease(lease_s)
        self.is_lost = False
        self._ended = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="keep-alive", daemon=True)
        self._keeper.start()

    @property
    def is_over(self) -> bool:
        """Whether the lease has expired, or may have: the store has confirmed no renewal that was sent within the last ``lease_s``. Known without the store,
        and at once by a process that was paused."""
        return self.is_lost or _now_s() - self._renewed_s > self.lease_s

    def close(self) -> None:
        """Ends the lease, and with it the keys."""
        self._ended.set()
        with contextlib.suppress(RunError):  # It expires where the store does not answer.
            self.store.revoke(self.lease)
        # A call that waits for the store ends with the process.
        self._keeper.join(timeout=1.0)

    def _keep(self) -> None:
        while not self._ended.wait(self.lease_s / 3):
            asked_s = _now_s()
            try:
                self.store.keep_alive(self.lease)
                self._renewed_s = asked_s
            except LookupError:
                if not self._ended.is_set():
                    self.is_lost = True
                    logger.warning("lease %d expired: this process did not renew it for %g s", self.lease, self.lease_s)
                return
            except RunError as error:
                logger.warning("lease %d is not renewed: %s", self.lease, error)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _now_s() -> float:
    """Returns seconds of a clock that goes on while the machine sleeps, where there is one, and that cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
