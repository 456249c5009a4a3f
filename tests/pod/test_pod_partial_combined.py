"""Partial rollouts together with dynamic sampling, prompts by success rate and episodes: a killed run has the bits of a quiet
one, and a replay those of the run."""

import json
from pathlib import Path

import pytest
import yaml
from pod_runs import HERE, RECIPE, PodRun, difference, finish
from reward_models import write_reward_model

from tandem.config.recipe import load_config
from tandem.jobs.start import train
from tandem.rl.rollout.filter_groups import GroupState, group_state, groups_of
from tandem.runtime.records.journal import Journal
from tandem.types import FinishReason

STEPS = 5
REWARD = '''
def even(completions, **_):
    """Returns 1 for each completion with an even number of digits."""
    return [float(sum(map(str.isdigit, text)) % 2 == 0) for text in completions]
'''
ROWS = 44


def recipe(folder: Path) -> Path:
    """Writes the tiny recipe with a budget, dynamic sampling and prompts of a file by success rate."""
    (folder / "even.py").write_text(REWARD)
    rows = [{"prompt": f"{i * 7 % 89 + 10}=", "answer": "12345678"[: i % 8 + 1]} for i in range(ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "other.jsonl").write_text('{"prompt": "99=", "answer": "1"}\n')
    content = yaml.safe_load(RECIPE.read_text())
    content["task"] = {"name": "dataset", "path": f"{folder}/rows.jsonl", "eval_path": f"{folder}/other.jsonl"}
    content["rewards"] = {"functions": [{"function": f"{folder}/even.py:even"}]}
    content["rollout"] |= {"budget_tokens": 4, "prompt_order": {"by": "success_rate"}}
    content["algorithm"] |= {"filter_groups": {"max_num_gen_batches": 6}}
    content["sft"]["corrupted_share"] = 0.0
    content["evaluation"] |= {"prompts": 1, "final_prompts": 1, "consecutive": 100}
    content["run"] |= {"max_steps": STEPS}
    path = folder / "combined.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    folder = tmp_path_factory.mktemp("combined")
    run = PodRun(folder, recipe=recipe(folder))
    train(load_config(run.recipe, [f"--run.directory={run.parent}", f"--run.name={run.name}"]), inline=True, progress=False)
    return run


@pytest.mark.full
def test_useful_groups_are_trained_oldest_first_and_every_group_is_judged_once_or_waits(quiet: PodRun) -> None:
    config, rows = load_config(quiet.recipe).algorithm.filter_groups, quiet.rows()
    assert [row["mismatch_kl"] for row in rows] == [0.0] * STEPS and any(row["rollout/off_policy_share"] > 0 for row in rows)
    judged: dict[str, int] = {}
    with Journal(quiet.directory / "journal.sqlite", read_only=True) as journal:
        for step, row in enumerate(rows):
            rounds, wanted = journal.rounds(step), 4
            assert len(rounds) == row["rollout/rounds"]
            for number, (samples, _) in enumerate(rounds):
                useful = [group for group in groups_of(rounds[:number]) if group_state(group, config) is GroupState.USEFUL]
                # A round hands over as many groups as the step lacks.
                assert len({sample.prompt_id for sample in samples}) == wanted - len(useful)
                assert all(sample.finish_reason is not FinishReason.ABORT for sample in samples)
                for name in dict.fromkeys(sample.id.rpartition("/")[0] for sample in samples):
                    assert name not in judged
                    judged[name] = step
        waiting = {sample.id.rpartition("/")[0] for sample in journal.replay_buffer(STEPS).samples}
        refilled = [len(journal.rounds(step)) for step in range(STEPS)]
    assert waiting and not waiting & judged.keys()
    assert max(refilled) > 1, "no step was refilled, so that this test says nothing"
    # Groups are handed over in the order in which they were begun, as far as they are finished: none that was begun early is left behind.
    assert all(int(name.partition("/")[0]) >= STEPS - 3 for name in waiting)


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", ["pod:before:commit_samples:2", "pod:after:commit_scores:3", "rollout_worker:after:rollout:3", "trainer_worker:after:train:2"]
)
def test_kill_and_resume_give_the_bits_of_the_quiet_run(quiet: PodRun, fault: str, tmp_path: Path) -> None:
    run = PodRun(tmp_path, recipe=quiet.recipe)
    done = run.train("--fault", fault)
    while done.returncode == -9:
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []


