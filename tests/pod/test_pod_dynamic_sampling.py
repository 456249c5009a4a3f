"""Dynamic sampling in a pod: all rounds are journalled, nothing is drawn or scored twice, and a killed run is the same bit for bit."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from pod_runs import HERE, RECIPE, PodRun, difference, finish
from reward_models import write_reward_model

from tandem.config.recipe import load_config
from tandem.jobs.prepare import read_recipe
from tandem.jobs.replay.replay_rl import replay_rl_step
from tandem.jobs.start import train
from tandem.runtime.callback import Callback
from tandem.runtime.records.journal import Journal
from tandem.types import Round

EVEN = '''
import os


def even(completions, **_):
    """Returns whether each completion has an even number of digits, and notes how many were judged."""
    with open(os.environ.get("JUDGED", os.devnull), "a") as file:
        file.write(f"{len(completions)}\\n")
    return [float(sum(character.isdigit() for character in text) % 2 == 0) for text in completions]
'''


def recipe(folder: Path) -> Path:
    """Writes the tiny recipe with dynamic sampling and a reward of 0 or 1, many of whose groups are all right."""
    (folder / "even.py").write_text(EVEN)
    content = yaml.safe_load(RECIPE.read_text())
    content["rewards"] = {"functions": [{"function": f"{folder}/even.py:even"}]}
    content["algorithm"] |= {"filter_groups": {"max_num_gen_batches": 4}}
    content["sft"] |= {"steps": 40}
    path = folder / "filtered.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def expected_batch(rounds: Sequence[Round], wanted: int) -> list[str]:
    """Returns the prompts of the first ``wanted`` groups with two rewards, by the order of dispatch."""
    prompts = []
    for samples, scores in rounds:
        values = {score.sample_id: score.value for score in scores}
        groups = {sample.prompt_id: {values[other.id] for other in samples if other.prompt_id == sample.prompt_id} for sample in samples}
        prompts += [prompt for prompt, rewards in groups.items() if len(rewards) > 1]
    return prompts[:wanted]


@pytest.mark.full
def test_step_is_refilled_until_it_has_its_groups_and_is_replayed(tmp_path: Path) -> None:
    train(load_config(recipe(tmp_path), [f"--run.directory={tmp_path}", "--run.name=run", "--run.max_steps=4"]), inline=True, progress=False)
    run = tmp_path / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with Journal(run / "journal.sqlite", read_only=True) as journal:
        steps = [journal.rounds(step) for step in range(4)]
    assert [row["rollout/rounds"] for row in rows] == [len(rounds) for rounds in steps]
    drawn = [[sample.prompt_id for each in rounds for sample in each.samples[::4]] for rounds in steps]
    # Task sort counts its prompts up: each round goes on where the one before ended, over steps.
    assert [prompt for step in drawn for prompt in step] == [f"train-{i}" for i in range(sum(map(len, drawn)))]
    refilled = max(range(4), key=lambda step: len(steps[step]))
    assert len(steps[refilled]) > 1, "no step was refilled, so that this test says nothing"
    for row, rounds in zip(rows, steps, strict=True):
        assert len(rounds) == 4 or len(expected_batch(rounds, 4)) == 4 > len(expected_batch(rounds[:-1], 4))
        rewards = [score.value for each in rounds for score in each.scores]
        assert row["reward/mean"] == pytest.approx(sum(filter(None, rewards)) / len(rewards)), "the reward is that of all samples, dropped ones too"
        assert row["mismatch_kl"] == 0.0
    compared = replay_rl_step(read_recipe(run), run, refilled, ("rollout", "rewards", "train"), inline=True, callback=Callback(), say=lambda line: None)
    samples = 16 * len(steps[refilled])
    assert [(part.part, part.count) for part in compared[:2]] == [("rollout", samples), ("rewards", samples)]
    assert [part.differences for part in compared] == [(), (), ()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> PodRun:
    folder = tmp_path_factory.mktemp("filtered")
    run = PodRun(folder, recipe=recipe(folder))
    done = run.train()
    assert done.returncode == 0, done.stderr
    return run


def refilled_step(run: PodRun) -> int:
    """Returns the first step after the first with more than one round."""
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        return next(step for step in range(1, 6) if len(journal.rounds(step)) > 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        "pod:after:commit_scores:{step}", "pod:before:commit_samples_1:{step}", "pod:after:commit_samples_1:{step}", "pod:after:commit_scores_1:{step}",
        "rollout_worker:before:rollout:{step}", "trainer_worker:before:train:{step}", "pod:before:train:{step}",
    ],
)  # fmt: skip
def test_kill_between_rounds_and_nothing_in_the_journal_is_drawn_or_judged_twice(fault: str, undisturbed: PodRun, tmp_path: Path) -> None:
    judged = tmp_path / "judged"
    run = PodRun(tmp_path, recipe=recipe(tmp_path), environment={"JUDGED": str(judged)})
    fault = fault.format(step=refilled_step(undisturbed))
    done = run.train("--fault", fault)
    if fault.startswith("pod:"):
        assert done.returncode == -9, done.stdout + done.stderr
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, undisturbed) == [] and run.left_behind() == []
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal, Journal(undisturbed.directory / "journal.sqlite", read_only=True) as other:
        steps, theirs = [[journal_of.rounds(step) for step in range(6)] for journal_of in (journal, other)]
        evaluated = sum(result["count"] for _, _, result in journal.evaluations())
    ids = lambda rounds: [[(s.id, s.token_ids, s.logprobs) for s in each.samples] for each in rounds]
    assert [ids(rounds) for rounds in steps] == [ids(rounds) for rounds in theirs]
    assert [rounds_scores(rounds) for rounds in steps] == [rounds_scores(rounds) for rounds in theirs]
    samples = sum(len(each.samples) for rounds in steps for each in rounds)
    repeated = sum(map(int, judged.read_text().split())) - samples - evaluated
    # Rewards start as samples finish: those of a round that dies before its scores are journalled are computed again.
    again = len(steps[refilled_step(undisturbed)][1].samples) if "commit_samples_1" in fault else 0
    assert 0 <= repeated <= again, "a sample was judged twice, or not at all"


def rounds_scores(rounds: Sequence[Round]) -> list[list[float | None]]:
    return [[score.value for score in each.scores] for each in rounds]


@pytest.mark.full
def test_dynamic_sampling_gives_the_same_run_where_the_engine_is_terminated(undisturbed: PodRun, tmp_path: Path) -> None:
    run = PodRun(tmp_path, recipe=recipe(tmp_path))
    done = run.train("--residents.plan=terminate")
    assert done.returncode == 0, done.stderr
    assert difference(run, undisturbed) == []


@pytest.mark.full
def test_step_without_a_useful_group_changes_nothing_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "same.py").write_text("def same(completions, **_):\n    return [0.5] * len(completions)\n")
    run = PodRun(tmp_path, recipe=recipe(tmp_path))
    done = run.train(f"--rewards.functions=[{{function: '{tmp_path}/same.py:same'}}]", "--run.max_steps=2")
    assert done.returncode == 0, done.stderr
    for step, row in enumerate(run.rows()):
        assert f"step {step}: 0 of 4 groups have different rewards, after 4 rounds of rollout" in done.stdout
        assert row["rollout/rounds"] == 4.0 and row["rollout/dropped_share"] == 1.0 and row["actor/grad_norm"] == 0.0
    start, end = run.directory / "sft" / "model" / "model.safetensors", run.directory / "model" / "model.safetensors"
    assert start.read_bytes() == end.read_bytes(), "a step without a group must leave the weights as they are"


SURPRISE = """
def surprise(completions, reference_logprobs, reward_model_score, **columns):
    return [sum(logprobs) * score for logprobs, score in zip(reference_logprobs, reward_model_score, strict=True)]
