"""Samples that are judged as they finish."""

import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tandem.config.rewards import RewardFunctionConfig, RewardsConfig
from tandem.rl.rewards.judgement import TrainerState
from tandem.rl.rewards.judging import Judging, RewardTime, Stage, stages_of
from tandem.rl.rewards.pool import RewardPool
from tandem.types import FinishReason, Prompt, Sample, ScoreState, UserError, WeightVersion

FUNCTIONS = """
import os

def written(name, what):
    with open(os.path.join(os.path.dirname(__file__), name), "a") as file:
        file.write(what + "\\n")

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise ValueError("no")
    written("samples", solution_str)
    return float(len(solution_str))

def group(completions, **columns):
    written("groups", " ".join(completions))
    return [float(len(text)) - sum(map(len, completions)) / len(completions) for text in completions]

async def batch(completions, **columns):
    written("batches", " ".join(completions))
    return [float(len(completions)) for _ in completions]
"""
PROMPTS = [Prompt(f"p{i}", "?", (1,), "1", "dataset") for i in range(3)]


def sample(prompt: int, index: int, text: str) -> Sample:
    at = (WeightVersion(0, 0),) * len(text)
    numbers = tuple(map(float, range(len(text))))
    return Sample(f"0/p{prompt}/{index}", f"p{prompt}", index, (1,), tuple(map(ord, text)), numbers, numbers, at, FinishReason.STOP, text)


STEP = [sample(prompt, index, "x" * (1 + 4 * prompt + index)) for prompt in range(3) for index in range(4)]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., RewardsConfig]:
    (tmp_path / "f.py").write_text(textwrap.dedent(FUNCTIONS))

    def made(*functions: str, **settings: int) -> RewardsConfig:
        pairs = [name.partition(" ") for name in functions]
        return RewardsConfig(functions=tuple(RewardFunctionConfig(f"{tmp_path}/f.py:{name}", scope=scope or "auto") for name, _, scope in pairs), **settings)  # type: ignore[arg-type]

    return made


def lines(path: Path, count: int) -> list[str]:
    """Returns the lines of ``path`` once it has ``count``."""
    ends = time.monotonic() + 20
    while time.monotonic() < ends:
        found = path.read_text().splitlines() if path.exists() else []
        if len(found) >= count:
            return found
        time.sleep(0.005)
    raise AssertionError(f"'{path.name}' has {found}")


def test_each_function_runs_as_soon_as_what_it_sees_is_finished(config: Callable[..., RewardsConfig], tmp_path: Path) -> None:
    with RewardPool(config("compute_score", "group", "batch batch")) as pool:
        judging = pool.open(PROMPTS, group_size=4)
        judging.add([STEP[2]])
        assert lines(tmp_path / "samples", 1) == ["xxx"]
        judging.add([STEP[0]])
        judging.add([STEP[1]])
        assert sorted(lines(tmp_path / "samples", 3)) == ["x", "xx", "xxx"]
        assert not (tmp_path / "groups").exists(), "a group is judged once it is complete"
        judging.add([STEP[3]])
        assert lines(tmp_path / "groups", 1) == ["x xx xxx xxxx"], "in the order of the samples, whichever finished first"
        judging.add(STEP[4:])
        lines(tmp_path / "groups", 3)
        assert not (tmp_path / "batches").exists(), "a batch is judged once the step is complete"
        judging.complete(STEP)
        scores = judging.result()
    assert lines(tmp_path / "batches", 1) == [" ".join(one.text for one in STEP)]
    assert len(lines(tmp_path / "samples", 12)) == 12 and len(lines(tmp_path / "groups", 3)) == 3, "nothing is judged twice"
    means = {prompt: 1 + 4 * prompt + 1.5 for prompt in range(3)}
    for one, score in zip(STEP, scores, strict=True):
        length = float(len(one.text))
        assert score.components == {"compute_score": length, "group": length - means[int(one.prompt_id[1:])], "batch": 12.0}
        assert list(score.components) == ["compute_score", "group", "batch"] and score.value == sum(score.components.values())


@pytest.mark.parametrize("workers", [1, 3])
def test_scores_do_not_depend_on_when_samples_finish(config: Callable[..., RewardsConfig], workers: int) -> None:
    with RewardPool(config("compute_score", "group", "batch", workers=workers)) as pool:
        at_once = pool.score(STEP, PROMPTS)
        for seed in range(3):
            shuffled = Random(seed).sample(STEP, len(STEP))
            judging = pool.open(PROMPTS, TrainerState(3, 9), group_size=4)
            while shuffled:
                judging.add([shuffled.pop() for _ in range(min(len(shuffled), seed + 1))])
            judging.complete(STEP)
            assert judging.result() == at_once


def test_what_the_step_has_in_the_end_is_scored(config: Callable[..., RewardsConfig], tmp_path: Path) -> None:
    """A sample that was drawn again has the score of the new one; samples that were dropped are in no group; one that came late is judged."""
    again = [sample(0, 0, "yyyyyyy"), *STEP[1:3], *STEP[4:8]]
    with RewardPool(config("compute_score", "group")) as pool:
        judging = pool.open(PROMPTS)
        judging.add([STEP[0], STEP[2], STEP[3], *STEP[8:]])
        lines(tmp_path / "samples", 7)
        judging.complete(again)
        assert judging.result() == pool.score(again, PROMPTS)


