"""A generative judge: its message, its score, and judges that are busy, wrong or gone. ``tests/serving/test_serving_judge.py`` asks a real server."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reward_server import Answer, RewardServer

from tandem.config.judge_model import JudgeModelConfig
from tandem.config.load import build
from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.judge_model import NoScore, request_of, score_of, text_of_reply
from tandem.rl.rewards.judgement import Item
from tandem.rl.rewards.pool import RewardPool, check_fault_share
from tandem.types import FinishReason, Prompt, RunError, Sample, Score, ScoreState, UserError, WeightVersion

FAULT = ScoreState.INFRASTRUCTURE_FAULT


@pytest.fixture
def serve() -> Iterator[Callable[[Answer], RewardServer]]:
    servers: list[RewardServer] = []

    def started(answer: Answer) -> RewardServer:
        servers.append(RewardServer(answer))
        return servers[-1]

    yield started
    for server in servers:
        server.close()


def reply(text: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def config(server: RewardServer, **settings: Any) -> RewardsConfig:
    judge = {"url": server.address, "model": "m", **settings.pop("judge", {})}
    function = {"function": "judge", "judge": judge, "endpoint": settings.pop("endpoint", {"retries": 0})}
    return build(RewardsConfig, {"functions": [function], "deadline_s": 20, "sample_deadline_s": 5, "accuracy_threshold": 0.75, **settings})


def scored(rewards: RewardsConfig, *texts: str) -> list[Score]:
    at = WeightVersion(0, 0)
    samples = [Sample(f"0/p/{i}", "p", i, (1,), (2,), (0.0,), (0.0,), (at,), FinishReason.STOP, text) for i, text in enumerate(texts)]
    with RewardPool(rewards) as pool:
        return pool.score(samples, [Prompt("p", "What is 3 + 4?", (1,), "7", "dataset", {"level": "easy"})])


def test_the_message_has_prompt_completion_truth_and_columns_in_one_pass() -> None:
    item = Item("0/p/0", "Q {completion}", "A {prompt} {level}", (), "T", "t", {"level": 3, "other": 1})
    template = "{prompt}|{completion}|{ground_truth}|{level}|{unknown}|{minimum}-{maximum}|{}"
    settings = JudgeModelConfig("http://h/v1", "m", template, system="Be fair.", extra_body={"top_k": 1})
    body = request_of(item, settings)
    assert body["messages"] == [
        {"role": "system", "content": "Be fair."},
        {"role": "user", "content": "Q {completion}|A {prompt} {level}|T|3|{unknown}|0-10|{}"},
    ]
    assert (body["model"], body["temperature"], body["max_tokens"], body["top_k"]) == ("m", 0.0, 512, 1)
    assert body["seed"] == request_of(item, settings)["seed"] != request_of(item._replace(sample_id="0/p/1"), settings)["seed"]


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Right.\nScore: 10", 10.0), ("Score: 3 at first, then\n**Score:** 7.5", 7.5), ("score is 4/10", None),
        ("SCORE = 0", 0.0), ("The final score -> 8.", 8.0),
        ("ten of ten", None), ("", None), ("Score: 11", None), ("Score: -1", None),
    ],
)  # fmt: skip
def test_the_last_score_in_the_range_counts(text: str, score: float | None) -> None:
    settings = JudgeModelConfig("http://h/v1", "m")
    if score is None:
        with pytest.raises(NoScore):
            score_of(text, settings)
    else:
        assert score_of(text, settings) == score


@pytest.mark.parametrize("content", [b"", b"no", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"message": {"content": null}}]}', b"[" * 9999])
def test_an_answer_that_is_no_chat_completion_has_no_score(content: bytes) -> None:
    with pytest.raises(NoScore):
        text_of_reply(content)


def test_each_sample_is_scored_as_a_share_of_the_range_and_the_reply_is_kept(serve: Callable[[Answer], RewardServer]) -> None:
    server = serve(lambda body, _: reply(f"Hm.\nScore: {'9' if 'seven' in body['messages'][-1]['content'] else '1'}"))
    good, bad = scored(config(server, judge={"minimum": 1, "maximum": 9}), "seven", "eight")
    assert (good.value, good.correct, bad.value, bad.correct) == (1.0, True, 0.0, False)
    assert good.extra == {"judge/reply": "Hm. Score: 9"}
    assert server.paths == ["/v1/chat/completions"] * 2 and all("What is 3 + 4?" in str(body["messages"]) for body in server.bodies)


def test_a_busy_judge_is_asked_again_and_one_that_is_down_masks_the_sample(serve: Callable[[Answer], RewardServer]) -> None:
    busy = serve(lambda body, number: (503, "wait") if number == 1 else reply("Score: 10"))
    assert scored(config(busy, endpoint={"retries": 2}), "a")[0].value == 1.0
    down = serve(lambda body, _: (503, "gone"))
    rewards = config(down)
    scores = scored(rewards, "a", "b")
    assert [score.state for score in scores] == [FAULT, FAULT] and scores[0].value is None
    assert "on sample '0/p/0': the judge at" in scores[0].reason and 'answered 503: "gone" (after 1 attempt)' in scores[0].reason
    with pytest.raises(RunError, match="2 of 2 samples could not be judged"):
        check_fault_share(scores, rewards)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, "no model m"), "answered 404"), ((200, "hello"), "which is not a chat completion"), (reply("I like it."), "gave no score: 'I like it.'"),
        (reply("Score: 99"), "gave the score 99, which is not from 0 to 10"),
    ],
)  # fmt: skip
def test_a_judge_without_a_score_masks_its_sample_alone(serve: Callable[[Answer], RewardServer], answer: tuple[int, Any], reason: str) -> None:
    server = serve(lambda body, _: answer if "bad" in body["messages"][-1]["content"] else reply("Score: 5"))
    good, bad = scored(config(server), "good", "bad")
    assert (good.value, bad.state) == (0.5, FAULT) and reason in bad.reason


def test_a_judge_where_nothing_listens_is_refused_before_the_run(serve: Callable[[Answer], RewardServer]) -> None:
    server = serve(lambda body, _: reply("Score: 5"))
    server.close()
    with pytest.raises(UserError, match="reward function 'judge': nothing answers at 'http://127"):
        RewardPool(config(server))


@pytest.mark.parametrize(
    ("judge", "problem"),
    [
        ({"url": ""}, "section 'judge' of a reward function needs 'url'"), ({"model": ""}, "needs 'model'"), ({"url": "localhost:8000"}, "is not an address"),
        ({"url": "http://user:pa55@h/v1"}, "has a password"), ({"pattern": "("}, "not a valid regular expression"),
        ({"pattern": "score"}, "which has 0 groups; it needs one"),
        ({"template": "{prompt}"}, "has no {completion}"), ({"minimum": 3, "maximum": 3}, "the second must be larger"), ({"temperature": 3}, "from 0 to 2"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused(judge: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as refused:
        build(RewardsConfig, {"functions": [{"function": "judge", "judge": {"url": "http://h/v1", "model": "m", **judge}}]})
    assert problem in str(refused.value) and "\n" not in str(refused.value) and "pa55" not in str(refused.value)
