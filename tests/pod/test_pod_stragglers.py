"""A slow link between two machines with ranks of the trainer (network namespaces, real etcd) is named by them; without one none is."""

import time
from typing import Any

import pytest
from four_pods import FourPods

pytestmark = pytest.mark.full
SETTINGS = ("--parallel.data=2", "--pods.trainer_count=2", "--health.straggler_steps=8", "--health.every_s=1")
NARROW_KBIT_S = 4000
"""Narrow enough that the gradients of a step wait in its queue."""


@pytest.fixture
def slow(four: FourPods) -> FourPods:
    """Four pods, of which the run's own and one that joined have a rank each, in a run that does not end by itself."""
    four.settings, four.steps = SETTINGS, 1000
    return four


def wait_for(four: FourPods, kind: str) -> dict[str, Any]:
    until = time.monotonic() + 300
    while not (found := four.run.events(kind) if (four.run.directory / "journal.sqlite").exists() else []):
        assert time.monotonic() < until and not four.is_over, f"no event '{kind}' in {four.rows()} steps: {four.ends}"
        four.look_after()
        time.sleep(0.2)
    return found[0].detail


def test_a_link_that_becomes_narrow_is_named_by_its_two_nodes_and_forgotten_when_it_is_fast_again(slow: FourPods) -> None:
    slow.start()
    slow.wait_for_step(14)
    assert slow.run.events("slow_link") == [] and slow.run.events("straggler") == [], "a healthy run gives no false alarm"
    [name] = [name for name, pod in slow.pods.items() if any("tandem.pod.trainer_worker" in line for line in pod.processes().values())]
    slow.hosts[name].slow_down(NARROW_KBIT_S)
    found = wait_for(slow, "slow_link")
    assert name in found["link"] and len(found["link"]) == 2, found
    assert found["round_trip_s"] > 4 * found["usual_s"] and found["wait_share"] >= 0.1, found
    assert slow.run.events("straggler") == [], "a rank that waits for its link is no straggler"
    slow.hosts[name].slow_down(0)
    assert name in wait_for(slow, "slow_link_over")["link"]
