"""A reward behind HTTP: a server in the form of OpenRLHF's, one that is busy, slow, wrong or gone."""

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reward_server import Answer
from reward_server import RewardServer as Server

from tandem.config.load import build
from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.endpoint import endpoint_judge
from tandem.rl.rewards.judgement import Item, JudgeCall, Judgement, TrainerState, infrastructure_fault
from tandem.rl.rewards.pool import RewardPool
from tandem.rl.rewards.rule_based import compose
from tandem.types import FinishReason, Prompt, Sample, Score, ScoreState, UserError, WeightVersion


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], Server]]:
    servers: list[Server] = []

    def started(answer: Answer) -> Server:
        servers.append(Server(answer))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def config(server: Server, **settings: Any) -> RewardsConfig:
    endpoint = settings.pop("endpoint", {})
    return build(RewardsConfig, {"functions": [{"function": server.url, "endpoint": endpoint}], "deadline_s": 20, "sample_deadline_s": 10, **settings})


def score(rewards: RewardsConfig, *texts: str, limit_s: float = 10.0) -> list[Score]:
    """Scores in this process, which is faster than in a worker's."""
    items = [Item(f"0/p{i}/0", f"q{i}", text, (), f"truth {i}", "dataset", {"level": i}) for i, text in enumerate(texts)]
    (function,) = rewards.functions

    async def judged() -> list[Judgement]:
        return list(await endpoint_judge(function).judge(items, JudgeCall(TrainerState(7, 9), limit_s)))  # type: ignore[misc]

    try:
        judgements = asyncio.run(judged())
    except ValueError as error:
        judgements = [infrastructure_fault(str(error))] * len(items)
    return [compose(item.sample_id, {function.label: judgement}, rewards) for item, judgement in zip(items, judgements, strict=True)]


def score_in_workers(rewards: RewardsConfig, *texts: str) -> list[Score]:
    samples = [Sample(f"0/p{i}/0", f"p{i}", 0, (1,), (2,), (0.0,), (0.0,), (WeightVersion(0, 0),), FinishReason.STOP, t) for i, t in enumerate(texts)]
    prompts = [Prompt(f"p{i}", f"q{i}", (1,), f"truth {i}", "dataset", {"level": i}) for i in range(len(texts))]
    with RewardPool(rewards) as pool:
        return pool.score(samples, prompts, TrainerState(7, 9))


def lengths(body: dict[str, Any], number: int) -> tuple[int, Any]:
    """As ``openrlhf.cli.serve_rm`` answers."""
    rewards = [float(len(text)) for text in body["query"]]
    return 200, {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}


def test_openrlhfs_server_is_asked_and_read_in_its_own_form(serve: Callable[[Answer], Server]) -> None:
    server = serve(lengths)
    first, second = score_in_workers(config(server), "a", "bbb")
    assert (first.value, second.value) == (3.0, 5.0) and first.components == {"get_reward": 3.0, "get_reward/dummy_scores": 3.0}
    assert server.bodies == [
        {
            "query": ["q0a", "q1bbb"], "prompts": ["q0", "q1"], "labels": ["truth 0", "truth 1"], "completions": ["a", "bbb"],
            "columns": [{"level": 0}, {"level": 1}], "step": 7,
        }
    ]  # fmt: skip


@pytest.mark.parametrize("body", [{"rewards": [[0.5], [None]]}, {"scores": [0.5, None]}, [0.5, None], [{"rewards": [0.5, None]}]])
def test_other_forms_of_the_same_answer_are_read_and_null_does_not_apply(serve: Callable[[Answer], Server], body: Any) -> None:
    first, second = score(config(serve(lambda request, number: (200, body))), "a", "b")
    assert first.value == 0.5 and second.state is ScoreState.NOT_APPLICABLE


