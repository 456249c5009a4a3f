"""A generative judge behind the real server."""

from typing import Any

import pytest
from server_process import Server

from tandem.config.load import build
from tandem.config.rewards import RewardsConfig
from tandem.rl.rewards.pool import RewardPool
from tandem.types import FinishReason, Prompt, Sample, Score, ScoreState, WeightVersion


def scored(server: Server, **judge: Any) -> list[Score]:
    section = {"url": f"{server.url}/v1", "model": "tiny", "max_tokens": 12, "template": "{prompt} {completion}", **judge}
    rewards = build(RewardsConfig, {"functions": [{"function": "judge", "judge": section, "endpoint": {"retries": 0}}], "sample_deadline_s": 60})
    at = WeightVersion(0, 0)
    samples = [Sample(f"0/p/{i}", "p", i, (1,), (2,), (0.0,), (0.0,), (at,), FinishReason.STOP, text) for i, text in enumerate(("one", "two", "three"))]
    with RewardPool(rewards) as pool:
        return pool.score(samples, [Prompt("p", "Count:", (1,), "1", "dataset")])


def test_a_model_behind_tandem_serve_judges_completions(shared: Server) -> None:
    pytest.importorskip("llguidance", reason="llguidance is not installed, so judges with a forced form of reply are not tested")
    scores = scored(shared, extra_body={"structured_outputs": {"regex": "Score: [0-9]"}})
    for score in scores:
        assert score.state is ScoreState.NUMBER and score.extra["judge/reply"].startswith("Score: ")
        assert score.value == int(score.extra["judge/reply"][-1]) / 10
    assert scored(shared, extra_body={"structured_outputs": {"regex": "Score: [0-9]"}}) == scores, "at temperature 0 it says the same again"


def test_what_the_server_refuses_and_replies_without_a_score_are_infrastructure_faults(shared: Server) -> None:
    unknown = scored(shared, model="no-such-model")
    assert all(score.state is ScoreState.INFRASTRUCTURE_FAULT and "answered 404" in score.reason and "no-such-model" in score.reason for score in unknown)
    silent = scored(shared)
    assert all(score.state is ScoreState.INFRASTRUCTURE_FAULT and "gave no score" in score.reason for score in silent)
