"""A generative judge: a model behind OpenAI's chat endpoint that gives each completion a score."""

import asyncio
import json
import re
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

from tandem.config.judge_model import PLACEHOLDER, JudgeModelConfig
from tandem.config.rewards import EndpointConfig, RewardFunctionConfig
from tandem.rl.rewards.http_calls import MARGIN_S, NoAnswer, check_reachable, json_headers, post
from tandem.rl.rewards.judgement import Item, Judge, JudgeCall, Judgement, infrastructure_fault, number, one_line, shortened

OWN_NAMES = ("prompt", "completion", "ground_truth", "minimum", "maximum")


class NoScore(Exception):
    """Raised when a reply has no score; the message says what it has instead."""


def judge_of_model(function: RewardFunctionConfig) -> Judge:
    """Returns the judge that asks ``function.judge``. Raises ``UserError`` if nothing listens there, or the variable with its token is not set."""
    settings = function.judge
    assert settings is not None
    headers = json_headers(function.label, function.endpoint)
    check_reachable(function.label, settings.url)
    threads = ThreadPoolExecutor(settings.parallel, thread_name_prefix="judge")

    async def judge(items: Sequence[Item], call: JudgeCall) -> list[Judgement]:
        loop, ends = asyncio.get_running_loop(), time.monotonic() + call.limit_s - MARGIN_S
        asked = [partial(judge_completion, item, function.label, settings, function.endpoint, headers, ends) for item in items]
        return list(await asyncio.gather(*(loop.run_in_executor(threads, each) for each in asked)))

    columns = tuple(name for name in dict.fromkeys(PLACEHOLDER.findall(settings.template)) if name not in OWN_NAMES)
    return Judge(function.label, True, lambda items, call: judge(items, call), is_async=True, columns=columns)


def judge_completion(
    item: Item, label: str, settings: JudgeModelConfig, endpoint: EndpointConfig, headers: Mapping[str, str], ends: float
) -> Judgement:
    """Returns the judgement of one completion: the score as a share of its range, and the reply as extra. A judge that does not answer, or gives no score, is
    an infrastructure fault."""
    url = settings.url.rstrip("/") + "/chat/completions"
    try:
        reply = text_of_reply(post(url, json.dumps(request_of(item, settings)).encode(), headers, endpoint, ends))
        score = score_of(reply, settings)
    except NoAnswer as failed:
        return infrastructure_fault(f"the judge at '{url}' {failed}")
    except NoScore as problem:
        return infrastructure_fault(f"the judge at '{url}' {problem}")
    value = (score - settings.minimum) / (settings.maximum - settings.minimum)
    return replace(number(value), extra={f"{label}/reply": one_line(reply)})


def request_of(item: Item, settings: JudgeModelConfig) -> dict[str, Any]:
    """Returns the body of a request."""
    values = {**item.columns, "prompt": item.prompt, "completion": item.completion, "ground_truth": item.ground_truth}
    values |= {"minimum": f"{settings.minimum:g}", "maximum": f"{settings.maximum:g}"}
    # In one pass, so that braces in a completion are not replaced.
    message = PLACEHOLDER.sub(lambda match: str(values[match[1]]) if match[1] in values else match[0], settings.template)
    system = [{"role": "system", "content": settings.system}] if settings.system else []
    return {
        "model": settings.model, "messages": [*system, {"role": "user", "content": message}], "temperature": settings.temperature,
        "max_tokens": settings.max_tokens, "seed": zlib.crc32(item.sample_id.encode()), **settings.extra_body,
    }  # fmt: skip


def text_of_reply(content: bytes) -> str:
    """Returns the message in the body of an answer. Raises ``NoScore`` if it has none."""
    try:
        text = json.loads(content)["choices"][0]["message"]["content"]
    except (ValueError, RecursionError, LookupError, TypeError):
        raise NoScore(f"answered {shortened(content[:60])}, which is not a chat completion") from None
    if not isinstance(text, str):
        raise NoScore("answered without a text")
    return text


def score_of(reply: str, settings: JudgeModelConfig) -> float:
    """Returns the last score in ``reply``. Raises ``NoScore`` without one, or for one out of range."""
    found = re.findall(settings.pattern, reply)
    try:
        score = float(found[-1])
    except (IndexError, ValueError):
        raise NoScore(f"gave no score: {shortened(reply[-60:])}") from None
    if not settings.minimum <= score <= settings.maximum:
        raise NoScore(f"gave the score {score:g}, which is not from {settings.minimum:g} to {settings.maximum:g}")
    return score