def test_a_server_that_is_busy_is_asked_again_and_batches_are_sent_at_once(serve: Callable[[Answer], Server]) -> None:
    two, asked = threading.Barrier(2), itertools.count(1)

    def busy(body: dict[str, Any], number: int) -> tuple[int, Any]:
        two.wait(30)  # A request alone would have no answer.
        return lengths(body, number) if next(asked) > 2 else (503, b"loading")

    server = serve(busy)
    scores = score(config(server, endpoint={"batch_size": 1}), *["a"] * 6)
    assert [each.value for each in scores] == [3.0] * 6 and len(server.bodies) == 8


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (lambda body, number: (503, b"loading the model"), "answered 503: loading the model (after 2 attempts)"),
        (lambda body, number: (200, {"rewards": [1.0] * (len(body["query"]) + 1)}), "it answered 2 rewards for 1 samples"),
        (lambda body, number: (200, b"<html>"), "which is not JSON"),
        (lambda body, number: (200, {"reward": 1.0}), "without 'rewards' for 1 samples"),
        (lambda body, number: (200, {"rewards": ["good"] * len(body["query"])}), "str 'good' instead of a number"),
        (lambda body, number: (422, b"no field 'query'"), "it answered 422: no field 'query'"),
        (lambda body, number: time.sleep(3) or (200, []), "does not answer: timed out (after 2 attempts)"),
    ],
)  # fmt: skip
def test_a_fault_of_the_server_masks_samples_and_says_why(serve: Callable[[Answer], Server], answer: Answer, problem: str) -> None:
    server = serve(answer)
    (only,) = score(config(server, endpoint={"retries": 1, "timeout_s": 0.5}), "a")
    assert only.state is ScoreState.INFRASTRUCTURE_FAULT and problem in only.reason and "\n" not in only.reason


def test_a_server_that_never_answers_ends_within_the_batchs_deadline_without_a_request_for_each_sample(serve: Callable[[Answer], Server]) -> None:
    ended, answered = threading.Event(), []

    def never(body: dict[str, Any], number: int) -> tuple[int, Any]:
        ended.wait(120)
        answered.append(number)
        return 200, []

    server = serve(never)
    scores = score_in_workers(config(server, deadline_s=2, sample_deadline_s=1), *["a"] * 50)
    assert not answered and len(server.bodies) < 5
    ended.set()
    assert all(each.state is ScoreState.INFRASTRUCTURE_FAULT and "does not answer" in each.reason for each in scores)


def test_a_token_comes_from_the_environment_and_its_variable_must_be_set(serve: Callable[[Answer], Server], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve(lengths)
    rewards = config(server, endpoint={"token_variable": "REWARD_TOKEN_OF_A_TEST"})
    with pytest.raises(UserError, match="environment variable REWARD_TOKEN_OF_A_TEST, which is not set"):
        score(rewards, "a")
    monkeypatch.setenv("REWARD_TOKEN_OF_A_TEST", "abc")
    assert score(rewards, "a")[0].value == 3.0
    assert server.headers[0]["Authorization"] == "Bearer abc"


def test_an_address_at_which_nothing_answers_is_told_before_the_run(serve: Callable[[Answer], Server]) -> None:
    server = serve(lengths)
    server.close()
    with pytest.raises(UserError, match=r"reward function 'get_reward': nothing answers at 'http://127.0.0.1:\d+/get_reward' \(Connection refused\); start it"):
        RewardPool(config(server))


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ({"function": "http://"}, "is not an address; write http://host:port/path"),
        ({"function": "http://host:port/x"}, "is not an address"),
        ({"function": "http://user:secret@host/x"}, "has a password or a signature in its address"),
        ({"function": "http://host/x", "arguments": {"a": 1}}, "and 'x' is an endpoint; remove them"),
        ({"function": "a:f", "endpoint": {"retries": 1}}, "has a section 'endpoint', which belongs to an address"),
        ({"function": "http://host/x", "endpoint": {"retries": -1}}, "'endpoint.retries' of a reward function is -1"),
        ({"function": "http://host/x", "endpoint": {"timeout_s": 0}}, "timeout_s"),
        ({"function": "http://host/x", "endpoint": {"token_variable": "Bearer abc"}}, "write the name, never the token"),
    ],
)
def test_a_wrong_address_or_setting_is_one_line_without_the_secret(function: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as caught:
        build(RewardsConfig, {"functions": [function]}, "rewards")
    assert problem in str(caught.value) and "secret" not in str(caught.value)
