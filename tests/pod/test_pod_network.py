"""Four pods on machines of their own (network namespaces, real etcd), with cuts between any two: the bits of the undisturbed run."""

import random

import pytest
from four_pods import FourPods
from pod_runs import PodRun
from random_faults import KINDS, check_undisturbed

pytestmark = pytest.mark.full
STEPS = 10


def test_four_pods_on_machines_of_their_own_give_the_bits_of_one(four: FourPods, quiet: PodRun) -> None:
    four.settings = ("--pods.min_count=4",)
    four.start()
    check_undisturbed(four, quiet)
    assert sorted(event.detail["name"] for event in four.run.events("membership") if "joined" in event.detail) == ["p1", "p2", "p3"]
    assert four.run.events("recovery") == []


@pytest.mark.parametrize("kind", ["cut pod - controller", "cut pod - trainer", "cut - etcd", "pull a pod's wire"])
def test_a_cut_between_machines_changes_no_bit(kind: str, four: FourPods, quiet: PodRun) -> None:
    four.start()
    four.wait_for_step(2)
    # Longer than a lease and a heartbeat may be away.
    KINDS[kind](four, random.Random(kind), 8.0)
    check_undisturbed(four, quiet)
