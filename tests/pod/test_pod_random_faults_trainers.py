"""Random faults of every kind in a run of four pods of which two train, on machines of their own: the bits of two ranks in one pod."""

from pathlib import Path

import pytest
from pod_runs import PodRun
from random_faults import SETUPS, faulty_run

pytestmark = pytest.mark.full
STEPS = 16
SETUP = SETUPS[1]
SETTINGS = SETUP.settings


@pytest.mark.parametrize("seed", [1, 2])
def test_random_faults_while_ranks_are_on_two_machines_change_no_bit(seed: int, quiet: PodRun, tmp_path: Path) -> None:
    run = faulty_run(quiet, tmp_path / "run", seed, STEPS, setup=SETUP)
    assert run.wrong == () and len(run.faults) == 5
