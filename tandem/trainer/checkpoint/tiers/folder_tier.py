"""Checkpoints in a folder, in the format of ``checkpoints/step-N``: of the run's folder, or of a disk of the node itself."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.runtime.collectives.agreement import gather_values
from tandem.runtime.collectives.communicator import Communicator
from tandem.runtime.process.faults import no_fault
from tandem.trainer.checkpoint.find import committed_steps, prune, whole_checkpoint
from tandem.trainer.checkpoint.tiers.tier import Opened, TierName, Written
from tandem.trainer.checkpoint.write import Work, write_checkpoint


@dataclass
class FolderTier:
    """The checkpoints in ``folder``, which all ranks reach. ``read_bytes``: of files that this rank has verified."""

    name: TierName
    folder: Path
    read_bytes: int = field(default=0, init=False)

    def steps(self, ranks: Communicator) -> Sequence[int]:
        [steps, *_] = gather_values(ranks, committed_steps(self.folder), f"checkpoints in tier {self.name}")
        return [int(step) for step in steps]

    def open(self, ranks: Communicator, step: int, passed_over: Callable[[str], None]) -> Opened | None:
        folder = self.folder / f"step-{step}"
        sizes = [path.stat().st_size for path in sorted(folder.glob("*.safetensors"))]
        self.read_bytes += sum(size for number, size in enumerate(sizes) if number % ranks.size == ranks.rank)
        checkpoint = whole_checkpoint(folder, step, ranks, passed_over)
        return None if checkpoint is None else Opened(self.name, checkpoint, sum(sizes))


@dataclass
class LocalTier(FolderTier):
    """Checkpoints on a disk of the node, of which the newest ``keep`` stay."""

    name: TierName = field(default="local", init=False)
    keep: int = 2

    def write(self, ranks: Communicator, mesh: Mapping[str, int], work: Work) -> Written:
        """Writes the tensors of ``work`` and no other file of a Hugging Face folder, which the run's folder has."""
        alone = Work(work.step, work.staged, work.state, work.own, ())
        committed = write_checkpoint(self.folder, ranks, mesh, alone, no_fault)
        if ranks.rank == 0:
            prune(self.folder, self.keep)
        every = gather_values(ranks, len(work.staged.content), "the bytes of a checkpoint on the local disk")
        return Written(self.name, work.step, sum(every), committed.write_s, {})
