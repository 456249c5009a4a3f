"""What a job of Slurm runs on its further nodes: ``python -m tandem.cluster.launch.slurm.pod RUN HOST [--KEY=VALUE ...]``, a pod that joins the run.

Its files are in the node's own folder for temporary files, and its logs in the run's folder, which the nodes share. HOST: the address of the run's first node.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from tandem.cluster.launch.slurm.addresses import own_address
from tandem.runtime.process.processes import Threads, spawn
from tandem.runtime.process.temporary import choose_temporary_folder, temporary_folder


def main() -> int:
    directory, host, overrides = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    node = os.environ["SLURMD_NODENAME"]
    choose_temporary_folder()
    logs = directory / "logs" / "pods" / node
    logs.mkdir(parents=True, exist_ok=True)
    with temporary_folder(prefix="tandem-pod") as folder:
        (folder / "logs").symlink_to(logs.absolute())
        arguments = [
            "pod", str(directory / "config.yaml"), f"--name={node}", f"--folder={folder}", f"--run.name={directory.name}", *overrides,
            f"--pods.host={own_address(host)}",
        ]  # fmt: skip
        pod = spawn("tandem.cli.main", arguments, threads=Threads(1), new_session=True)

        def pass_on(number: int, frame: FrameType | None) -> None:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        return _status(pod)


def _status(pod: "subprocess.Popen[bytes]") -> int:
    status = pod.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
