"""One step off: the samples of a step are drawn under the weights of the step before, while that one trains; nothing that dies changes a bit."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from pod_runs import HERE, RECIPE, PodRun, difference, finish, recipe_with
from reward_models import write_reward_model

from tandem.config.recipe import load_config
from tandem.jobs.rl_run.ahead import keep_drawn
from tandem.jobs.rl_run.rl_run import RLRun
from tandem.jobs.start import resume, train
from tandem.pod.failures import SidecarDied
from tandem.pod.pod import Pod
from tandem.pod.pod_checkpoints import PodCheckpoints
from tandem.pod.rollout_ahead import Drawn, RolloutAhead
from tandem.pod.states import RolloutState
from tandem.rl.rollout.staleness import check_staleness, weights_of
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_records import Records
from tandem.runtime.rpc.calls import Progress
from tandem.types import FinishReason, Round, RunError, Sample, UserError, WeightVersion

AHEAD = ("--rollout.max_staleness=1", "--run.max_steps=4")


class _Stop(Callback):
    """Stops a run between two steps once ``rows`` of them were written."""

    def __init__(self, rows: int) -> None:
        self.left = rows

    def row(self, row: object) -> None:
        self.left -= 1

    def wants_stop(self) -> bool:
        return self.left <= 0


def in_this_process(folder: Path, *settings: str, callbacks: Sequence[Callback] = ()) -> PodRun:
    """Returns a run in one process, whose rollouts cannot overlap with its training."""
    run = PodRun(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(HERE / "rewards.py", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        recipe = load_config(RECIPE, [*AHEAD, f"--run.directory={folder}", f"--run.name={run.name}", *settings])
        train(recipe, inline=True, progress=False, callbacks=callbacks)
    return run


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    return in_this_process(tmp_path_factory.mktemp("one_step_off"))


def test_a_step_learns_from_samples_of_the_weights_before_and_counts_them_as_such(quiet: PodRun) -> None:
    rows = quiet.rows()
    assert [row["rollout/staleness"] for row in rows] == [row["rollout/staleness_max"] for row in rows] == [0.0, 1.0, 1.0, 1.0]
    with Journal(quiet.directory / "journal.sqlite", read_only=True) as journal:
        drawn = {step: {version.step for sample in journal.samples(step) or () for version in sample.sampled_weight_versions} for step in range(4)}
    assert drawn == {0: {0}, 1: {0}, 2: {1}, 3: {2}}
    # The ratio starts at the policy that drew the tokens: log mu - log pi is 0 only if that is the newest.
    assert rows[0]["actor/ppo_kl"] == 0.0 and all(row["actor/ppo_kl"] != 0.0 for row in rows[1:])
    assert rows[0]["mismatch_kl"] == rows[0]["mismatch_max_abs"] == 0.0
    # Under other weights no equality is expected, so nothing is said.
    assert all("mismatch_kl" not in row and row["actor/grad_norm"] > 0 for row in rows[1:])


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_with_the_samples_that_were_drawn_ahead(quiet: PodRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="resume"):
        in_this_process(tmp_path, callbacks=[_Stop(1)])
    run = PodRun(tmp_path)
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        # The weights that drew them are in no checkpoint but the first.
        (drawn,) = {version.step for sample in journal.samples(1) or () for version in sample.sampled_weight_versions}
        assert [saved.step for saved in journal.checkpoints()] == [0, 1] and drawn == 0
    monkeypatch.chdir(tmp_path)
    resume(run.directory, inline=True, progress=False)
    assert run.rows() == quiet.rows() and run.evaluations() == quiet.evaluations()
    assert (run.directory / "model" / "model.safetensors").read_bytes() == (quiet.directory / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--rollout.max_staleness=2"], r"'rollout.max_staleness' is 2; it must be 0 \(synchronous\) or 1 \(one step off\)"),
        (["--rollout.max_staleness=1", "--rollout.budget_tokens=4"], "with rollout.budget_tokens.*remove one of the two"),
        (["--rollout.max_staleness=1", "--residents.plan=sleep"], "residents.plan is 'sleep'.*set residents.plan to keep or auto"),
        (["--rollout.max_staleness=1", "--algorithm.old_logprobs=recompute"], r"set algorithm.tis_cap \(2.0 is usual\) or algorithm.old_logprobs to rollout"),
        (["--rollout.max_staleness=1", "--rollout.mask_off_policy=true"], "mask_off_policy"),
        (["--rollout.max_staleness=1", "--algorithm.filter_groups.metric=reward", "--reward_model.path=m"], "section 'reward_model'.*remove one of the three"),
    ],
)  # fmt: skip
def test_what_it_cannot_be_combined_with_is_refused(settings: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_config(RECIPE, settings)


def sample(*steps: int) -> Sample:
    count = len(steps)
    return Sample("3/a/0", "a", 0, (1,), (7,) * count, (-1.0,) * count, (-1.0,) * count, tuple(WeightVersion(1, step) for step in steps), FinishReason.STOP, "")


def test_a_sample_beyond_the_bound_is_never_trained_on() -> None:
    check_staleness([sample(2, 2), sample(3)], 3, 1)
    assert [weights_of(step, 1) for step in range(4)] == [0, 0, 1, 2] and [weights_of(step, 0) for step in range(3)] == [0, 1, 2]
    for steps in ((1, 2), (4,)):
        with pytest.raises(RunError, match=r"sample '3/a/0' was drawn by the weights of step .* step 3 may be at most 1 after them"):
            check_staleness([sample(*steps)], 3, 1)


def test_a_rollout_ahead_gives_its_samples_or_its_error_to_the_one_who_asks() -> None:
    drawn = [sample(2)]

    def fail(report: Progress) -> Drawn:
        report({"done": 1, "total": 2})
        report({"replaced": 1})
        raise IndexError

    for in_thread in (True, False):
        ahead = RolloutAhead(3, lambda report: (drawn, {"a": 1}), in_thread=in_thread)
        assert ahead.result() == (drawn, {"a": 1}) and 0 <= ahead.waited_s <= ahead.seconds and ahead.lost == []
        broken = RolloutAhead(3, fail, in_thread=in_thread)
        with pytest.raises(IndexError):
            broken.result()
        assert broken.lost == [{"replaced": 1}]


class _DyingRollout:
    """A rollout sidecar of two workers, of which one is replaced before the sidecar dies with ``error``."""

    channel = SimpleNamespace(is_remote=True)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def rollout(self, *_: object, on_progress: Progress, **__: object) -> Drawn:
        on_progress({"replaced": 1, "reason": "rollout worker 1 was killed", "groups": 2, "seconds": 0.1})
        raise self.error


def drawing_ahead(folder: Path, error: Exception) -> tuple[Pod, RLRun]:
    """Returns a pod whose rollout of step 3 ends with ``error`` beside the trainer's work, and as much of its run as ``keep_drawn`` reads."""
    journal = Journal(folder / "journal.sqlite")
    records = Records(journal, None, Callback())
    checkpoints = PodCheckpoints(journal, Callback())
    pod = Pod(cast(Any, None), cast(Any, _DyingRollout(error)), folder, 0, journal, lambda step: Round([], []), records, checkpoints, max_restarts=5)
    pod.engine_step, pod.transitions.rollout = 2, RolloutState.UPDATE_WEIGHT
    pod.begin_rollout(3, [], {}, weights=2)
    return pod, cast(RLRun, SimpleNamespace(journal=journal))


