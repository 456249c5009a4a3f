"""Whether an object storage answers, before a run depends on it."""

import threading

from tandem.storage.files import RemoteStorage, Storage
from tandem.types import RunError

ANSWER_S = 5.0
"""Seconds to wait for an answer. The libraries' own retries take much longer, during which a run would be blocked."""


def check_reachable(storage: Storage, deadline_s: float = ANSWER_S) -> None:
    """Lists the root of ``storage``. Raises ``RunError`` where a remote one reports an error, has no such bucket or does not answer within
    ``deadline_s`` seconds."""
    if not isinstance(storage, RemoteStorage):
        return
    errors: list[Exception] = []

    def ask() -> None:
        try:
            _list(storage)
        except Exception as error:  # every backend has errors of its own
            errors.append(error)

    # A daemon: a request that is being retried must not keep the command from ending.
    asking = threading.Thread(target=ask, name="check-reachable", daemon=True)
    asking.start()
    asking.join(deadline_s)
    if asking.is_alive():
        raise RunError(f"'{storage.url}' did not answer within {deadline_s:g} s; check the address, the endpoint and the network")
    if errors:
        what = "there is no such bucket or folder" if isinstance(errors[0], FileNotFoundError) else type(errors[0]).__name__
        text = " ".join(str(errors[0]).split())[:300]
        raise RunError(f"'{storage.url}' cannot be used: {what}{f' ({text})' if text else ''}; check the address and the credentials")


def _list(storage: RemoteStorage) -> None:
    """Lists the root, or the nearest folder above it that exists, which is the bucket at last. Raises ``FileNotFoundError``."""
    path = storage.root
    while True:
        try:
            storage.backend.ls(path, detail=False)
            return
        except FileNotFoundError:
            above = path.rpartition("/")[0]
            if not above:
                raise
            path = above
