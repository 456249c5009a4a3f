"""The process of a keeper, as what starts it on its node sees it. Imports no torch."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import CallError
from tandem.runtime.rpc.credentials import new_credential
from tandem.types import RunError

MODULE = "tandem.trainer.checkpoint.memory.keeper"
LOOPBACK = "127.0.0.1"
DEADLINE_S = 120.0


class KeeperProcess:
    """The keeper ``name``, which answers on ``host``, and ends with this process. ``tls``: the files of this machine's certificate, its key and the pods'
    authorities; empty: nothing is encrypted. Its log is in ``logs`` of ``directory``. ``kept_in``: the folder of this machine in which the files of
    ``run`` outlive it, see ``kept_files``; empty: none. ``held``: the files of the checkpoints by step that it began with."""

    def __init__(
        self, name: str, directory: Path, credential: str, *, host: str = LOOPBACK, tls: Sequence[str] = (), kept_in: str = "", run: str = ""
    ) -> None:
        self.name, self.host, self._directory, self._credential, self._tls = name, host, directory, credential, tuple(tls)
        self.kept_in, self._run = kept_in, run
        self.held = dict[int, Sequence[str]]()
        self._worker: Worker | None = None
        self._port = 0

    def start(self) -> dict[str, Any]:
        """Starts it where it does not run; it has then what the folder has, or nothing. Returns where it is: its ``name`` and ``node``, ``host`` and
        ``port``, and whether it asks for a certificate (``is_encrypted``)."""
        if self._worker is None or not self._worker.alive:
            output = self._directory / "logs" / f"memory-{self.name}.out"
            output.parent.mkdir(parents=True, exist_ok=True)
            self._worker = Worker(f"the checkpoint memory of node {self.name}", MODULE, [self.name], threads=Threads(1), output=output)
            begin = {"credential": self._credential, "host": self.host, "tls": self._tls, "folder": self.kept_in, "run": self._run}
            began = self._worker.call("begin", begin, deadline_s=DEADLINE_S).meta
            self._port, self.held = int(began["port"]), {int(step): names for step, names in began["held"].items()}
        return {"name": self.name, "node": self.name, "host": self.host, "port": self._port, "is_encrypted": bool(self._tls)}

    def drop_after(self, step: int) -> None:
        """Drops the checkpoints of steps above ``step``, which are not trusted."""
        if self._worker is not None and self._worker.alive:
            self._worker.call("drop_after", {"step": step}, deadline_s=DEADLINE_S)

    def forget(self) -> None:
        """Removes what is in the machine's folder."""
        if self.kept_in and self._worker is not None and self._worker.alive:
            with contextlib.suppress(CallError, RunError):
                self._worker.call("forget", {}, deadline_s=DEADLINE_S)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop(grace_s=1.0)


class KeeperProcesses:
    """The keepers of a run on data in ``directory``: one for each group of ``ranks_per_node`` of its ``ranks``, all on this machine."""

    def __init__(self, ranks: int, ranks_per_node: int, directory: Path) -> None:
        self._credential = new_credential()
        self._node_of = [str(rank // ranks_per_node) for rank in range(ranks)]
        self._each = [KeeperProcess(node, directory, self._credential) for node in dict.fromkeys(self._node_of)]

    def start(self) -> dict[str, Any]:
        """Starts those that do not run. Returns what ``Keepers.of`` takes."""
        return {"keepers": [keeper.start() for keeper in self._each], "credential": self._credential, "nodes": self._node_of}

    def drop_after(self, step: int) -> None:
        """Drops the checkpoints of steps above ``step``."""
        for keeper in self._each:
            keeper.drop_after(step)

    def close(self) -> None:
        for keeper in self._each:
            keeper.close()