def test_what_died_and_was_replaced_in_a_rollout_beside_a_dying_trainer_is_counted_and_journalled(tmp_path: Path) -> None:
    pod, run = drawing_ahead(tmp_path, SidecarDied("rollout", "shim", "it was killed"))
    keep_drawn(pod, run)
    # It is drawn again once the trainer, whose death is counted by its recovery, is replaced.
    assert pod.ahead is None and pod.restarts.count == 2
    died = [(event.detail["role"], event.detail["part"], event.detail["step"]) for event in pod.journal.events() if event.kind == "recovery"]
    assert died == [("rollout", "worker", 3), ("rollout", "shim", 3)]


def test_a_defect_in_a_rollout_ends_the_run_also_where_the_trainer_has_died(tmp_path: Path) -> None:
    pod, run = drawing_ahead(tmp_path, RunError("this is a defect"))
    with pytest.raises(RunError, match="this is a defect"):
        keep_drawn(pod, run)


@pytest.mark.full
def test_the_trainer_takes_its_step_while_the_rollout_lasts_and_killing_both_loses_nothing(quiet: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    # The rollout of step 2 never ends, so only a trainer that does not wait for it takes step 1.
    process = run.begin(
        "train", str(RECIPE), f"--run.directory={run.parent}", f"--run.name={run.name}", *AHEAD, "--fault", "rollout_worker:stall:rollout:2"
    )
    for _ in range(3000):
        path = run.directory / "journal.sqlite"
        if path.exists() and any((each.state, each.step, each.ended_s is None) == ("train", 1, False) for each in run.transitions()):
            break
        time.sleep(0.1)
    (drawing,) = [each for each in run.transitions() if (each.state, each.step) == ("rollout", 2)]
    assert drawing.ended_s is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        "rollout_worker:before:rollout:2", "rollout_worker:after:rollout:1", "rollout_shim:before:rollout:3", "rollout_worker:before:update_weight:2",
        "trainer_worker:before:train:1", "trainer_worker:after:train:2", "trainer_shim:before:train:2", "trainer_shim:after:inference:1",
        "trainer_worker:before:register:1", "trainer_worker:after:save:2",
        "rollout_worker:before:rollout:2,trainer_worker:before:train:1", "rollout_worker:before:rollout:2,trainer_shim:after:train:1",
        "rollout_worker:before:rollout:3,trainer_shim:before:register:2", "rollout_worker:before:rollout:2,pod:before:start_engine:1",
        "pod:before:commit_samples:2", "pod:after:commit_samples:2", "pod:after:commit_scores:1", "pod:before:train:2", "pod:after:train:1",
        "pod:after:rollout:3", "pod:after:commit_checkpoint:2", "pod:before:checkpoint:2", "pod:after:commit_evaluation:2",
    ],
)  # fmt: skip
def test_kill_anything_gives_the_bits_of_the_quiet_run(quiet: PodRun, fault: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*AHEAD, "--fault", fault)
    while done.returncode == -9:
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
    assert sorted(path.name for path in (run.directory / "faults").iterdir()) == sorted(one.replace(":", "-") for one in fault.split(","))


