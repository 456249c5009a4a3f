"""Checkpoints on the local disks of several nodes: every rank writes its files on the disk of its own node, and while a checkpoint is loaded each node serves
what is on its disk, so that ranks read what they need wherever it is. A checkpoint of which a node has lost its part is not whole."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.faults import no_fault
from tandem.runtime.rpc.calls import Blobs, Meta, Method, Progress, Reply
from tandem.runtime.rpc.pod_tls import PodTls
from tandem.runtime.rpc.rpc_server import RpcServer
from tandem.trainer.checkpoint.find import committed_steps, prune
from tandem.trainer.checkpoint.format.commit import MARKER
from tandem.trainer.checkpoint.memory.keepers import Keepers
from tandem.trainer.checkpoint.tiers.kept_tier import KeptTier
from tandem.trainer.checkpoint.tiers.tier import TierName, Written
from tandem.trainer.checkpoint.write import Work, write_checkpoint
from tandem.types import RunError

PLACE = "local disk"


@dataclass(frozen=True, slots=True)
class Node:
    """The node of this rank: its ``host``, where it serves its disk to ranks that show the ``credential``. ``tls``: its certificate."""

    host: str
    credential: str
    tls: PodTls | None = None

    def of(self, folder: Path) -> Path:
        """Returns the node's part of ``folder``, which several pods of one machine share."""
        return folder / f"node-{self.host}"


@dataclass(frozen=True, slots=True)
class DiskFiles:
    """Answers for the checkpoints in ``folder`` as a keeper does."""

    folder: Path

    def methods(self) -> Mapping[str, Method]:
        return {"held": self.held, "read": self.read}

    def held(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """The names of the files of each committed step."""
        names = {step: sorted(path.name for path in (self.folder / f"step-{step}").iterdir()) for step in committed_steps(self.folder)}
        return {"steps": {str(step): files for step, files in names.items() if MARKER in files}}, {}

    def read(self, meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        """``size`` bytes of a file at ``offset``; all of it without a size. Raises ``RunError`` where there is no such file."""
        name = str(meta["name"])
        path = self.folder / f"step-{int(meta['step'])}" / name
        try:
            if Path(name).name != name:
                raise RunError(f"'{name}' is not the name of a file of a checkpoint")
            with path.open("rb") as file:
                file.seek(int(meta.get("offset", 0)))
                return {"size": path.stat().st_size}, {"piece": file.read(int(meta["size"]) if "size" in meta else -1)}
        except OSError as error:
            raise RunError(f"'{path}': {error.strerror or error}") from None


@dataclass
class DisksTier(KeptTier):
    """The checkpoints on the disks of the ranks' nodes. Their files can be read until ``close``."""

    name: TierName = field(default="local", init=False)
    holds: bool = field(default=False, init=False)
    server: RpcServer | None = None

    @classmethod
    def of(cls, folder: Path, ranks: Communicator, node: Node) -> "DisksTier":
        """Returns the tier of all ranks, which call it together: the first rank of each node serves its disk."""
        folder = node.of(folder)
        nodes = [str(host) for host in gather_values(ranks, node.host, "the nodes of the local disks")]
        server = None
        if nodes.index(node.host) == ranks.rank:
            server = RpcServer(
                DiskFiles(folder).methods(), node.credential, name=f"the checkpoint {PLACE} of node {node.host}", host=node.host, max_connections=1024,
                tls=node.tls,
            )  # fmt: skip
            server.start()
        ports = gather_values(ranks, None if server is None else server.port, "the ports of the local disks")
        keepers = [
            {"name": host, "node": host, "host": host, "port": int(port), "is_encrypted": node.tls is not None}
            for host, port in zip(nodes, ports, strict=True) if port is not None
        ]  # fmt: skip
        settings = {"keepers": keepers, "credential": node.credential, "nodes": nodes}
        return cls(Keepers.of(settings, ranks.rank, node.tls, PLACE), folder, server=server)

    def close(self) -> None:
        """Serves the disk of this node no longer."""
        if self.server is not None:
            self.server.close()


@dataclass
class DisksWriter:
    """Writes to the disks that ``DisksTier`` reads, in the ``folder`` of this name on each, of which the newest ``keep`` stay. ``node``: of this rank."""

    folder: Path
    keep: int
    node: Node
    name: TierName = field(default="local", init=False)

    def write(self, ranks: Communicator, mesh: Mapping[str, int], work: Work) -> Written:
        """Writes the files of every rank on its own node, with the manifest and the marker, and no other file of a Hugging Face folder."""
        every = gather_values(ranks, [self.node.host, len(work.staged.content)], "the nodes of a checkpoint on the local disks")
        nodes: Sequence[str] = [str(host) for host, _ in every]
        is_first = nodes.index(self.node.host) == ranks.rank
        alone = Work(work.step, work.staged, work.state, work.own, ())
        folder = self.node.of(self.folder)
        committed = write_checkpoint(folder, ranks, mesh, alone, no_fault, is_first)
        if is_first:
            prune(folder, self.keep)
        where = {host: [rank for rank, its in enumerate(nodes) if its == host] for host in dict.fromkeys(nodes)}
        return Written(self.name, work.step, sum(int(size) for _, size in every), committed.write_s, where)
