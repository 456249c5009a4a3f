"""What a job of Slurm runs on its further nodes: ``python -m tandem.cluster.launch.slurm.pod RUN HOST [--KEY=VALUE ...]``, a pod that joins the run.

HOST: the address of the run's first node. The pod's process is started again where it dies; one that dies again and again is given up, and the task ends.
"""

import os
import signal
import sys
from pathlib import Path

from tandem.cluster.launch.job import exit_status, read_job
from tandem.cluster.launch.kept_pod import KeptPod
from tandem.cluster.launch.node_pod import node_pod
from tandem.cluster.launch.slurm.kept import kept_on_node

MOST_DEATHS = 5


def main() -> int:
    directory, host, name = Path(sys.argv[1]), sys.argv[2], os.environ["SLURMD_NODENAME"]
    pod = KeptPod(lambda: node_pod(directory, host, name, sys.argv[3:]), lambda text: print(f"pod {name} {text}", flush=True), MOST_DEATHS)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: pod.leave())

    def run() -> int:
        _, recipe = read_job(directory)
        with kept_on_node(recipe.checkpoint, directory, name):
            return pod.run()

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main())
