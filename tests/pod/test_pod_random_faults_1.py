"""Ten random faults in runs of four pods on machines of their own; ``benchmarks/pod_faults.py`` makes a hundred."""

from pathlib import Path

import pytest
from etcd_server import WHY_SKIPPED, program
from four_pods import undisturbed_run
from network import why_not
from pod_runs import PodRun
from random_faults import faulty_run, rows_of

pytestmark = [
    pytest.mark.full, pytest.mark.skipif(program() is None, reason=WHY_SKIPPED), pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces work"),
]  # fmt: skip


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    return undisturbed_run(tmp_path_factory.mktemp("quiet"))


@pytest.mark.parametrize("seed", [1001, 1002])
def test_five_random_faults_a_run_change_no_bit_and_lose_no_sample(seed: int, quiet: PodRun, tmp_path: Path) -> None:
    run = faulty_run(quiet, tmp_path / "four", seed)
    print("\n".join(rows_of([run])))
    assert run.wrong == (), run
