"""The pod of a run on a machine that a scheduler has chosen: ``tandem pod``, whose files are in the machine's own folder for temporary files, and whose logs
are in the run's folder, which the machines share."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.cluster.launch.addresses import own_address
from tandem.runtime.process.processes import Threads, spawn
from tandem.runtime.process.temporary import choose_temporary_folder, temporary_folder


@contextlib.contextmanager
def node_pod(
    directory: Path, host: str, name: str, overrides: Sequence[str], output: Path | None = None, keeper: Path | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Yields the process of the pod ``name`` of the run in ``directory``, whose controller is at ``host``; it ends with this process, if not before.
    ``output``: a file for what it tells its user; ``None``: this process's output. ``keeper``: the file of the node's keeper; ``None``: the
    pod has its own."""
    choose_temporary_folder()
    logs = directory / "logs" / "pods" / name
    logs.mkdir(parents=True, exist_ok=True)
    with temporary_folder(prefix="tandem-pod") as folder:
        (folder / "logs").symlink_to(logs.absolute())
        arguments = [
            "pod", str(directory / "config.yaml"), f"--name={name}", f"--folder={folder}", f"--run.name={directory.name}", *overrides,
            f"--pods.host={own_address(host)}", *(() if keeper is None else (f"--keeper={keeper}",)),
        ]  # fmt: skip
        yield spawn("tandem.cli.main", arguments, threads=Threads(1), new_session=True, output=output)
