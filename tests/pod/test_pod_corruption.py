"""Silent data corruption in reinforcement learning, with the real command: what was drawn and learned since the last agreement is repeated."""

from pathlib import Path

import pytest
from pod_runs import PodRun, difference

pytestmark = pytest.mark.full
SETTINGS = ("--parallel.data=2", "--trainer.corruption_check=1.0", "--checkpoint.every_steps=1", "--checkpoint.asynchronous=false", "--run.max_steps=4")


@pytest.fixture(scope="module")
def unchecked(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    run = PodRun(tmp_path_factory.mktemp("unchecked"))
    done = run.train(*SETTINGS, "--trainer.corruption_check=0.0")
    assert done.returncode == 0, done.stdout + done.stderr
    return run


@pytest.mark.parametrize("settings", [(), ("--rollout.max_staleness=1",)], ids=["in turn", "one step off"])
def test_a_flipped_bit_of_a_trainers_rank_is_found_and_the_run_ends_as_without_it(settings: tuple[str, ...], unchecked: PodRun, tmp_path: Path) -> None:
    if settings:
        unchecked = PodRun(tmp_path / "unchecked")
        done = unchecked.train(*SETTINGS, *settings, "--trainer.corruption_check=0.0")
        assert done.returncode == 0, done.stdout + done.stderr
    run = PodRun(tmp_path)
    done = run.train(*SETTINGS, *settings, "--fault=trainer_rank1:flip:gradient:2")
    assert done.returncode == 0, done.stdout + done.stderr
    [found], [cordon] = run.events("silent_corruption"), run.events("cordon")
    assert found.detail["step"] == 2 and found.detail["ranks"] == [1] and found.detail["last_agreement"] == 1 and found.detail["checkpoint"] == 1
    assert cordon.detail["ranks"] == [1] and not unchecked.events("silent_corruption")
    assert difference(run, unchecked) == [] and run.left_behind() == []
    assert {path.name for path in (run.directory / "checkpoints").glob("suspect-*")} == {"suspect-step-2"}
