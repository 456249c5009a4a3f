"""What a job of Slurm runs on its further nodes: ``python -m tandem.cluster.launch.slurm.pod RUN HOST [--KEY=VALUE ...]``, a pod that joins the run.

HOST: the address of the run's first node.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from tandem.cluster.launch.node_pod import node_pod


def main() -> int:
    with node_pod(Path(sys.argv[1]), sys.argv[2], os.environ["SLURMD_NODENAME"], sys.argv[3:]) as pod:

        def pass_on(number: int, frame: FrameType | None) -> None:
            if pod.poll() is None:
                pod.send_signal(signal.SIGTERM)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, pass_on)
        status = pod.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
