"""What TRL passes to a reward function, and what it does with None, logs and asynchronous functions. Source: TRL, "Using a custom reward function"."""

import asyncio
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tandem.config.rewards import RewardFunctionConfig, RewardsConfig
from tandem.jobs.checks.check_answers import check_columns
from tandem.rl.rewards.functions import call_trl
from tandem.rl.rewards.judgement import Item, Judgement, TrainerState, not_applicable, number
from tandem.rl.rewards.pool import RewardPool, check_fault_share
from tandem.rl.rewards.rule_based import compose
from tandem.rl.step_metrics import sample_metrics
from tandem.types import FinishReason, Prompt, Sample, Score, ScoreState, UserError, WeightVersion

SKY = ({"role": "user", "content": "What color is the sky?"},)


def item(completion: str, messages: Any = (), **columns: Any) -> Item:
    return Item("0/p0/0", "the text", completion, (), "blue", "dataset", columns, messages)


def judged(*arguments: Any) -> list[Judgement]:
    result = call_trl(*arguments)
    assert isinstance(result, list)
    return result


def test_a_prompt_of_messages_reaches_the_function_as_trls_conversational_form() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        seen.extend([prompts, completions])
        return [float(completion[0]["content"] == "blue") for completion in completions]

    assert [j.value for j in judged(reward, [item("blue", SKY), item("green", SKY)], {})] == [1.0, 0.0]
    assert seen == [[list(SKY)] * 2, [[{"role": "assistant", "content": text}] for text in ("blue", "green")]]


def test_the_trainers_state_has_the_step_under_transformers_names() -> None:
    def reward(completions: Any, trainer_state: Any, **kwargs: Any) -> list[float]:
        return [trainer_state.global_step / trainer_state.max_steps + trainer_state.epoch for _ in completions]

    assert judged(reward, [item("a")], {}, TrainerState(3, 12, 0.5))[0].value == 0.75


def test_what_a_function_logs_is_kept_with_the_samples() -> None:
    def reward(completions: Any, log_extra: Any = None, log_metric: Any = None, **kwargs: Any) -> list[float | None]:
        log_extra("parsed", [text.upper() for text in completions])
        log_extra("object", [{1, 2}, 3])
        log_metric("share", 0.25)
        return [1.0, None]

    first, second = judged(reward, [item("a"), item("b")], {})
    assert (first.details, first.extra) == ({"share": 0.25}, {"parsed": "A", "object": "{1, 2}"})
    assert (second.value, second.state, second.extra) == (None, ScoreState.NOT_APPLICABLE, {"parsed": "B", "object": 3})
    config = RewardsConfig(functions=(RewardFunctionConfig("a:f"),))
    score = compose("s", {"f": first}, config)
    assert (score.components, score.extra) == ({"f": 1.0, "f/share": 0.25}, {"parsed": "A", "object": "{1, 2}"})
    with pytest.raises(ValueError, match=r"log_extra\('x', ...\) has 1 values for 2 samples"):
        call_trl(lambda completions, log_extra: log_extra("x", [1]), [item("a"), item("b")], {})


def test_none_leaves_a_function_out_of_the_weighted_sum_as_nansum_does() -> None:
    functions = tuple(RewardFunctionConfig(f"a:{name}", weight=weight) for name, weight in (("f", 1.0), ("g", 0.5), ("h", 2.0)))
    config = RewardsConfig(functions=functions, accuracy="g")
    rows = [(1.0, 2.0, 3.0), (None, 2.0, 3.0), (1.0, None, None), (None, None, None)]
    scores = [compose("s", {n: not_applicable() if v is None else number(v) for n, v in zip("fgh", row, strict=True)}, config) for row in rows]
    torch = pytest.importorskip("torch")
    per_function = torch.tensor([[float("nan") if value is None else value for value in row] for row in rows])
    summed = (per_function * torch.tensor([1.0, 0.5, 2.0])).nansum(dim=1).tolist()
    assert [score.value for score in scores] == [*summed[:3], None]
    assert [score.state for score in scores] == [ScoreState.NUMBER] * 3 + [ScoreState.NOT_APPLICABLE]
    assert [score.correct for score in scores] == [True, True, None, None]
    check_fault_share(scores, RewardsConfig(functions=functions, accuracy="g", max_fault_share=0.0))
    samples = [Sample(f"{i}", "p", i, (1,), (2,), (0.0,), (0.0,), (WeightVersion(0, 0),), FinishReason.STOP, "") for i in range(4)]
    row = sample_metrics(samples, scores)
    means = torch.nanmean(per_function, dim=0).tolist()
    assert [row[f"reward/{name}"] for name in "fgh"] == pytest.approx(means)
    assert row["reward/mean"] == pytest.approx(sum(summed[:3]) / 3) and row["reward/fault_share"] == 0 and row["reward/not_applicable_share"] == 0.25