def test_a_sample_that_one_function_fails_on_is_in_no_later_call(config: Callable[..., RewardsConfig], tmp_path: Path) -> None:
    samples = [sample(0, 0, "a"), sample(0, 1, "raise"), sample(0, 2, "ccc")]
    with RewardPool(config("compute_score", "group")) as pool:
        judging = pool.open(PROMPTS, group_size=3)
        judging.add(samples)
        judging.complete(samples)
        first, bad, last = judging.result()
    assert bad.state is ScoreState.INFRASTRUCTURE_FAULT and "on sample '0/p0/1': it raised ValueError: no" in bad.reason
    assert (first.components["group"], last.components["group"]) == (-1.0, 1.0), "the mean of the group is that of the two samples with a score"
    assert lines(tmp_path / "groups", 1) == ["a ccc"]


def test_the_time_of_a_call_is_hidden_up_to_where_the_run_waits_for_rewards() -> None:
    config = RewardsConfig(functions=(RewardFunctionConfig("math"), RewardFunctionConfig("gsm8k")))
    judging = Judging(config, stages_of(["sample", "sample"], [False, False]), lambda units: None, {}, TrainerState())
    judging._waits.append((10.0, 14.0))
    for judges, began, ended in (([0], 1.0, 3.0), ([0], 9.0, 11.5), ([0, 1], 12.0, 14.0)):
        judging.record_call(judges, began, ended)
    assert judging.times() == {"math": RewardTime(6.5, 3.0, 3.5), "gsm8k": RewardTime(2.0, 0.0, 2.0)}


def test_functions_are_called_in_the_order_of_what_they_see() -> None:
    assert stages_of(["batch", "sample", "group", "sample"], [False, False, False, True]) == [
        Stage("sample", False, (1,)), Stage("group", False, (2,)), Stage("batch", False, (0,)), Stage("sample", True, (3,)),
    ]  # fmt: skip


def test_a_function_of_verls_signature_has_no_other_scope(config: Callable[..., RewardsConfig]) -> None:
    with pytest.raises(UserError, match="'scope' of reward function 'compute_score' is batch, and verl's signature takes one sample; remove it"):
        RewardPool(config("compute_score batch"))


def test_a_judgement_that_is_given_up_leaves_the_workers_to_the_next(config: Callable[..., RewardsConfig]) -> None:
    with RewardPool(config("compute_score")) as pool:
        left = pool.open(PROMPTS, group_size=4)
        left.add(STEP)
        left.fail(RuntimeError("the rollout is repeated"))
        assert [score.value for score in pool.score(STEP[:2], PROMPTS)] == [1.0, 2.0]
        assert pool._open == set()


NEEDS = """
def likely(data_source, solution_str, ground_truth, reference_logprobs):
    return sum(reference_logprobs)

def best(completions, reward_model_score, **columns):
    return [float(score == max(reward_model_score)) for score in reward_model_score]
"""
COLUMNS = {"reference_logprobs": [[-0.5] * len(one.text) for one in STEP], "reward_model_score": [float(i % 5) for i in range(len(STEP))]}


def needing(folder: Path) -> RewardsConfig:
    (folder / "f.py").write_text(textwrap.dedent(FUNCTIONS) + NEEDS)
    functions = (
        RewardFunctionConfig(f"{folder}/f.py:likely", signature="verl", needs=("reference",)), RewardFunctionConfig(f"{folder}/f.py:compute_score"),
        RewardFunctionConfig(f"{folder}/f.py:best", needs=("reward_model",)),
    )  # fmt: skip
    return RewardsConfig(functions=functions, accuracy="compute_score")


def test_a_function_that_needs_a_models_output_runs_after_the_inference_phase(tmp_path: Path) -> None:
    with RewardPool(needing(tmp_path)) as pool:
        judging = pool.open(PROMPTS, group_size=4, has_inference=True)
        judging.add(STEP)
        judging.complete(STEP)
        lines(tmp_path / "samples", 12)
        assert not judging.future.done()
        judging.add_inferred(COLUMNS)
        scores = judging.result()
    for place, (one, score) in enumerate(zip(STEP, scores, strict=True)):
        group = COLUMNS["reward_model_score"][4 * (place // 4) : 4 * (place // 4) + 4]
        length = float(len(one.text))
        assert score.components == {"likely": -0.5 * length, "compute_score": length, "best": float(place % 5 == max(group))}


def test_without_an_inference_phase_such_a_function_does_not_apply(tmp_path: Path) -> None:
    with RewardPool(needing(tmp_path)) as pool:
        scores = pool.score(STEP, PROMPTS)
        assert [score.components for score in scores] == [{"compute_score": float(len(one.text))} for one in STEP]
        assert scores != pool.score(STEP, PROMPTS, inferred=COLUMNS)
        assert pool.columns == {"likely": [], "compute_score": [], "best": []}
