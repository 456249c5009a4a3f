"""Finds the launcher by its name, or the one of a run."""

from pathlib import Path

from tandem.cluster.launch.launcher import Launcher, LauncherName
from tandem.cluster.launch.record import read_record


def launcher(name: LauncherName) -> Launcher:
    # Each is imported where it is chosen: the local one imports all that trains.
    if name == "slurm":
        from tandem.cluster.launch.slurm.launcher import SlurmLauncher

        return SlurmLauncher()
    if name == "ray":
        from tandem.cluster.launch.ray.launcher import RayLauncher

        return RayLauncher()
    if name == "kubernetes":
        from tandem.cluster.launch.kubernetes.launcher import KubernetesLauncher

        return KubernetesLauncher()
    from tandem.cluster.launch.local import LocalLauncher

    return LocalLauncher()


def launcher_of(directory: Path) -> Launcher:
    """Returns the launcher that placed the run in ``directory``. Raises ``UserError`` if that is not a run."""
    record = read_record(directory)
    return launcher("local" if record is None else record.launcher)
