"""Keeps the newest checkpoints of a run in memory, in a process that outlives the ranks: ``python -m tandem.trainer.checkpoint.memory.keeper NODE``.

Every node has one. It has the files of its own ranks and of those of the node before it, so that no loss of one node loses a file. A file arrives in pieces
over TCP, under TLS between machines that have certificates; a checkpoint counts when its marker is there. Readers compare every chunk with its digest.
It may outlive the controller, so each call says which run it is ``of`` and the ``incarnation`` of the trainer: what another run has here is neither read
nor kept, and a trainer that was replaced writes nothing. Imports no torch.
"""

import logging
import signal
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from tandem.estimate.kept_checkpoints import KEPT
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.process.waits import WAITS
from tandem.runtime.process.worker import serve
from tandem.runtime.records.logs import log_uncaught
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.runtime.rpc.pod_tls import PodTls, tls_files
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.types import RunError


@dataclass
class Keeper:
    """``files`` by step and name, of the checkpoints ``of`` one run, and the newest ``incarnation`` of its trainer that has called. Calls come from several
    ranks at once."""

    files: dict[int, dict[str, bytearray]] = field(default_factory=dict)
    of: str = ""
    incarnation: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def methods(self) -> Mapping[str, Method]:
        """Returns the calls that ranks make."""
        return {"put": self.put, "held": self.held, "read": self.read, "commit": self.commit, "drop_after": self.drop_after}

    @property
    def committed(self) -> list[int]:
        return sorted(step for step, files in self.files.items() if MARKER in files)

    def _is_of(self, meta: Meta) -> bool:
        """Returns whether what is here is of the run that ``meta`` names."""
        if str(meta.get("of", "")) != self.of:
            return False
        self.incarnation = max(self.incarnation, int(meta.get("incarnation", 0)))
        return True

    def _take(self, meta: Meta) -> None:
        """Makes this the keeper of the run that ``meta`` names. Raises ``RunError`` for a trainer that another one has replaced."""
        if not self._is_of(meta):
            self.files, self.of, self.incarnation = {}, str(meta.get("of", "")), int(meta.get("incarnation", 0))
        elif int(meta.get("incarnation", 0)) < self.incarnation:
            raise RunError(f"it keeps the checkpoints of incarnation {self.incarnation} of the trainer, which has replaced incarnation {meta['incarnation']}")

    def put(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Stores a piece of file ``name`` of ``step``, which has ``size`` bytes, at ``offset``. The first piece replaces an earlier file. Raises ``RunError``
        where this machine has no memory for the file: the kernel would end a process that takes it all the same."""
        step, name, size, offset, piece = int(meta["step"]), str(meta["name"]), int(meta["size"]), int(meta["offset"]), blobs["piece"]
        with self.lock:
            # What another run had here makes room.
            self._take(meta)
        if offset == 0 and size > (free := available_bytes(0)):
            raise RunError(f"'{name}' of step {step} has {size / 2**20:,.0f} MiB, and the memory of its machine has room for {free / 2**20:,.0f} MiB")
        with self.lock:
            files = self.files.setdefault(step, {})
            # A step that is taken again is none until it is committed again.
            files.pop(MARKER, None)
            if offset == 0:
                files[name] = bytearray(size)
            target = files[name]
        memoryview(target)[offset : offset + len(piece)] = piece
        return {}, {}

    def commit(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Stores the files in ``blobs``, the marker with them, and drops all but the newest checkpoints up to this one."""
        step = int(meta["step"])
        with self.lock:
            self._take(meta)
            self.files.setdefault(step, {}).update({name: bytearray(data) for name, data in blobs.items()})
            kept = {*[each for each in self.committed if each <= step][-KEPT:]}
            self.files = {each: files for each, files in self.files.items() if each in kept}
        return {}, {}

    def held(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The names of the files of each committed step, and the sum of their bytes."""
        with self.lock:
            steps = {str(step): sorted(self.files[step]) for step in self.committed} if self._is_of(meta) else {}
            return {"steps": steps, "bytes": sum(len(data) for files in self.files.values() for data in files.values())}, {}

    def read(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """``size`` bytes of a file at ``offset``; all of it without a size."""
        with self.lock:
            data = self.files.get(int(meta["step"]), {}).get(str(meta["name"])) if self._is_of(meta) else None
        if data is None:
            raise RunError(f"it has no '{meta['name']}' of step {meta['step']}")
        offset, size = int(meta.get("offset", 0)), int(meta.get("size", len(data)))
        return {"size": len(data)}, {"piece": memoryview(data)[offset : offset + size]}

    def drop_after(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Drops the checkpoints of steps above ``step``, which are not trusted."""
        with self.lock:
            self.files = {each: files for each, files in self.files.items() if each <= int(meta["step"])}
        return {}, {}


def main(node: str, channel: int) -> None:
    logging.basicConfig(level=logging.WARNING)
    log_uncaught()
    WAITS.begin(f"memory-{node}")
    # Ctrl-C in the terminal of its owner lets that one end cleanly, with the last checkpoints kept.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper = Keeper()
    servers: list[RpcServer] = []

    def begin(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Answers ranks that show the ``credential``, on ``host`` at the ``port`` of the reply. ``tls``: the files of this machine's certificate, empty
        without one."""
        tls = PodTls(tls_files(*meta["tls"])) if meta["tls"] else None
        server = RpcServer(
            keeper.methods(), str(meta["credential"]), name=f"the checkpoint memory of node {node}", host=str(meta["host"]), max_connections=1024, tls=tls
        )
        server.start()
        servers.append(server)
        return {"port": server.port}, {}

    serve({"begin": begin, "drop_after": keeper.drop_after}, channel)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[sys.argv.index("--channel") + 1]))