@pytest.mark.full
@pytest.mark.parametrize("step", [0, 3])
def test_a_replay_draws_every_round_again(quiet: PodRun, step: int) -> None:
    done = finish(quiet.begin("replay", str(quiet.directory), "--step", str(step), "--inline"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" equal") >= 2


@pytest.mark.full
def test_episodes_wait_between_steps_and_a_killed_run_has_the_bits_of_a_quiet_one(tmp_path: Path) -> None:
    budget = ("--rollout.budget_tokens=12", "--run.max_steps=4")
    quiet, run = (PodRun(tmp_path / name, recipe=HERE / "calculator.yaml") for name in ("quiet", "killed"))
    done = quiet.train(*budget)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = quiet.rows()
    # A step that takes groups of earlier steps alone has no token of the newest weights, and so nothing to compare.
    compared = [row["mismatch_kl"] for row in rows if "mismatch_kl" in row]
    assert len(compared) > 1 and set(compared) == {0.0} and any(row["rollout/off_policy_share"] > 0 for row in rows)
    with Journal(quiet.directory / "journal.sqlite", read_only=True) as journal:
        trained = [sample for step in range(4) for sample in journal.samples(step) or ()]
    # Some episodes have several turns, drawn by the weights of several steps.
    assert any(len({version.step for version in sample.sampled_weight_versions}) > 1 and sample.response_mask for sample in trained)
    done = run.train(*budget, "--fault", "pod:before:commit_samples:2")
    assert done.returncode == -9, done.stdout + done.stderr
    done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
    done = finish(quiet.begin("replay", str(quiet.directory), "--step", "2", "--inline"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_a_reward_model_scores_the_groups_that_a_step_takes(tmp_path: Path) -> None:
    """Also reward functions that need its score; a killed run has the bits of a quiet one."""
    (tmp_path / "shifted.py").write_text("def shifted(completions, reward_model_score, **_):\n    return [score + 1 for score in reward_model_score]\n")
    content = yaml.safe_load(RECIPE.read_text())
    needing = {"function": f"{tmp_path}/shifted.py:shifted", "needs": ["reward_model"], "weight": 0.25}
    content["rewards"] = {"functions": [{"function": f"{HERE}/rewards.py:digits"}, needing]}
    content["reward_model"] = {"path": str(write_reward_model(tmp_path / "reward")), "weight": 0.5}
    content["rollout"] |= {"budget_tokens": 4}
    content["run"] |= {"max_steps": 4}
    path = tmp_path / "scored.yaml"
    path.write_text(yaml.safe_dump(content))
    quiet, run = (PodRun(tmp_path / name, recipe=path) for name in ("quiet", "killed"))
    done = quiet.train()
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(row["rollout/off_policy_share"] > 0 for row in quiet.rows())
    with Journal(quiet.directory / "journal.sqlite", read_only=True) as journal:
        for step in range(4):
            samples, scores = journal.samples(step), journal.scores(step)
            assert samples is not None and scores is not None and len(samples) == 16
            for score in scores:
                digits, shifted, model = (score.components[name] for name in ("digits", "shifted", "reward_model"))
                assert shifted == pytest.approx(model + 1) and score.value == pytest.approx(digits + 0.25 * shifted + 0.5 * model)
    done = run.train("--fault", "pod:before:commit_scores:2,trainer_worker:after:inference:3")
    while done.returncode == -9:
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.left_behind() == []