SLOW = """
import asyncio
import collections
import sys
client = []

async def meet(who, number):
    present = sys.__dict__.setdefault("present", collections.Counter())
    present[who] += 1
    while present[who] < number:
        await asyncio.sleep(0.01)

async def first(completions, **kwargs):
    await meet("functions", 2)
    # A client that is kept belongs to the loop of the first call.
    client.append(asyncio.get_running_loop())
    assert client[0] is client[-1]
    return [1.0] * len(completions)

async def second(completions, **kwargs):
    await meet("functions", 2)
    if "bad" in completions:
        raise ValueError("no")
    return [2.0] * len(completions)

class Length:
    def __call__(self, completions, **kwargs):
        return [float(len(text)) for text in completions]

length = Length()

async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await meet("samples", 8)
    return {"score": 3.0, "acc": True}

def own_loop(completions):
    return [asyncio.run(asyncio.sleep(0, 4.0)) for _ in completions]
"""


def scores_of(pool: RewardPool, *texts: str) -> list[Score]:
    samples = [Sample(f"0/p{i}/0", f"p{i}", 0, (1,), (2,), (0.0,), (0.0,), (WeightVersion(0, 0),), FinishReason.STOP, t) for i, t in enumerate(texts)]
    return pool.score(samples, [Prompt(f"p{i}", "?", (1,), "1", "dataset") for i in range(len(texts))])


def test_asynchronous_functions_are_awaited_together_and_one_that_fails_costs_its_own_samples_alone(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(textwrap.dedent(SLOW))
    names = ("first", "length", "second", "compute_score", "own_loop")
    functions = tuple(RewardFunctionConfig(f"{tmp_path}/f.py:{name}") for name in names)
    with RewardPool(RewardsConfig(functions=functions, deadline_s=30.0, sample_deadline_s=5.0)) as pool:
        # One after the other they would wait for each other in vain.
        scores = scores_of(pool, *["abc"] * 8)
        assert all(score.components == {"first": 1.0, "length": 3.0, "second": 2.0, "compute_score": 3.0, "own_loop": 4.0} for score in scores)
        good, bad = scores_of(pool, "ab", "bad")
        assert good.value == 12.0 and bad.state is ScoreState.INFRASTRUCTURE_FAULT
        assert "reward function 'second' on sample '0/p1/0': it raised ValueError: no" in bad.reason


def test_trls_own_reward_functions_work_as_they_are(tmp_path: Path) -> None:
    """The signature and the body of TRL's ``think_format_reward`` and of the examples of its documentation, on conversational completions."""
    def format_reward_func(completions: Any, **kwargs: Any) -> list[float]:
        contents = [completion[0]["content"] for completion in completions]
        return [1.0 if content.startswith("<think>") and content.endswith("</answer>") else 0.0 for content in contents]

    def reward_len(completions: Any, **kwargs: Any) -> list[int]:
        return [-abs(20 - len(completion)) for completion in completions]

    async def async_reward_func(prompts: Any, completions: Any, **kwargs: Any) -> list[float]:
        await asyncio.sleep(0.01)
        return [1.0] * len(prompts)

    def math_reward_func(prompts: Any, completions: Any, task: Any, **kwargs: Any) -> list[float | None]:
        return [1.0 if kind == "math" else None for kind in task]

    talk = [item("<think>a</think><answer>b</answer>", SKY)]
    assert judged(format_reward_func, talk, {})[0].value == 1.0
    assert judged(reward_len, [item("x" * 15)], {})[0].value == -5.0
    assert [j.value for j in judged(math_reward_func, [item("a", task="math"), item("b", task="code")], {})] == [1.0, None]
    result = call_trl(async_reward_func, talk, {})

    async def wait() -> list[Judgement]:
        return list(await result)  # type: ignore[misc]

    assert asyncio.run(wait())[0].value == 1.0


def test_the_columns_that_a_function_cannot_do_without_are_told_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def a(prompts, completions, answer, *, level, tone='calm', trainer_state=None, **kwargs): ...\n"
        "def b(completions, width, ground_truth): ...\n"
        "def compute_score(data_source, solution_str, ground_truth): ...\n"
    )
    functions = (RewardFunctionConfig(f"{tmp_path}/f.py:a"), RewardFunctionConfig(f"{tmp_path}/f.py:b", arguments={"width": 3}))
    with RewardPool(RewardsConfig(functions=(*functions, RewardFunctionConfig(f"{tmp_path}/f.py:compute_score"), RewardFunctionConfig("math")))) as pool:
        assert pool.columns == {"a": ["answer", "level"], "b": [], "compute_score": [], "math": []}
        check_columns({"answer": 1, "level": 2}, pool.columns)
        with pytest.raises(UserError, match=r"reward function 'a' has the parameter 'answer', .*\(did you mean 'answers'\?\); rename it"):
            check_columns({"answers": 1, "level": 2}, pool.columns)
