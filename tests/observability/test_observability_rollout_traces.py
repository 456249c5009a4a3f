"""Episodes with tools and episodes of an agent are in the trace of their step, with each request of the model, as a real OTLP receiver gets it."""

from collections import Counter
from pathlib import Path

import pytest
from otlp_receiver import HttpReceiver, Received

from tandem.config.recipe import load_config
from tandem.jobs.start import train
from tandem.runtime.traces.steps import trace_of_step

RECIPES = Path(__file__).resolve().parents[1] / "pod"
EPISODES = 16
"""Of a step: four prompts, four episodes each."""


def traces_of(folder: Path, recipe: str) -> tuple[list[Received], list[Received]]:
    """Trains two steps of ``recipe``, of which ``run.trace_steps`` has the second, and returns the spans of the first and of the second."""
    with HttpReceiver() as receiver:
        flags = [f"run.directory={folder}", "run.name=r", "run.max_steps=2", "run.trace_steps=[1]", f"traces.endpoint={receiver.endpoint}"]
        train(load_config(RECIPES / recipe, flags), progress=False)
    by_id = receiver.traces()
    first, second = (by_id[trace_of_step(folder / "r", step).trace_id] for step in (0, 1))
    return first, second


def below(spans: list[Received], parent: Received) -> list[Received]:
    return [span for span in spans if span.parent_id == parent.span_id]


@pytest.mark.full
def test_the_turns_and_the_tools_of_an_episode_are_in_the_trace_of_a_step_whose_parts_are_traced(tmp_path: Path) -> None:
    untraced, spans = traces_of(tmp_path, "calculator.yaml")
    # Of the other steps, the first episode and the first request, and 1 % of the others.
    of_step = Counter(span.name for span in untraced)
    assert 1 <= of_step["invoke_agent"] < EPISODES and of_step["llm_request"] >= 1 and of_step["judge"] >= 1, of_step
    assert {span.parent_id for span in untraced if span.name == "queue"} <= {span.span_id for span in untraced if span.name == "llm_request"}
    known = {span.span_id: span for span in spans}
    episodes = [span for span in spans if span.name == "invoke_agent"]
    assert len(episodes) == EPISODES == len({span.attributes["tandem.sample"] for span in episodes})
    [rollout] = {known[span.parent_id].span_id for span in episodes}
    assert known[rollout].name == "rollout" and known[rollout].resource["service.name"] == "tandem-rollout-worker"
    # The first turns of a group are one request; each further turn follows the tools of the one before.
    assert [span.attributes["gen_ai.usage.num_sequences"] for span in below(spans, known[rollout]) if span.name == "llm_request"] == [4] * 4
    called = 0
    for episode in episodes:
        inside = below(spans, episode)
        turns = [span for span in inside if span.name == "llm_request"]
        tools = [span for span in inside if span.name == "execute_tool calculator"]
        assert len(turns) == episode.attributes["tandem.turns"] - 1 and len(inside) == len(turns) + len(tools)
        for tool in tools:
            assert tool.attributes["gen_ai.operation.name"] == "execute_tool" and tool.attributes["gen_ai.tool.name"] == "calculator" and tool.status == 0
            [call] = below(spans, tool)
            assert (call.name, call.kind, call.resource["service.name"]) == ("run", 2, "tandem-tool-worker")
        for turn in turns:
            assert {span.name for span in below(spans, turn)} >= {"queue", "prefill", "decode"}
            assert turn.resource["service.name"] == "tandem-rollout-worker" and episode.start_ns <= turn.start_ns <= turn.end_ns <= episode.end_ns + 10**8
        called += len(tools)
    assert called, "no episode calls the tool, so that this test says nothing"


@pytest.mark.full
def test_the_calls_of_an_agent_are_below_its_episode_in_the_trace_of_the_step(tmp_path: Path) -> None:
    _, spans = traces_of(tmp_path, "agent.yaml")
    known = {span.span_id: span for span in spans}
    episodes = [span for span in spans if span.name == "invoke_agent"]
    assert len(episodes) == EPISODES == len({span.attributes["tandem.sample"] for span in episodes})
    assert {span.attributes["gen_ai.agent.name"] for span in episodes} == {"tandem.examples.calculator_agent:answer"}
    calls = [span for span in spans if span.name == "llm_request"]
    assert len(calls) > EPISODES, "some episodes call the model again with the result of the tool"
    assert all(known[span.parent_id].name == "invoke_agent" and span.attributes["gen_ai.usage.completion_tokens"] > 0 for span in calls)
    for episode in episodes:
        assert {"llm_request", "run"} == {span.name for span in below(spans, episode)}
        [run] = [span for span in below(spans, episode) if span.name == "run"]
        assert run.resource["service.name"] == "tandem-agent-worker" and known[episode.parent_id].name == "rollout"