"""


def scored_by_models(folder: Path) -> PodRun:
    """A run whose rewards need the reward model and the reference: hardly two of them are equal, so that every group is useful."""
    (folder / "surprise.py").write_text(SURPRISE)
    content = yaml.safe_load(RECIPE.read_text())
    surprise = {"function": f"{folder}/surprise.py:surprise", "needs": ["reference", "reward_model"], "weight": 0.01}
    content["rewards"] = {"functions": [{"function": f"{HERE}/rewards.py:digits"}, surprise]}
    content["reward_model"] = {"path": str(write_reward_model(folder / "reward")), "weight": 0.5}
    content["sft"] |= {"steps": 6}
    content["evaluation"] |= {"every_steps": 9}
    path = folder / "scored.yaml"
    path.write_text(yaml.safe_dump(content))
    return PodRun(folder, recipe=path)


IN_ROUNDS = ("--algorithm.filter_groups.gen_batch_size=2", "--algorithm.filter_groups.max_num_gen_batches=3")


def scored_rounds(run: PodRun, steps: int) -> list[list[tuple[object, ...]]]:
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        rounds = [journal.rounds(step) for step in range(steps)]
    return [[(score.sample_id, score.value, dict(score.components)) for each in step for score in each.scores] for step in rounds]


def assert_same_training(run: PodRun, other: PodRun) -> None:
    """Both have the same scores, rows (without what counts rounds) and model."""
    steps = len(other.rows())
    assert scored_rounds(run, steps) == scored_rounds(other, steps)
    assert [{key: value for key, value in row.items() if not key.startswith("rollout/")} for row in run.rows()] == [
        {key: value for key, value in row.items() if not key.startswith("rollout/")} for row in other.rows()
    ]
    model = Path("model") / "model.safetensors"
    assert (run.directory / model).read_bytes() == (other.directory / model).read_bytes()


@pytest.mark.full
def test_rounds_that_a_reward_model_scores_one_by_one_train_as_one_round_of_the_same_prompts(tmp_path: Path) -> None:
    """Samples depend on seed, step and prompt, so that two rounds of two prompts have those of one round of four."""
    whole, divided = scored_by_models(tmp_path), PodRun(tmp_path, tmp_path / "scored.yaml", name="divided")
    for run, more in ((whole, ()), (divided, IN_ROUNDS)):
        settings = [f"--run.directory={tmp_path}", f"--run.name={run.name}", "--run.max_steps=2", "--evaluation.final_prompts=4", *more]
        train(load_config(run.recipe, settings), inline=True, progress=False)
    assert [row["rollout/rounds"] for row in divided.rows()] == [2.0, 2.0]
    assert_same_training(divided, whole)


PLANS = ("sleep", "offload", "terminate")
FAULTS = (
    "pod:after:commit_scores:2", "pod:after:commit_samples_1:2", "rollout_worker:before:rollout:2", "trainer_worker:before:train:2",
    "trainer_worker:after:inference:2",
)  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("change", [*PLANS, *FAULTS])
def test_rounds_that_a_reward_model_scores_are_the_same_under_every_plan_and_after_a_kill(change: str, tmp_path: Path) -> None:
    quiet, run = scored_by_models(tmp_path), PodRun(tmp_path, tmp_path / "scored.yaml", name="changed")
    done = quiet.train("--run.max_steps=4", *IN_ROUNDS, "--inline")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run.train("--run.max_steps=4", *IN_ROUNDS, *((f"--residents.plan={change}",) if change in PLANS else ("--fault", change)))
    if change.startswith("pod:"):
        assert done.returncode == -9, done.stdout + done.stderr
        done = run.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert difference(run, quiet) == [] and run.events("residue") == [] and run.left_behind() == []
    again = finish(run.begin("replay", str(run.directory), "--step", "3"))
    assert again.returncode == 0 and "rewards: 16 of 16 equal" in again.stdout, again.stdout + again.stderr
