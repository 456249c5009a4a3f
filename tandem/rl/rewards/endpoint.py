"""A reward function behind HTTP, in the format of OpenRLHF's remote reward models.

Request: ``POST`` of JSON with a list each for ``query`` (prompt and completion in one text), ``prompts`` and ``labels`` (the ground truths), as OpenRLHF
sends them (``openrlhf/utils/agent.py``), and besides ``completions`` and ``columns`` (of every sample an object) and ``step``. Response: JSON with
``rewards``, or ``scores``, a number for each sample, or null where the function does not apply; ``extra_logs`` may have lists of numbers by name.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tandem.config.rewards import EndpointConfig, RewardFunctionConfig
from tandem.rl.rewards.http_calls import MARGIN_S, NoAnswer, Refused, check_reachable, json_headers, post
from tandem.rl.rewards.judgement import (
    Item,
    Judge,
    JudgeCall,
    Judgement,
    checked_number,
    infrastructure_fault,
    not_applicable,
    number,
    shortened,
)


class _Answer(NamedTuple):
    rewards: Sequence[Any]
    logs: Mapping[str, Sequence[Any]]


def endpoint_judge(function: RewardFunctionConfig) -> Judge:
    """Returns the judge for an address. Raises ``UserError`` if nothing listens there, or the environment variable with its token is not set."""
    settings = function.endpoint
    headers = json_headers(function.label, settings)
    check_reachable(function.label, function.function)

    async def judge(items: Sequence[Item], call: JudgeCall) -> list[Judgement]:
        size = settings.batch_size or len(items)
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        ends = time.monotonic() + call.limit_s - MARGIN_S
        asked = [asyncio.to_thread(_judge_part, function.function, headers, settings, part, call, ends) for part in parts]
        return [judgement for part in await asyncio.gather(*asked) for judgement in part]

    return Judge(function.label, True, lambda items, call: judge(items, call), is_async=True, scope="group")


def _judge_part(url: str, headers: Mapping[str, str], settings: EndpointConfig, items: Sequence[Item], call: JudgeCall, ends: float) -> list[Judgement]:
    content = json.dumps(request_of(items, call)).encode()
    try:
        answer = _read(post(url, content, headers, settings, ends), len(items))
    except Refused as refused:
        raise ValueError(f"it {refused}") from None
    except NoAnswer as failed:
        # Of all samples: asking for each alone would fail as often.
        return [infrastructure_fault(f"'{url}' {failed}") for _ in items]
    return [_judgement(answer, place) for place in range(len(items))]


def request_of(items: Sequence[Item], call: JudgeCall) -> dict[str, Any]:
    """Returns the body of a request for ``items``."""
    return {
        "query": [item.prompt + item.completion for item in items],
        "prompts": [item.prompt for item in items],
        "labels": [item.ground_truth for item in items],
        "completions": [item.completion for item in items],
        "columns": [dict(item.columns) for item in items],
        "step": call.state.global_step,
    }


def _read(content: bytes, count: int) -> _Answer:
    try:
        body = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError(f"it answered {shortened(content[:60])}, which is not JSON") from None
    if isinstance(body, list) and len(body) == 1 and isinstance(body[0], dict):
        body = body[0]
    rewards = body.get("rewards", body.get("scores")) if isinstance(body, dict) else body
    if not isinstance(rewards, list) or len(rewards) != count:
        what = f"{len(rewards)} rewards" if isinstance(rewards, list) else f"{shortened(body)} without 'rewards'"
        raise ValueError(f"it answered {what} for {count} samples")
    logs = body.get("extra_logs") if isinstance(body, dict) else None
    lists = {str(name): values for name, values in logs.items() if isinstance(values, list) and len(values) == count} if isinstance(logs, dict) else {}
    return _Answer([_single(value) for value in rewards], {name: [_single(value) for value in values] for name, values in lists.items()})


def _judgement(answer: _Answer, place: int) -> Judgement:
    value = answer.rewards[place]
    if value is None:
        return not_applicable()
    try:
        details = {name: checked_number(values[place]) for name, values in answer.logs.items() if isinstance(values[place], int | float)}
        return number(checked_number(value), details=details)
    except ValueError as error:
        return infrastructure_fault(str(error))


def _single(value: Any) -> Any:
    """Returns the number of a list of one: a reward model's output has a row for each sample."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value
