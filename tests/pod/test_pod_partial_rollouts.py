"""Partial rollouts in a pod: samples are continued with newer weights, and nothing that dies changes a bit or loses the replay buffer."""

import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from pod_runs import HERE, RECIPE, PodRun, difference, finish

from tandem.config.recipe import load_config
from tandem.jobs.start import resume, train
from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason

PARTIAL = ("--rollout.budget_tokens=4", "--run.max_steps=4")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    """A run with partial rollouts, in one process with one engine."""
    run = PodRun(tmp_path_factory.mktemp("partial"))
    shutil.copy(HERE / "rewards.py", run.parent)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(run.parent)
        train(load_config(RECIPE, [*PARTIAL, f"--run.directory={run.parent}", f"--run.name={run.name}"]), inline=True, progress=False)
    return run


def test_samples_are_continued_by_newer_weights_whose_tokens_alone_are_compared(quiet: PodRun) -> None:
    rows = quiet.rows()
    assert [row["mismatch_kl"] for row in rows] == [row["mismatch_max_abs"] for row in rows] == [0.0] * 4
    assert rows[0]["rollout/off_policy_share"] == 0.0 and all(row["rollout/off_policy_share"] > 0 for row in rows[1:])
    assert all(row["rollout/staleness_max"] <= 3 and row["actor/grad_norm"] > 0 for row in rows)
    with Journal(quiet.directory / "journal.sqlite", read_only=True) as journal:
        for step, row in enumerate(rows):
            samples, buffer = [sample for each in journal.rounds(step) for sample in each.samples], journal.replay_buffer(step + 1)
            assert len(samples) == 16 and all(sample.finish_reason is not FinishReason.ABORT for sample in samples)
            assert (len(buffer.groups), sum(len(sample.token_ids) for sample in buffer.samples)) == (row["rollout/buffer_groups"], row["rollout/buffer_tokens"])
            for sample in samples:
                steps = [version.step for version in sample.sampled_weight_versions]
                assert steps == sorted(steps) and max(map(steps.count, steps)) <= 12 and steps[-1] <= step
                # A round draws four tokens, and a sample that was unfinished had all of them.
                assert all(steps.count(each) % 4 == 0 for each in set(steps) - {steps[-1]})


@pytest.mark.full
def test_a_kill_in_the_middle_of_the_buffer_and_a_resume_give_the_bits_of_the_quiet_run(
    quiet: PodRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = PodRun(tmp_path)
    done = run.train("--inline", *PARTIAL, "--fault", "pod:before:commit_samples:2")
    assert done.returncode == -9, done.stdout + done.stderr
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        assert journal.replay_buffer(2).unfinished
    monkeypatch.chdir(tmp_path)
    resume(run.directory, inline=True)
    assert difference(run, quiet) == [] and run.left_behind() == []


@pytest.mark.full
def test_killed_workers_and_a_resume_give_the_bits_of_the_quiet_run(quiet: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*PARTIAL, "--rollout.workers=2", "--fault", "rollout_worker1:after:rollout:1,pod:before:commit_samples:2")
    assert done.returncode == -9, done.stdout + done.stderr
    done = run.resume("--rollout.workers=3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
    assert (run.directory / "logs" / "rollout_worker2.log").exists()
    (event,) = run.events("recovery")
    assert (event.detail["role"], event.detail["worker"], event.detail["step"]) == ("rollout", 1, 1)


def test_a_damaged_replay_buffer_is_found_by_verify_and_never_trained_on(quiet: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    run.directory.mkdir(parents=True)
    with closing(sqlite3.connect(quiet.directory / "journal.sqlite")) as source, closing(sqlite3.connect(run.directory / "journal.sqlite")) as copy:
        source.backup(copy)
        copy.execute("UPDATE replay_buffers SET samples = CAST(samples || x'00' AS BLOB) WHERE step = 3")
        copy.commit()
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        assert journal.damaged_batches() == [3]
        with pytest.raises(Exception, match="replay buffer of step 3"):
            journal.replay_buffer(4)


@pytest.mark.full
@pytest.mark.parametrize("step", [0, 2, 3])
def test_replay_draws_every_round_again_from_the_recorded_buffer(quiet: PodRun, step: int) -> None:
    done = finish(quiet.begin("replay", str(quiet.directory), "--step", str(step), "--inline"))
    assert done.returncode == 0, done.stdout + done.stderr
    for line in (" equal", "rewards: 16 of 16 equal", "train: "):
        assert line in done.stdout
    verified = finish(quiet.begin("verify", str(quiet.directory)))
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        "pod:after:commit_samples:1", "pod:after:commit_scores:2", "trainer_worker:after:train:2", "rollout_worker:after:rollout:3", "pod:after:rollout:0",
        "trainer_worker:before:train:3,pod:after:commit_checkpoint:2",
    ],
)  # fmt: skip
def test_kill_anywhere_gives_the_bits_of_the_quiet_run(quiet: PodRun, fault: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*PARTIAL, "--fault", fault)
    while done.returncode == -9:
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("settings", ["rollout.mask_off_policy=true", "algorithm.old_logprobs=recompute algorithm.tis_cap=2", "algorithm.kl_coef=0"])
def test_ways_to_count_old_tokens_train_with_a_mismatch_of_zero_on_a_mesh(settings: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*PARTIAL, *(f"--{setting}" for setting in settings.split()), "--parallel.data=2", "--machine.threads=2")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = run.rows()
    assert [row["mismatch_kl"] for row in rows] == [0.0] * 4 and all(row["actor/grad_norm"] > 0 for row in rows)
    assert any(row["rollout/off_policy_share"] > 0 for row in rows)
