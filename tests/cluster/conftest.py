import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "pod"))
sys.path.append(str(Path(__file__).parents[1] / "jobs"))
sys.path.append(str(Path(__file__).parents[1] / "serving"))
sys.path.append(str(Path(__file__).parents[1] / "gateway"))
sys.path.append(str(Path(__file__).parents[1]))

from launched_runs import LaunchedRuns
from slurm_cluster import SlurmCluster

from tandem.cli.main import main

Here = Callable[..., str]


@pytest.fixture
def here(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    """Runs the command in this process, which is faster than starting one, in the folder of the test. Returns what it prints; of a refusal its line."""
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str | Path, refused_with: int = 2) -> str:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, error = capsys.readouterr()
        assert (status, error) == (0, "") or (status == refused_with and out == "" and error.count("\n") == 1), (arguments, status, out, error)
        return out or error.removeprefix("tandem: ").rstrip()

    yield run
    signal.signal(signal.SIGTERM, handler)


@pytest.fixture
def slurm(slurm_cluster: SlurmCluster, tmp_path: Path) -> Iterator[LaunchedRuns]:
    """The command in the folder of the test, in processes of its own. Jobs are ended with the test."""
    yield LaunchedRuns(tmp_path, slurm_cluster.environment)
    slurm_cluster.clear()


@pytest.fixture
def near_slurm(slurm: LaunchedRuns, monkeypatch: pytest.MonkeyPatch) -> LaunchedRuns:
    """The same, where the command in this process finds Slurm too."""
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    return slurm
