"""The score that a ``verifiers`` environment gives a completion of a prompt, without an episode."""

import asyncio
import json
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from tandem.data.tasks.verifiers_package import environment_config, import_verifiers, task_from
from tandem.rl.rewards.judgement import Item, Judgement, checked_number, number

if TYPE_CHECKING:
    import verifiers.v1 as vf


@lru_cache(maxsize=8)
def _config(name: str, settings: str) -> "vf.EnvConfig":
    return environment_config(name, json.loads(settings))


def judge_by_environment(item: Item) -> Judgement:
    """Returns the reward of the completion of ``item``: the weighted sum of the task's reward functions, each a detail by its name, as is every metric."""
    columns = item.columns
    config = _config(columns["environment"], json.dumps(columns["settings"], sort_keys=True))
    trace = asyncio.run(scored(config, columns["data"], item.completion))
    details = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    details |= {name: value for name, value in trace.metrics.items() if value is not None}
    return number(checked_number(trace.reward), details={name: checked_number(value) for name, value in details.items()})


async def scored(config: "vf.EnvConfig", data: Mapping[str, Any], completion: str) -> "vf.Trace":
    """Returns the trace of a run in which the model answered the prompt of the task with ``data`` with ``completion``, scored by the task."""
    vf = import_verifiers()
    task = task_from(config, data)
    trace = vf.Trace(task=vf.TraceTask(type=type(task).__name__, data=task.data), agent=vf.AgentInfo(config=vf.AgentConfig()))
    system = [{"role": "system", "content": task.data.system_prompt}] if task.data.system_prompt else []
    prompt = task.data.prompt
    asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message.model_dump() for message in prompt or []]
    messages = [*system, *asked, {"role": "assistant", "content": completion}]
    for number_of, message in enumerate(messages):
        parent, sampled = number_of - 1 if number_of else None, number_of == len(messages) - 1
        trace.nodes.append(vf.MessageNode.model_validate({"parent": parent, "message": message, "sampled": sampled}))
    trace.ok = trace.is_completed = True
    await task.score(trace)
    return trace