@pytest.mark.full
def test_a_worker_that_was_replaced_before_its_sidecar_died_is_in_the_journal_too(quiet: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*AHEAD, "--rollout.workers=2", "--fault", "rollout_worker1:before:rollout:2,rollout_shim:after:rollout:2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
    assert [(event.detail["role"], event.detail["part"]) for event in run.events("recovery")] == [("rollout", "worker"), ("rollout", "shim")]


@pytest.mark.full
def test_weights_that_are_damaged_when_a_new_engine_reads_them_are_computed_again(quiet: PodRun, tmp_path: Path) -> None:
    # The engine has read the weights after 1 step, draws with them and dies; the trainer has taken its second step when a new engine reads them.
    run = PodRun(tmp_path, program=(str(HERE / "damaged_memory.py"), "1", "1", "--after-update"))
    done = run.train(*AHEAD, "--fault", "rollout_worker:before:rollout:2")
    assert done.returncode == 0, done.stdout + done.stderr
    (damaged,) = run.events("weights_damaged")
    assert damaged.detail["step"] == 1 and damaged.detail["repair"] == "the trainer returns to them"
    assert [event.detail["role"] for event in run.events("recovery")] == ["rollout", "trainer"]
    assert difference(run, quiet) == [] and run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("keep", [2, 1])
def test_a_run_that_is_prolonged_after_its_end_goes_back_to_the_weights_before_it(quiet: PodRun, keep: int, tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train(*AHEAD, "--run.max_steps=2", f"--checkpoint.keep={keep}")
    assert done.returncode == 0, done.stdout + done.stderr
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        assert journal.samples(2) is None
    done = run.resume("--run.max_steps=4", f"--checkpoint.keep={keep}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert run.rows() == quiet.rows()
    assert (run.directory / "model" / "model.safetensors").read_bytes() == (quiet.directory / "model" / "model.safetensors").read_bytes()


@pytest.mark.full
def test_replay_draws_under_the_recorded_weights_with_which_the_trainer_agrees_and_verify_knows_the_bound(quiet: PodRun, tmp_path: Path) -> None:
    for step in (0, 1, 3):
        done = finish(quiet.begin("replay", str(quiet.directory), "--step", str(step), "--inline"))
        assert done.returncode == 0, done.stdout + done.stderr
        said = done.stdout + done.stderr
        assert "rollout: 16 of 16 equal" in said and "rewards: 16 of 16 equal" in said and "train: " in said
        assert ("under the weights that drew them: mismatch_kl 0\n" in said) == (step > 0)
    verified = finish(quiet.begin("verify", str(quiet.directory)))
    assert verified.returncode == 0, verified.stdout + verified.stderr
    changed = tmp_path / "changed"
    shutil.copytree(quiet.directory, changed)
    config = changed / "config.yaml"
    config.write_text(config.read_text().replace("max_staleness: 1", "max_staleness: 0"))
    with Journal(changed / "journal.sqlite") as journal:
        journal.set("config", config.read_text())
    found = finish(quiet.begin("verify", str(changed)))
    assert found.returncode != 0 and "drawn by the weights of step 0, and step 1 may be at most 0 after them" in found.stdout + found.stderr


COMBINED = {
    "dynamic sampling": ["--algorithm.filter_groups.metric=reward", "--algorithm.filter_groups.max_num_gen_batches=3"],
    "ppo": ["--algorithm.name=ppo", "--critic.learning_rate=1e-2"],
    "kl in the reward, recomputed old policy": ["--algorithm.kl_in_reward=true", "--algorithm.old_logprobs=recompute", "--algorithm.tis_cap=2"],
    "online dpo, mini-batches": ["--algorithm.name=online_dpo", "--algorithm.kl_coef=0", "--algorithm.minibatches=2"],
    "shared prompts, no inference": ["--trainer.share_prompts=true", "--algorithm.kl_coef=0"],
    "a reference that follows": ["--reference.update=copy", "--reference.every_steps=2"],
    "lora": ["--trainer.lora={rank: 4, alpha: 8, target_modules: [q_proj, v_proj]}"],
}


@pytest.mark.full
@pytest.mark.parametrize("name", COMBINED)
def test_together_with(name: str, tmp_path: Path) -> None:
    alone = in_this_process(tmp_path / "alone", *COMBINED[name])
    run = PodRun(tmp_path / "pod")
    faults = "rollout_worker1:after:rollout:2,trainer_worker:before:train:2,pod:after:train:1"
    done = run.train(*AHEAD, *COMBINED[name], "--rollout.workers=2", "--fault", faults)
    while done.returncode == -9:
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, alone) == [] and run.left_behind() == []
    assert [row["rollout/staleness_max"] for row in run.rows()] == [0.0, 1.0, 1.0, 1.0]


def tools(folder: Path) -> Path:
    return HERE / "calculator.yaml"


def agent(folder: Path) -> Path:
    return HERE / "agent.yaml"


def reward_model(folder: Path) -> Path:
    return recipe_with(folder, reward_model={"path": str(write_reward_model(folder / "reward")), "weight": 0.5})


def curriculum(folder: Path) -> Path:
    rows = [{"prompt": f"{i * 7 % 20 + 11}=", "answer": "1"} for i in range(20)]
    for name, chosen in (("rows", rows), ("other", [{"prompt": f"{i}=", "answer": "1"} for i in (97, 98, 99)])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chosen))
    (folder / "long.py").write_text("def is_long(completions, **_):\n    return [float(len(text) > 2) for text in completions]\n")
    content = yaml.safe_load(RECIPE.read_text())
    return recipe_with(
        folder,
        task={"name": "dataset", "path": str(folder / "rows.jsonl"), "eval_path": str(folder / "other.jsonl")},
        rewards={"functions": [{"function": f"{folder}/long.py:is_long"}]},
        rollout=content["rollout"] | {"prompt_order": {"by": "success_rate", "solved_weight": 0.2}},
        algorithm=content["algorithm"] | {"filter_groups": {"metric": "reward", "max_num_gen_batches": 2}},
        sft=content["sft"] | {"corrupted_share": 0.0},
    )


@pytest.mark.full
@pytest.mark.parametrize("make", [tools, agent, reward_model, curriculum])
def test_recipes_of_other_kinds_have_the_bits_of_one_process_when_sidecars_die(make: Callable[[Path], Path], tmp_path: Path) -> None:
    recipe = make(tmp_path)
    alone, run = PodRun(tmp_path / "alone", recipe=recipe), PodRun(tmp_path / "pod", recipe=recipe)
    done = alone.train("--inline", *AHEAD)
    assert done.returncode == 0, done.stdout + done.stderr
    done = run.train(*AHEAD, "--fault", "rollout_worker:after:rollout:2,trainer_worker:before:train:2,pod:after:train:1")
    while done.returncode == -9:
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, alone) == [] and run.left_behind() == []
    assert [row["rollout/staleness_max"] for row in run.rows()] == [0.0, 1.0, 1.0, 1.0]
    done = finish(run.begin("replay", str(run.directory), "--step", "3", "--inline"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mismatch_kl 0\n" in done.stdout + done.stderr


@pytest.mark.full
def test_a_mesh_has_the_bits_of_itself_when_a_rank_and_the_engine_die(tmp_path: Path) -> None:
    mesh = (*AHEAD, "--parallel.data=2", "--machine.threads=2")
    quiet, run = PodRun(tmp_path / "quiet"), PodRun(tmp_path / "killed")
    for each, faults in ((quiet, ()), (run, ("--fault", "trainer_rank1:before:train:1,rollout_worker:before:rollout:3"))):
        done = each.train(*mesh, *faults)
        assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
    assert [event.detail["role"] for event in run.events("recovery")] == ["trainer", "rollout"]
