"""Whole runs of reinforcement learning with DeepSpeed as the trainer: its environment's process beside our engine, faults, resumes, replays."""

import json
from pathlib import Path

import pytest
from pod_runs import PodRun, difference

from tandem.backends.environment import python_of
from tandem.cli.main import main
from tandem.types import UserError

BACKEND = ("--trainer", "deepspeed")


@pytest.fixture(scope="module")
def environment() -> Path:
    """The interpreter of DeepSpeed's environment."""
    try:
        return python_of("deepspeed")
    except UserError as error:
        pytest.skip(str(error))


def run_of(folder: Path, *settings: str) -> PodRun:
    run = PodRun(folder)
    done = run.train(*BACKEND, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


ONE = ()
SHARDED = ("--parallel.data=2", "--parallel.zero=3")
OFFLOADED = ("--parallel.data=2", "--parallel.zero=2", "--trainer.offload=cpu", "--residents.plan=sleep")


@pytest.mark.full
@pytest.mark.parametrize("settings", [pytest.param(ONE, id="one rank"), pytest.param(SHARDED, id="ZeRO 3"), pytest.param(OFFLOADED, id="ZeRO 2, offloaded")])
def test_a_run_has_the_samples_of_the_native_trainer_and_a_killed_rank_changes_no_bit(
    settings: tuple[str, ...], environment: Path, undisturbed: PodRun, tmp_path: Path
) -> None:
    run = run_of(tmp_path / "whole", *settings)
    rows, native = run.rows(), undisturbed.rows()
    assert all(row["mismatch_kl"] == 0.0 and row["mismatch_max_abs"] == 0.0 for row in rows), "engine and trainer compute one token differently"
    # The samples are drawn with the same random numbers. Until weights that differ in their last bits choose another token, they are the same.
    assert rows[0]["reward/mean"] == native[0]["reward/mean"] and len(rows) == len(native)
    assert abs(rows[0]["actor/grad_norm"] - native[0]["actor/grad_norm"]) < 1e-5
    command = (run.directory / "logs" / "trainer_worker.log").read_text()
    assert run.left_behind() == [] and "Traceback" not in command
    rank = "trainer_rank1" if "--parallel.data=2" in settings else "trainer_worker"
    killed = run_of(tmp_path / "killed", *settings, "--fault", f"{rank}:before:optimizer:3")
    assert len(killed.events("recovery")) == 1 and difference(killed, run) == [] and killed.left_behind() == []


@pytest.mark.full
def test_a_killed_run_resumes_with_the_same_curve(environment: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path / "whole", *SHARDED)
    killed = PodRun(tmp_path / "killed")
    done = killed.train(*BACKEND, *SHARDED, "--fault", "pod:before:train:3")
    assert done.returncode != 0
    done = killed.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(killed, run) == []


def test_a_machine_without_the_environment_is_one_line_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TANDEM_SIDECARS", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)
    for arguments in ((), ("--dry-run",)):
        assert main(["train", "sort", *BACKEND, *arguments]) == 2
        error = capsys.readouterr().err
        assert error.strip().endswith("tandem sidecar install deepspeed") and len(error.strip().splitlines()) == 1, error
        assert not list(tmp_path.iterdir())


@pytest.mark.full
@pytest.mark.parametrize(("trainer", "rollout"), [("data=2,zero=3", "quantization=int8"), ("zero=3,offload=cpu", ""), ("data=2,zero=1", "workers=2")])
def test_weights_reach_engines_unchanged(trainer: str, rollout: str, environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["weights", "check", "--trainer", f"backend=deepspeed,{trainer}", "--rollout", rollout, "--sleep", "2", "--threads", "1", "--json"])
    row = json.loads(capsys.readouterr().out)
    assert (status, row["result"], row["found"]) == (0, "ok", []) and row["tensors"] == 57 and row["digests"] > 0


@pytest.mark.full
def test_a_recorded_step_is_replayed_with_the_same_bits(environment: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path, *SHARDED)
    done = PodRun(tmp_path)
    replayed = done.begin("replay", str(run.directory), "--step", "3")
    out, error = replayed.communicate(timeout=300)
    assert replayed.returncode == 0, out + error
