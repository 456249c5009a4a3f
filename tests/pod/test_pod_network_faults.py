"""Four pods on machines of their own (network namespaces, real etcd), with slow links, kills, and etcd away: the bits of the undisturbed run."""

import random
import time

import pytest
from four_pods import FourPods
from pod_runs import PodRun
from random_faults import KINDS, check_undisturbed

pytestmark = pytest.mark.full
STEPS = 10


@pytest.mark.parametrize("kind", ["slow peer", "kill a machine", "kill a process"])
def test_a_fault_of_a_machine_changes_no_bit(kind: str, four: FourPods, quiet: PodRun) -> None:
    four.start()
    four.wait_for_step(2)
    KINDS[kind](four, random.Random(kind), 8.0)
    check_undisturbed(four, quiet)


def test_etcd_that_is_away_for_longer_than_a_lease_pauses_the_run(four: FourPods, quiet: PodRun) -> None:
    four.start()
    four.wait_for_step(2)
    four.etcd.kill()
    time.sleep(8)
    four.etcd.start()
    check_undisturbed(four, quiet)
