"""The keepers of a run, as a rank calls them. Imports no torch."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tandem.runtime.rpc.calls import CallError
from tandem.runtime.rpc.pod_tls import PodTls
from tandem.runtime.rpc.rpc_client import RpcClient
from tandem.storage.digests import CHUNK_BYTES
from tandem.types import RunError, UserError
from tandem.types.wire import Buffer

logger = logging.getLogger(__name__)
PIECE_BYTES = 4 * CHUNK_BYTES
"""Bytes of a file that are sent and read at once: of several digests, and no more than a connection receives into one buffer."""
AT_ONCE = 2
"""Pieces that are on their way at once, each on a connection of its own."""
DEADLINE_S = 120.0
SILENT_S = 15.0
"""A keeper that cannot be reached, or is silent, for so long is passed over."""
_FAILURES = (CallError, UserError, RunError)


@dataclass(frozen=True, slots=True)
class Keepers:
    """The keepers as a rank on the node ``own`` reaches them: each with its name, that of the run's journal, and its node. Keepers of one node share its
    fate. ``caller``: what every call says of the run and of the trainer's incarnation;
    ``place``: what of a node they keep files in."""

    clients: tuple[RpcClient, ...]
    names: tuple[str, ...]
    nodes: tuple[str, ...]
    own: str
    caller: Mapping[str, Any] = field(default_factory=dict)
    place: str = "memory"

    @classmethod
    def of(cls, settings: Mapping[str, Any], rank: int, tls: PodTls | None = None, place: str = "memory") -> "Keepers":
        """Returns those of ``settings``: the ``keepers`` as of ``KeeperProcess.start``, their ``credential``, the node of each rank, ``nodes``, and
        the run (``of``) and ``incarnation``, if they are given. ``tls``: the certificates of this machine."""
        each = settings["keepers"]
        clients = tuple(
            RpcClient(
                f"the checkpoint {place} of node {keeper['name']}", int(keeper["port"]), settings["credential"], str(keeper["host"]), SILENT_S,
                tls if keeper["is_encrypted"] else None,
            )
            for keeper in each
        )  # fmt: skip
        caller = {key: settings[key] for key in ("of", "incarnation") if key in settings}
        return cls(clients, tuple(keeper["name"] for keeper in each), tuple(keeper["node"] for keeper in each), str(settings["nodes"][rank]), caller, place)

    @property
    def places(self) -> tuple[int, ...]:
        """The keepers that take the files of this node's ranks: its own, and the next one that is on another node."""
        near = self.nearest_first(range(len(self.nodes)))
        elsewhere = [place for place in near if self.nodes[place] != self.own]
        return tuple([place for place in near if self.nodes[place] == self.own][:1] + elsewhere[:1])

    def put(self, step: int, files: Mapping[str, Buffer]) -> list[int]:
        """Sends ``files`` to both places. Returns the keepers that have them now; one that cannot be reached is logged. Raises ``RunError`` if none has
        them."""
        stored = []
        for place in self.places:
            try:
                with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="memory") as pool:
                    for name, content in files.items():
                        view = memoryview(content)
                        offsets = range(0, max(len(view), 1), PIECE_BYTES)
                        # The first one makes room for the file.
                        self._put(place, step, name, view, offsets[0])
                        list(pool.map(partial(self._put, place, step, name, view), offsets[1:]))
                stored.append(place)
            except _FAILURES as error:
                logger.warning("a checkpoint has no copy in the memory of node %s: %s", self.names[place], error)
        if not stored:
            names = ", ".join(self.names[place] for place in self.places)
            raise RunError(f"no memory takes the checkpoint of step {step}: the keepers of {f'nodes {names}' if names else 'the run'} do not answer")
        return stored

    def _put(self, place: int, step: int, name: str, content: memoryview, offset: int) -> None:
        meta = {"step": step, "name": name, "size": len(content), "offset": offset, **self.caller}
        self.clients[place].call("put", meta, {"piece": content[offset : offset + PIECE_BYTES]}, deadline_s=DEADLINE_S)

    def commit(self, step: int, files: Mapping[str, Buffer]) -> None:
        """Sends the last ``files`` of a checkpoint, its marker with them, to every keeper that can be reached. Raises ``RunError`` if none can."""
        reached = 0
        for place, client in enumerate(self.clients):
            try:
                client.call("commit", {"step": step, **self.caller}, files, deadline_s=DEADLINE_S)
                reached += 1
            except _FAILURES as error:
                logger.warning("a checkpoint is not committed in the memory of node %s: %s", self.names[place], error)
        if not reached:
            raise RunError(f"no memory commits the checkpoint of step {step}: no keeper of the run answers")

    def held(self) -> dict[int, dict[int, list[str]]]:
        """Returns the names of the files of each committed step, by step and keeper, of those that can be reached."""
        by_step: dict[int, dict[int, list[str]]] = {}
        for place, client in enumerate(self.clients):
            with contextlib.suppress(*_FAILURES):
                for step, names in client.call("held", self.caller, deadline_s=DEADLINE_S).meta["steps"].items():
                    by_step.setdefault(int(step), {})[place] = names
        return by_step

    def read(self, place: int, step: int, name: str, offset: int = 0, size: int | None = None) -> Buffer:
        """Returns ``size`` bytes of a file, or all of it. Raises ``CallError`` and ``RunError``."""
        wanted = {"step": step, "name": name, "offset": offset, **({} if size is None else {"size": size}), **self.caller}
        return self.clients[place].call("read", wanted, deadline_s=DEADLINE_S).blobs["piece"]

    def nearest_first(self, places: Sequence[int]) -> list[int]:
        """Returns the keepers ``places``, those of this node first, and the others in the order of their distance from them."""
        own = next((place for place, node in enumerate(self.nodes) if node == self.own), 0)
        return sorted(places, key=lambda place: (self.nodes[place] != self.own, (place - own) % len(self.nodes)))
