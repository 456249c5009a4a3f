"""Section ``checkpoint``: the checkpoint interval, how many checkpoints are kept, and where they are copied."""

from dataclasses import dataclass

from tandem.config.addresses import check_no_secret
from tandem.config.limits import check_at_least_one
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """How often, where and how many checkpoints are saved; `training.md` describes a checkpoint."""

    every_steps: int = 10
    """Optimizer steps between two checkpoints."""
    every_minutes: float = 0.0
    """Maximum minutes between two checkpoints, in addition to `every_steps`. 0: off."""
    keep: int = 2
    """Number of the newest checkpoints to keep, locally and in `upload`."""
    asynchronous: bool = True
    """Write checkpoints while training continues."""
    memory_every_steps: int = 0
    """Optimizer steps between two checkpoints in the memory of the nodes, each rank's with its own node and another one, from which lost ranks are
    restarted. Each of the two holds up to three checkpoints of these ranks. Those of the run's folder are kept there too. 0: none."""
    memory_directory: str = ""
    """Folder of each node in which the checkpoints in memory are files, as an absolute path: on tmpfs (`/dev/shm/...`) or on NVMe, where they outlive all
    processes of the run, as when a scheduler ends a job of which it has lost a node and begins it again. Empty: they are in the keepers' own memory."""
    local_directory: str = ""
    """Folder on a disk of each machine that has ranks (NVMe), as an absolute path. Each rank's files are written there too, in the background, and loaded from
    there before the run's folder, which may be on a storage node. Empty: none."""
    local_every_steps: int = 0
    """Optimizer steps between two further checkpoints in `local_directory`, which are none of the run's folder. 0: none."""
    upload: str = ""
    """Folder or URL to copy each checkpoint to. Empty: none."""

    def check(self) -> None:
        check_no_secret("'checkpoint.upload'", self.upload)
        check_at_least_one("checkpoint", self, "every_steps", "keep")
        if self.memory_every_steps < 0:
            raise UserError(f"'checkpoint.memory_every_steps' is {self.memory_every_steps}; it must be 0 (none) or more")
        if self.local_every_steps < 0:
            raise UserError(f"'checkpoint.local_every_steps' is {self.local_every_steps}; it must be 0 (none) or more")
        if self.local_directory and not self.local_directory.startswith("/"):
            raise UserError(f"'checkpoint.local_directory' is '{self.local_directory}'; give an absolute path, which is the same for all processes of the run")
        if self.memory_directory and not self.memory_directory.startswith("/"):
            raise UserError(f"'checkpoint.memory_directory' is '{self.memory_directory}'; give an absolute path, which is the same on all nodes")
        if self.memory_directory and not self.memory_every_steps:
            raise UserError(
                f"'checkpoint.memory_directory' is '{self.memory_directory}' and checkpoint.memory_every_steps is 0, so no checkpoint is kept in memory; set "
                "checkpoint.memory_every_steps, or leave the folder out"
            )
        if self.local_every_steps and not self.local_directory:
            raise UserError(f"'checkpoint.local_every_steps' is {self.local_every_steps} and checkpoint.local_directory is not given; name a folder, or set 0")
        if not 0 <= self.every_minutes < float("inf"):
            raise UserError(f"'checkpoint.every_minutes' is {self.every_minutes}; it must be 0 (off) or more, and finite")
