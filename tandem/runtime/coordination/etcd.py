"""The store of a run in etcd. A key's revision is etcd's ``mod_revision``; the run's keys are those under one prefix.

A call whose answer was lost is made again, at another endpoint if need be. So that a write which then meets its own first attempt is not taken for a
conflict, each conditional write also writes a key of its process with the request's id, in the same transaction.
"""

import math
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tandem.config.coordination import CoordinationConfig
from tandem.runtime.coordination.etcd_client import REPLY_S, EtcdClient, EtcdError, Patience, decoded, encoded
from tandem.runtime.coordination.store import Conflict, Entry, Fenced, Guard, WatchTimeout
from tandem.types.errors import RunError

REQUESTS = "requests/"
"""Keys with the newest request of each process; not part of the store's contents."""
_WATCH_S = 5.0
"""A watch without a message for so long asks again, because a connection may be lost without a sign."""
_NOT_FOUND, _EXISTS = 5, 9
_T = TypeVar("_T")


class EtcdStore:
    """A ``Store`` under ``prefix`` in the etcd of ``config``. Waits ``config.deadline_s`` for an etcd that does not answer, then raises ``RunError``, and
    calls ``on_wait`` again and again meanwhile. Leases count whole seconds, and go on where they were when etcd was down itself."""

    def __init__(self, config: CoordinationConfig, prefix: str, on_wait: Callable[[], None] = lambda: None) -> None:
        self.config, self.prefix = config, prefix
        self._client = EtcdClient(config, on_wait)
        self._request_key = f"{REQUESTS}{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        self._requests = 0
        self._cluster: str | None = None
        self._newest = 0

    def close(self) -> None:
        self._client.close()

    @property
    def cluster_id(self) -> str:
        """The id of the cluster, in hexadecimal as etcdctl shows it."""
        if self._cluster is None:
            self.get("")
        return f"{int(self._cluster or 0):x}"

    def get(self, key: str) -> Entry | None:
        return self._get(key, self._deadline())[0]

    def list(self, prefix: str) -> Sequence[Entry]:
        return self._list(prefix, self._deadline())[0]

    def lease_of(self, key: str) -> int:
        """Returns the id of the lease that ``key`` is on, 0 without one or where the key does not exist."""
        found = self._call("kv/range", {"key": self._key(key)}, self._deadline()).get("kvs", [])
        return int(found[0].get("lease", 0)) if found else 0

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        reply = self._call("kv/put", self._put(key, value, lease), self._deadline(), lease)
        return int(reply["header"]["revision"])

    def compare_and_swap(self, key: str, expected_revision: int | None, value: bytes, lease: int | None = None, guard: Guard | None = None) -> int:
        guards = [] if guard is None else [guard]
        applied, reply = self._transaction([Guard(key, expected_revision or 0), *guards], {"request_put": self._put(key, value, lease)}, lease)
        if applied is not None:
            return applied
        if guard is not None and ((held := _first(reply[1], self.prefix)) is None or held.revision != guard.revision):
            raise Fenced(guard, held)
        raise Conflict(key, expected_revision, _first(reply[0], self.prefix))

    def delete(self, key: str) -> bool:
        while (entry := self.get(key)) is not None:
            applied, _ = self._transaction([Guard(key, entry.revision)], {"request_delete_range": {"key": self._key(key)}})
            if applied is not None:
                return True
        return False

    def watch(self, key: str, after_revision: int, deadline_s: float) -> Entry:
        def newer(deadline: Patience) -> tuple[Entry | None, int]:
            entry, now = self._get(key, deadline)
            return (entry if entry is not None and entry.revision > after_revision else None), now

        ended = f"key '{key}' did not change after revision {after_revision}"
        return self._watch({"key": self._key(key)}, newer, deadline_s, ended)

    def watch_prefix(self, prefix: str, known: Sequence[Entry], deadline_s: float) -> Sequence[Entry]:
        def others(deadline: Patience) -> tuple[Sequence[Entry] | None, int]:
            entries, now = self._list(prefix, deadline)
            return (entries if [*entries] != [*known] else None), now

        return self._watch(self._range(prefix), others, deadline_s, f"the keys under '{prefix}' did not change")

    def grant_lease(self, time_to_live_s: float) -> int:
        if not time_to_live_s > 0:
            raise ValueError(f"a lease's time to live is {time_to_live_s}; it must be above 0")
        # Its id is chosen here, so that a repeated request is known for what it is.
        lease = secrets.randbits(62) + 1
        try:
            self._client.call("lease/grant", {"TTL": str(math.ceil(time_to_live_s)), "ID": str(lease)}, self._deadline())
        except EtcdError as error:
            if error.code != _EXISTS:
                raise self._unknown(error) from None
        return lease

    def keep_alive(self, lease: int) -> None:
        try:
            reply = self._client.call("lease/keepalive", {"ID": str(lease)}, self._deadline())
        except EtcdError as error:
            raise self._expired(error, lease) from None
        if int(reply.get("TTL", 0)) <= 0:
            raise LookupError(f"lease {lease} has expired")

    def revoke(self, lease: int) -> None:
        try:
            # Where etcd does not answer now, the lease ends by itself.
            self._client.call("lease/revoke", {"ID": str(lease)}, Patience(min(REPLY_S, self.config.deadline_s)))
        except EtcdError as error:
            if error.code != _NOT_FOUND:
                raise self._unknown(error) from None

    # -- calls ---------------------------------------------------------------------------------------------------------

    def _deadline(self) -> Patience:
        return Patience(self.config.deadline_s)

    def forget_requests(self) -> None:
        """Removes the keys of the newest requests of all processes, which must make none any more."""
        self._call("kv/deleterange", self._range(REQUESTS), self._deadline())

    def _call(self, method: str, body: Mapping[str, Any], deadline: Patience, lease: int | None = None) -> dict[str, Any]:
        newest = self._newest
        try:
            reply = self._client.call(method, body, deadline)
        except EtcdError as error:
            raise self._expired(error, lease) from None
        self._check_header(reply["header"], newest)
        return reply

    def _check_header(self, header: Mapping[str, Any], newest: int) -> None:
        """Raises ``RunError`` for the answer of another cluster, and of one whose revision is before ``newest``, which was seen before the call."""
        cluster, revision = str(header.get("cluster_id", "0")), int(header.get("revision", 0))
        with self._lock:
            self._cluster, self._newest = self._cluster or cluster, max(self._newest, revision)
        if cluster != self._cluster:
            raise RunError(
                f"etcd at {self._client.name} is two clusters, {int(self._cluster):x} and {int(cluster):x}; name the members of one in coordination.endpoints, "
                "then resume the run"
            )
        if revision < newest:
            raise RunError(
                f"etcd at {self._client.name} lost what it held: its revision was {newest} and is {revision}; if a backup was restored, or its data removed, "
                "on purpose, resume the run"
            )

    def _transaction(self, conditions: Sequence[Guard], change: Mapping[str, Any], lease: int | None = None) -> tuple[int | None, Sequence[Any]]:
        """Makes ``change`` if each key has its revision (0: absent). Returns its revision (``None``: not made), and otherwise what is at the keys."""
        with self._lock:
            self._requests += 1
            request = str(self._requests).encode()
        # Threads have keys of their own, so that none overwrites the id that another is about to look for.
        marker = f"{self._request_key}-{threading.get_ident()}"
        compare = [
            {"key": self._key(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)} for key, revision in conditions
        ]  # fmt: skip
        looked = [{"request_range": {"key": self._key(key)}} for key in (*(key for key, _ in conditions), marker)]
        body = {"compare": compare, "success": [change, {"request_put": self._put(marker, request, None)}], "failure": looked}
        reply = self._call("kv/txn", body, self._deadline(), lease)
        if reply.get("succeeded"):
            return int(reply["header"]["revision"]), []
        *found, marked = [response["response_range"] for response in reply["responses"]]
        own = _first(marked, self.prefix)
        return (own.revision if own is not None and own.value == request else None), found

    def _get(self, key: str, deadline: Patience) -> tuple[Entry | None, int]:
        """Returns the entry and the store's revision."""
        reply = self._call("kv/range", {"key": self._key(key)}, deadline)
        return _first(reply, self.prefix), int(reply["header"]["revision"])

    def _list(self, prefix: str, deadline: Patience) -> tuple[Sequence[Entry], int]:
        reply = self._call("kv/range", self._range(prefix), deadline)
        entries = [_entry(found, self.prefix) for found in reply.get("kvs", [])]
        return [entry for entry in entries if not entry.key.startswith(REQUESTS)], int(reply["header"]["revision"])

    def _watch(self, of: Mapping[str, str], look: Callable[[Patience], tuple[_T | None, int]], deadline_s: float, ended: str) -> _T:
        """Returns what ``look`` finds, which is asked again after each event of the keys ``of`` and each lost connection, so that no compaction of etcd's
        history can hide a change."""
        ends = Patience(deadline_s)
        while True:
            found, revision = look(Patience(self.config.deadline_s))
            if found is not None:
                return found
            if ends.passed:
                raise WatchTimeout(f"{ended} within {deadline_s:g} s")
            request = {"create_request": {**of, "start_revision": str(revision + 1)}}
            within = Patience(self.config.deadline_s)
            try:
                with self._client.stream("watch", request, within, max(0.01, min(_WATCH_S, ends.left_s()))) as messages:
                    next((message for message in messages if message.get("events") or message.get("canceled")), None)
            except EtcdError as error:
                raise self._unknown(error) from None

    def _expired(self, error: EtcdError, lease: int | None) -> Exception:
        if error.code == _NOT_FOUND and lease is not None:
            return LookupError(f"lease {lease} has expired")
        return self._unknown(error)

    def _unknown(self, error: EtcdError) -> RunError:
        return RunError(f"etcd at {self._client.name} refused a call: {error} (code {error.code})")

    # -- keys ----------------------------------------------------------------------------------------------------------

    def _key(self, key: str) -> str:
        return encoded(self.prefix + key)

    def _range(self, prefix: str) -> dict[str, str]:
        start = (self.prefix + prefix).encode()
        # All run prefixes end with '/', so the last byte has a successor.
        return {"key": encoded(start), "range_end": encoded(start[:-1] + bytes([start[-1] + 1]))}

    def _put(self, key: str, value: bytes, lease: int | None) -> dict[str, str]:
        put = {"key": self._key(key), "value": encoded(value)}
        return put if lease is None else {**put, "lease": str(lease)}


def _entry(found: Mapping[str, Any], prefix: str) -> Entry:
    return Entry(decoded(found["key"]).decode()[len(prefix) :], decoded(found.get("value", "")), int(found["mod_revision"]))


def _first(reply: Mapping[str, Any], prefix: str) -> Entry | None:
    found = reply.get("kvs", [])
    return _entry(found[0], prefix) if found else None
