"""A reward function behind HTTP, in the format of OpenRLHF's remote reward models.

Request: ``POST`` of JSON with a list each for ``query`` (prompt and completion in one text), ``prompts`` and ``labels`` (the ground truths), as OpenRLHF
sends them (``openrlhf/utils/agent.py``), and besides ``completions`` and ``columns`` (of every sample an object) and ``step``. Response: JSON with
``rewards``, or ``scores``, a number for each sample, or null where the function does not apply; ``extra_logs`` may have lists of numbers by name.
"""

import asyncio
import http.client
import json
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from tandem.config.rewards import EndpointConfig, RewardFunctionConfig
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
from tandem.types import UserError

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 8.0
MARGIN_S = 0.2
"""Seconds before the process is ended in which an endpoint's fault is still reported as its own."""
MOST_RESPONSE_BYTES = 2**28
CONNECT_S = 5.0
RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of an endpoint that is busy or restarting."""

# A proxy of the environment is for addresses outside, which a reward's seldom is.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class _Failed(Exception):
    """Raised when the endpoint could not be asked; the message says why."""


class _Answer(NamedTuple):
    rewards: Sequence[Any]
    logs: Mapping[str, Sequence[Any]]


def endpoint_judge(function: RewardFunctionConfig) -> Judge:
    """Returns the judge for an address. Raises ``UserError`` if nothing listens there, or the environment variable with its token is not set."""
    settings = function.endpoint
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if settings.token_variable:
        token = os.environ.get(settings.token_variable)
        if not token:
            raise UserError(f"reward function '{function.label}' takes its token from the environment variable {settings.token_variable}, which is not set")
        headers["Authorization"] = f"Bearer {token}"
    _check_reachable(function)

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
        answer = _asked(urllib.request.Request(url, content, dict(headers), method="POST"), settings, len(items), ends)
    except _Failed as failed:
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


def _asked(request: urllib.request.Request, settings: EndpointConfig, count: int, ends: float) -> _Answer:
    """Returns the answer. Raises ``_Failed`` when it could not be had in time, ``ValueError`` for one of another form."""
    wait_s, problem = FIRST_WAIT_S, "was not asked"
    for attempt in range(settings.retries + 1):
        left = ends - time.monotonic()
        if left <= 0:
            break
        try:
            with _OPENER.open(request, timeout=min(settings.timeout_s, left)) as response:
                content = response.read(MOST_RESPONSE_BYTES + 1)
            return _read(content, count)
        except urllib.error.HTTPError as error:
            with error:
                problem = f"answered {error.code}: {error.read(200).decode(errors='replace')}"
            if error.code not in RETRIED:
                raise ValueError(f"it {problem}") from None
        except (OSError, http.client.HTTPException) as error:
            problem = f"does not answer: {getattr(error, 'reason', error)}"
        if attempt < settings.retries:
            time.sleep(max(min(wait_s, ends - time.monotonic()), 0.0))
            wait_s = min(2 * wait_s, MOST_WAIT_S)
    raise _Failed(f"{problem} (after {attempt + 1} attempts)")


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


def _check_reachable(function: RewardFunctionConfig) -> None:
    parts = urlsplit(function.function)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), timeout=CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"reward function '{function.label}': nothing answers at '{function.function}' ({reason}); start it, or correct the address") from None
