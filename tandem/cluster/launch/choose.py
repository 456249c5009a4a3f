"""Finds the launcher by its name, or the one of a run."""

from collections.abc import Callable
from pathlib import Path

from tandem.cluster.launch.kubernetes.launcher import KubernetesLauncher
from tandem.cluster.launch.launcher import Launcher, LauncherName
from tandem.cluster.launch.local import LocalLauncher
from tandem.cluster.launch.ray.launcher import RayLauncher
from tandem.cluster.launch.record import read_record
from tandem.cluster.launch.slurm.launcher import SlurmLauncher


def launcher(name: LauncherName) -> Launcher:
    made: dict[LauncherName, Callable[[], Launcher]] = {
        "local": LocalLauncher, "slurm": SlurmLauncher, "ray": RayLauncher, "kubernetes": KubernetesLauncher,
    }  # fmt: skip
    return made[name]()


def launcher_of(directory: Path) -> Launcher:
    """Returns the launcher that placed the run in ``directory``. Raises ``UserError`` if that is not a run."""
    record = read_record(directory)
    return launcher("local" if record is None else record.launcher)
