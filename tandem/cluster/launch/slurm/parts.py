"""The parts of a job of Slurm, as its process on the first node sees them: one, or those of a heterogeneous job (``#SBATCH hetjob``)."""

import contextlib
import os
from dataclasses import dataclass

from tandem.cluster.launch.slurm.commands import ask, node_names
from tandem.types import UserError

_OF_FIRST = (
    "SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_TASK", "SLURM_MEM_PER_NODE", "SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_CPUS_PER_TASK",
)  # fmt: skip
"""What the first part was given, which ``srun`` would ask of every other part too."""


@dataclass(frozen=True, slots=True)
class Part:
    """``group``: its number in a heterogeneous job; ``None`` in a job of one part. ``nodes``: their names."""

    group: int | None
    nodes: tuple[str, ...]

    @property
    def trains(self) -> bool:
        """Whether its nodes may have ranks of the trainer."""
        return not self.group

    def step(self, nodes: list[str]) -> list[str]:
        """Returns the options of an ``srun`` with one task on each of ``nodes``, which are of this part."""
        group = [] if self.group is None else [f"--het-group={self.group}"]
        return [*group, f"--nodelist={','.join(nodes)}", f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1"]


def parts_of_job() -> tuple[Part, ...]:
    """Returns the parts of the job whose first process this is, from its environment."""
    size = int(os.environ.get("SLURM_HET_SIZE", "0"))
    if not size:
        return (Part(None, tuple(node_names(os.environ["SLURM_JOB_NODELIST"]))),)
    for name in _OF_FIRST:
        os.environ.pop(name, None)
    return tuple(Part(group, tuple(node_names(os.environ[f"SLURM_JOB_NODELIST_HET_GROUP_{group}"]))) for group in range(size))


def end_earlier_steps(parts: tuple[Part, ...]) -> int:
    """Ends the steps of an earlier life of the job, which would hold the cores of its nodes, and returns how many there were. When Slurm loses the first node
    of a heterogeneous job, it queues that part alone again: the others keep their nodes, with steps whose ``srun`` has died."""
    ended = 0
    for part in parts:
        if not part.group:
            continue
        job = os.environ[f"SLURM_JOB_ID_HET_GROUP_{part.group}"]
        for step in ask("squeue", "--steps", "--noheader", f"--jobs={job}", "--format=%i").split():
            if step.rpartition(".")[2].isdigit():
                ended += 1
                with contextlib.suppress(UserError):  # It has ended by itself.
                    ask("scancel", step)
    return ended
