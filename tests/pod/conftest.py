import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "weight_transfer"))
sys.path.append(str(Path(__file__).parents[1] / "health"))

from etcd_server import WHY_SKIPPED, program
from four_pods import STEPS, FourPods, undisturbed_run
from network import why_not
from pod_runs import PodRun


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """A run without faults, with step 1 traced, made once for all processes of the tests. Nothing in it may be changed."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    run, made = PodRun(folder / "undisturbed"), folder / "undisturbed.made"
    with (folder / "undisturbed.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            done = run.train("--run.trace_steps=[1]")
            assert done.returncode == 0, done.stderr + done.stdout
            made.touch()
    return run


@pytest.fixture(scope="module")
def machines() -> None:
    """Skips where pods cannot have machines of their own. Asked for when a test needs them: it makes a namespace to find out."""
    if why := (WHY_SKIPPED if program() is None else why_not()):
        pytest.skip(why)


@pytest.fixture(scope="module")
def quiet(request: pytest.FixtureRequest, machines: None, tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """The undisturbed run of ``STEPS`` steps of the test's module with its ``SETTINGS``, in one pod."""
    return undisturbed_run(tmp_path_factory.mktemp("quiet"), getattr(request.module, "STEPS", STEPS), *getattr(request.module, "SETTINGS", ()))


@pytest.fixture
def four(request: pytest.FixtureRequest, machines: None, tmp_path: Path) -> Iterator[FourPods]:
    """Four pods on machines of their own, for the same run."""
    made = FourPods(tmp_path / "four", getattr(request.module, "STEPS", STEPS))
    yield made
    made.close()
