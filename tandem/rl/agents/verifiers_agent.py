"""The agent that plays an episode of a ``verifiers`` environment: ``rollout.agent.function: tandem.rl.agents.verifiers_agent:episode``.

The environment plays as its authors wrote it, with its tools and its own turns, and calls the model through the variables of every agent. What it says of
the episode is the agent's answer: its reward, and every reward and metric by name.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.utils.loaders import default_harness_id, load_environment

from tandem.data.tasks.verifiers_package import environment_config, task_from
from tandem.rl.agents import verifiers_harness

MODEL = "tandem"
CHAT_HARNESS = "tandem_chat"
sys.modules.setdefault(f"verifiers.v1.harnesses.{CHAT_HARNESS}", verifiers_harness)  # Where the package looks for it.


async def episode(question: str, environment: str, settings: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the reward of an episode of ``environment`` on the task with ``data``, with its last reply as ``text`` and its rewards and metrics by name.
    Raises ``RuntimeError`` for an episode that failed, which is masked, and for one that is not that of one trained seat."""
    config = on_this_machine(environment_config(environment, settings), settings)
    env = load_environment(config)
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with env.serving():
        played = await env.run_episode(task_from(config, data), vf.ModelContext(model=MODEL, client=client, sampling=vf.SamplingConfig()))
    errors = [*played.errors, *(error for trace in played.traces for error in trace.errors)]
    if not played.ok:
        raise RuntimeError(f"environment 'verifiers:{environment}': {'; '.join(f'{error.type}: {error.message}' for error in errors) or 'it failed'}")
    return outcome_of(played.traces)


def on_this_machine(config: vf.EnvConfig, settings: Mapping[str, Any]) -> vf.EnvConfig:
    """Returns ``config`` with seats that play on this machine, where the package's default is a machine of Prime Intellect, and, where the environment has no
    program of its own, in a chat loop in this process. What ``settings`` name stays."""
    seats: dict[str, vf.AgentConfig] = {}
    for name, seat in agent_config_fields(config).items():
        named = settings.get(name) or {}
        if "runtime" not in named and isinstance(seat.runtime, vf.PrimeConfig):
            seat = seat.model_copy(update={"runtime": vf.SubprocessConfig()})
        program = seat.harness.id if seat.harness is not None else default_harness_id(config.taskset.id)
        if "harness" not in named and program in ("bash", "null") and isinstance(seat.runtime, vf.SubprocessConfig):
            seat = seat.model_copy(update={"harness": verifiers_harness.ChatConfig(id=CHAT_HARNESS)})
        seats[name] = seat
    return config.model_copy(update=seats)


def outcome_of(traces: list[vf.Trace]) -> dict[str, Any]:
    """Returns the agent's answer for the ``traces`` of an episode. Raises ``RuntimeError`` unless one seat is trained, and calls the model once."""
    by_model = [trace for trace in traces if trace.agent.config.client.base_url == os.environ["OPENAI_BASE_URL"]]
    trained = [trace for trace in by_model if trace.agent.trainable]
    if others := [trace.agent.name for trace in by_model if not trace.agent.trainable]:
        raise RuntimeError(f"seat '{others[0]}' is not trained but calls the model; give it a client of its own in task.settings")
    if len(trained) != 1:
        raise RuntimeError(f"an episode has {len(trained)} runs of trained seats, and one reward needs one run")
    (trace,) = trained
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **rewards, "reward": trace.reward, "text": trace.last_reply}
