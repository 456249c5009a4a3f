"""The keepers of a run, as its supervisor starts them and as a rank calls them. Imports no torch."""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import CallError
from tandem.runtime.rpc.credentials import new_credential
from tandem.runtime.rpc.rpc_client import RpcClient
from tandem.storage.digests import CHUNK_BYTES
from tandem.types import RunError, UserError
from tandem.types.wire import Buffer

logger = logging.getLogger(__name__)
MODULE = "tandem.trainer.checkpoint.memory.keeper"
PIECE_BYTES = 4 * CHUNK_BYTES
"""Bytes of a file that are sent and read at once: of several digests, and no more than a connection receives into one buffer."""
AT_ONCE = 2
"""Pieces that are on their way at once, each on a connection of its own."""
DEADLINE_S = 120.0


class KeeperProcesses:
    """The keepers of ``nodes`` nodes of the run in ``directory``. They end with this process."""

    def __init__(self, nodes: int, directory: Path) -> None:
        self._nodes, self._directory, self._credential = nodes, directory, new_credential()
        self._workers: list[Worker | None] = [None] * nodes
        self._ports = [0] * nodes

    def start(self) -> dict[str, Any]:
        """Starts those that do not run, which are empty then. Returns what ``Keepers.of`` takes."""
        for node, worker in enumerate(self._workers):
            if worker is None or not worker.alive:
                output = self._directory / "logs" / f"memory-{node}.out"
                output.parent.mkdir(exist_ok=True)
                fresh = Worker(f"the checkpoint memory of node {node}", MODULE, [str(node)], threads=Threads(1), output=output)
                self._workers[node] = fresh
                self._ports[node] = int(fresh.call("begin", {"credential": self._credential}, deadline_s=DEADLINE_S).meta["port"])
        return {"ports": self._ports, "credential": self._credential}

    def drop_after(self, step: int) -> None:
        """Drops the checkpoints of steps above ``step``."""
        for worker in self._workers:
            if worker is not None and worker.alive:
                worker.call("drop_after", {"step": step}, deadline_s=DEADLINE_S)

    def close(self) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.stop(grace_s=1.0)


@dataclass(frozen=True, slots=True)
class Keepers:
    """The keepers by node, as a rank on ``node`` of ``ranks_per_node`` ranks each reaches them."""

    clients: tuple[RpcClient, ...]
    ranks_per_node: int
    node: int

    @classmethod
    def of(cls, settings: Mapping[str, Any], ranks_per_node: int, rank: int) -> "Keepers":
        """Returns those that ``KeeperProcesses.start`` described."""
        clients = tuple(RpcClient(f"the checkpoint memory of node {node}", int(port), settings["credential"]) for node, port in enumerate(settings["ports"]))
        return cls(clients, ranks_per_node, rank // ranks_per_node)

    @property
    def places(self) -> tuple[int, ...]:
        """The nodes whose keepers take the files of this one's ranks: itself, and its peer."""
        return tuple(dict.fromkeys((self.node, (self.node + 1) % len(self.clients))))

    def put(self, step: int, files: Mapping[str, Buffer]) -> list[int]:
        """Sends ``files`` to both places. Returns the nodes that have them now; one that cannot be reached is logged. Raises ``RunError`` if none has them."""
        stored = []
        for node in self.places:
            try:
                with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="memory") as pool:
                    for name, content in files.items():
                        view = memoryview(content)
                        offsets = range(0, max(len(view), 1), PIECE_BYTES)
                        # The first one makes room for the file.
                        self._put(node, step, name, view, offsets[0])
                        list(pool.map(partial(self._put, node, step, name, view), offsets[1:]))
                stored.append(node)
            except (CallError, UserError) as error:
                logger.warning("a checkpoint has no copy in the memory of node %d: %s", node, error)
        if not stored:
            raise RunError(f"no memory takes the checkpoint of step {step}: the keepers of nodes {', '.join(map(str, self.places))} do not answer")
        return stored

    def _put(self, node: int, step: int, name: str, content: memoryview, offset: int) -> None:
        meta = {"step": step, "name": name, "size": len(content), "offset": offset}
        self.clients[node].call("put", meta, {"piece": content[offset : offset + PIECE_BYTES]}, deadline_s=DEADLINE_S)

    def commit(self, step: int, files: Mapping[str, Buffer]) -> None:
        """Sends the last ``files`` of a checkpoint, its marker with them, to every node that can be reached."""
        for node, client in enumerate(self.clients):
            try:
                client.call("commit", {"step": step}, files, deadline_s=DEADLINE_S)
            except (CallError, UserError) as error:
                logger.warning("a checkpoint is not committed in the memory of node %d: %s", node, error)

    def held(self) -> dict[int, dict[int, list[str]]]:
        """Returns the names of the files of each committed step, by step and node, of those that can be reached."""
        found: dict[int, dict[int, list[str]]] = {}
        for node, client in enumerate(self.clients):
            with contextlib.suppress(CallError, UserError):
                for step, names in client.call("held", deadline_s=DEADLINE_S).meta["steps"].items():
                    found.setdefault(int(step), {})[node] = names
        return found

    def read(self, node: int, step: int, name: str, offset: int = 0, size: int | None = None) -> Buffer:
        """Returns ``size`` bytes of a file, or all of it. Raises ``CallError`` and ``RunError``."""
        wanted = {"step": step, "name": name, "offset": offset, **({} if size is None else {"size": size})}
        return self.clients[node].call("read", wanted, deadline_s=DEADLINE_S).blobs["piece"]

    def nearest_first(self, nodes: Sequence[int]) -> list[int]:
        """Returns ``nodes`` with this one first, and the others in the order of their distance."""
        return sorted(nodes, key=lambda node: (node - self.node) % len(self.clients))
