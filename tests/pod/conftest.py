import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "weight_transfer"))

from pod_runs import PodRun


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """A run without faults, with step 1 traced."""
    run = PodRun(tmp_path_factory.mktemp("undisturbed"))
    done = run.train("--run.trace_steps=[1]")
    assert done.returncode == 0, done.stderr + done.stdout
    return run
