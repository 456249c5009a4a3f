"""The controller of a run with very many pods: processor time, and how long it takes to find those that die.

    python benchmarks/controller_scale.py [--pods 1000] [--seconds 300] [--deaths 40] [--lease 15]

The pods are simulated: each has a real lease and a real key in a real etcd and answers the controller's calls in the real frames, with a heartbeat every
second while a call is in progress, and draws no token. The controller is real but for the trainer, which is a pause of 20 s in each iteration. Pods die at
random times, in turn as a process does (its connections are closed) and as a machine does (silence); the next life of each joins when its lease is over.
"""

import sys
import tempfile
from pathlib import Path

from machine import machine, write_report
from options import parser

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "pod")]
from simulated_run import describe, simulate  # noqa: E402


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--pods", type=int, default=1000)
    options.add_argument("--processes", type=int, default=4, help="that the pods are divided over")
    options.add_argument("--seconds", type=float, default=300.0)
    options.add_argument("--deaths", type=int, default=40)
    options.add_argument("--lease", type=float, default=15.0)
    chosen = options.parse_args()
    text = machine()
    with tempfile.TemporaryDirectory() as scratch:
        outcome = simulate(Path(scratch), chosen.pods, chosen.processes, chosen.lease, chosen.seconds, chosen.deaths)
    missed = [death for death in outcome.deaths if death.detected_s is None or death.detected_s > 2 * chosen.lease]
    report = (
        f"# The controller of {chosen.pods} pods\n\n{text}\n\n{chosen.pods} simulated pods in {chosen.processes} processes, coordination.lease_s "
        f"{chosen.lease:g}, pods.heartbeat_timeout_s {2 * chosen.lease:g}; {chosen.seconds:g} s after all had joined, with {chosen.deaths} deaths at random "
        f"times.\n\n| what | measured |\n| --- | --- |\n{describe(outcome)}\n\nThe limits: one core; no death missed; each found within two leases "
        f"({2 * chosen.lease:g} s). Missed or later: {len(missed)}.\n"
    )
    print(report)
    write_report("controller-scale", report, chosen.out)


if __name__ == "__main__":
    main()
