"""Ten random faults in runs of four pods on machines of their own; ``benchmarks/pod_faults.py`` makes a hundred."""

from pathlib import Path

import pytest
from pod_runs import PodRun
from random_faults import faulty_run, rows_of

pytestmark = pytest.mark.full


@pytest.mark.parametrize("seed", [1001, 1002])
def test_five_random_faults_a_run_change_no_bit_and_lose_no_sample(seed: int, quiet: PodRun, tmp_path: Path) -> None:
    run = faulty_run(quiet, tmp_path / "four", seed)
    print("\n".join(rows_of([run])))
    assert run.wrong == (), run
