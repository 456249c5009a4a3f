"""Keeps the newest checkpoints of a run in memory, in a process that outlives the ranks: ``python -m tandem.trainer.checkpoint.memory.keeper NODE``.

Every node has one. It has the files of its own ranks and of those of the node before it, so that no loss of one node loses a file. A file arrives in pieces
over TCP, under TLS between machines that have certificates; a checkpoint counts when its marker is there. Readers compare every chunk with its digest.
With a folder (``kept_files``) the files are there for its next life too. It may outlive the controller, so each call says which run it is ``of`` and the
``incarnation`` of the trainer: what another run has here is neither read nor kept, and a trainer that was replaced writes nothing. Imports no torch.
"""

import logging
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.estimate.kept_checkpoints import KEPT
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.machine.heap import give_back_large_memory
from tandem.runtime.process.waits import WAITS
from tandem.runtime.process.worker import serve
from tandem.runtime.records.logs import log_uncaught
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.runtime.rpc.pod_tls import PodTls, tls_files
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.memory.kept_files import File, KeptFiles, Owner, open_folder, remove_folder
from tandem.types import RunError


@dataclass
class Keeper:
    """``files`` by step and name, which ``kept`` makes, of the checkpoints of one run, and its ``owner`` with the newest incarnation of the trainer that has
    called. Calls come from several ranks at once."""

    kept: KeptFiles = field(default_factory=lambda: KeptFiles(None))
    files: dict[int, dict[str, File]] = field(init=False)
    owner: Owner = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.files = self.kept.earlier()
        self._set_owner(self.kept.owner())

    def methods(self) -> Mapping[str, Method]:
        """Returns the calls that ranks make."""
        return {"put": self.put, "held": self.held, "read": self.read, "commit": self.commit, "drop_after": self.drop_after}

    @property
    def committed(self) -> list[int]:
        return sorted(step for step, files in self.files.items() if MARKER in files)

    def _is_of(self, meta: Meta) -> bool:
        """Returns whether what is here is of the run that ``meta`` names."""
        if str(meta.get("of", "")) != self.owner.of:
            return False
        if (incarnation := int(meta.get("incarnation", 0))) > self.owner.incarnation:
            self._set_owner(Owner(self.owner.of, incarnation))
        return True

    def _set_owner(self, owner: Owner) -> None:
        self.owner = owner
        self.kept.set_owner(owner)

    def _keep(self, is_kept: Callable[[int], bool]) -> None:
        """Drops the checkpoints of the steps that are not to be kept."""
        for step in [step for step in self.files if not is_kept(step)]:
            del self.files[step]
            self.kept.drop(step)

    def _take(self, meta: Meta) -> None:
        """Makes this the keeper of the run that ``meta`` names. Raises ``RunError`` for a trainer that another one has replaced."""
        incarnation = int(meta.get("incarnation", 0))
        if not self._is_of(meta):
            self._keep(lambda step: False)
            self._set_owner(Owner(str(meta.get("of", "")), incarnation))
        elif incarnation < self.owner.incarnation:
            raise RunError(
                f"it keeps the checkpoints of incarnation {self.owner.incarnation} of the trainer, which has replaced incarnation {incarnation}"
            )

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
            if files.pop(MARKER, None) is not None:
                self.kept.uncommit(step)
            if offset == 0:
                files[name] = self.kept.make(step, name, size)
            target = files[name]
        memoryview(target)[offset : offset + len(piece)] = piece
        return {}, {}

    def commit(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Stores the files in ``blobs``, the marker with them, and drops all but the newest checkpoints up to this one."""
        step = int(meta["step"])
        with self.lock:
            self._take(meta)
            files = self.files.setdefault(step, {})
            # The marker comes last, also in a folder.
            for name, data in sorted(blobs.items(), key=lambda blob: blob[0] == MARKER):
                files[name] = self.kept.make(step, name, len(data))
                files[name][:] = bytes(data)
            newest = {*[each for each in self.committed if each <= step][-KEPT:]}
            self._keep(newest.__contains__)
            self.kept.committed()
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
            self._keep(lambda step: step <= int(meta["step"]))
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
        """Answers ranks that show the ``credential``, on ``host`` at the ``port`` of the reply, which has also the checkpoints that an earlier life ``held``.
        ``tls``: the files of this machine's certificate, empty without one; ``folder``: that of all keepers on this machine, empty without one, and ``run``
        the run's name."""
        nonlocal keeper
        if meta["folder"]:
            try:
                # The lock is this process's, and ends with it.
                folder, _ = open_folder(Path(meta["folder"]), str(meta["run"]), str(meta["host"]))
                keeper = Keeper(KeptFiles(folder))
            except OSError as error:
                raise RunError(f"checkpoint.memory_directory: '{meta['folder']}' cannot be used: {error.strerror or error}") from None
        tls = PodTls(tls_files(*meta["tls"])) if meta["tls"] else None
        server = RpcServer(
            keeper.methods(), str(meta["credential"]), name=f"the checkpoint memory of node {node}", host=str(meta["host"]), max_connections=1024, tls=tls
        )
        server.start()
        servers.append(server)
        return {"port": server.port, "held": {str(step): sorted(files) for step, files in keeper.files.items()}}, {}

    def drop_after(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        return keeper.drop_after(meta, blobs, progress)

    def forget(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """Removes what is in the folder."""
        if keeper.kept.folder is not None:
            remove_folder(keeper.kept.folder)
        return {}, {}

    # Each piece arrives in a thread of its own, whose arena would keep the piece's freed memory.
    give_back_large_memory()
    serve({"begin": begin, "drop_after": drop_after, "forget": forget}, channel)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[sys.argv.index("--channel") + 1]))
