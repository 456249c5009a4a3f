"""OpenAI's completions and chat completions, with vLLM's additional fields."""

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from tandem.engine.lora.request import LoRARequest
from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.serving.chat_request import ready_chat
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.errors import ApiError, invalid
from tandem.serving.forms.answer import Answer, AnswerStream
from tandem.serving.forms.chat import ChatDeltas, chat_message
from tandem.serving.log_lines import USAGE, Usage
from tandem.serving.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from tandem.serving.prompts import sampling_params, structured_outputs
from tandem.serving.protocol import ChatCompletionRequest, CompletionRequest, OpenAIFields, StreamOptions
from tandem.serving.routes.adapters import adapter_meta
from tandem.serving.sessions import DONE, answers, begin, each, sse, submitted, while_connected
from tandem.serving.state import ServerState
from tandem.serving.weight_versions import WeightVersions


@dataclass
class Job:
    """One HTTP request: its prompts and how its choices are written. ``chunk_object``: the object's name in a stream.

    ``write(job, prompt number, completion, scores, is_first, is_delta)`` gives a choice without its index and reason.
    """

    id: str
    model: str
    object: str
    chunk_object: str
    requests: list[EngineRequest]
    n: int
    return_token_ids: bool
    write: Callable[["Job", int, CompletionOutput, RequestOutput, bool, bool], dict[str, Any]]
    options: StreamOptions | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    usage: Usage = field(default_factory=Usage)
    versions: WeightVersions = field(default_factory=WeightVersions)
    logprobs: dict[tuple[int, int], CompletionLogprobs] = field(default_factory=dict)
    opening: Callable[["Job"], dict[str, Any]] | None = None
    """The first chunk of each choice of a chat, which carries its role."""
    kv_transfer: dict[str, Any] | None = None
    """The field ``kv_transfer_params`` of the request: with another server that computes its prompt or its answer."""

    def choice(self, number: int, completion: CompletionOutput, output: RequestOutput, is_first: bool, is_delta: bool) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": number * self.n + completion.index,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "logprobs": None,
        }
        choice |= self.write(self, number, completion, output, is_first, is_delta)
        if self.return_token_ids:
            choice["token_ids"] = completion.token_ids
            if is_first:
                choice["prompt_token_ids"] = self.requests[number].prompt_token_ids
        return choice

    def body(self, choices: list[dict[str, Any]], object_name: str, usage: Usage | None) -> dict[str, Any]:
        body = {"id": self.id, "object": object_name, "created": self.created, "model": self.model, "choices": choices, "weight_versions": self.versions.body}
        return body | {"usage": None if usage is None else usage.body}


async def completions(state: ServerState, body: CompletionRequest, request: Request) -> Response:
    """``POST /v1/completions``."""
    adapter = _check_model(state, body)
    if isinstance(body.prompt, list) and body.prompt and not isinstance(body.prompt[0], int):
        # Before any of them is encoded.
        state.pool.check_room(len(body.prompt))
    reader = state.prompt_reader(request, body.truncate_prompt_tokens, body.max_tokens)
    prompts = await reader.completion_prompts(body.prompt, body.add_special_tokens is not False)
    count, shows_ids = state.limits.check_logprobs(body.logprobs, "logprobs"), _shows_ids(state, body)
    echo, scores = bool(body.echo), state.limits.check_logprobs(body.prompt_logprobs, "prompt_logprobs")
    if echo and scores is None and (count is not None or body.max_tokens == 0):
        scores = count or 0
    if body.max_tokens == 0 and not echo and scores is None:
        raise invalid("'max_tokens' is 0; ask for at least 1 token, or for the prompt's own with 'echo'", "max_tokens")
    wanted = structured_outputs(body)
    params = sampling_params(body, max_tokens=body.max_tokens, logprobs=count, structured_outputs=wanted, defaults=state.sampling_defaults)
    params |= {} if scores is None else {"prompt_logprobs": scores}
    texts = [state.tokenizer.decode(_known(state, tokens), skip_special_tokens=False) for tokens in prompts] if echo else []

    def write(job: Job, number: int, c: CompletionOutput, output: RequestOutput, is_first: bool, is_delta: bool) -> dict[str, Any]:
        text, tokens = c.text, c.token_ids
        entries: Sequence[Any] = c.logprobs or []
        if echo and is_first:
            text = texts[number] + text
            tokens = job.requests[number].prompt_token_ids + tokens
            entries = [*(output.prompt_logprobs or []), *entries]
        choice: dict[str, Any] = {"text": text}
        if count is not None:
            writer = job.logprobs.setdefault((number, c.index), CompletionLogprobs(count, state.tokenizer, shows_ids))
            choice["logprobs"] = writer.take(tokens, entries)
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    name = f"cmpl-{body.request_id or uuid.uuid4().hex}"
    job = Job(
        id=name, model=body.model or state.model_name, object="text_completion",
        chunk_object="text_completion", requests=_requests(state, body, name, prompts, params, adapter), n=body.n or 1,
        return_token_ids=bool(body.return_token_ids), write=write, options=body.stream_options, kv_transfer=body.kv_transfer_params,
    )  # fmt: skip
    return await _answer(state, job, request, bool(body.stream))


async def chat_completions(state: ServerState, body: ChatCompletionRequest, request: Request) -> Response:
    """``POST /v1/chat/completions``."""
    adapter = _check_model(state, body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' is given without 'logprobs'; set 'logprobs' to true", "top_logprobs")
    ready = await ready_chat(state, body, request)
    role = body.messages[-1].role if body.add_generation_prompt is False else state.settings.response_role
    shows_ids = _shows_ids(state, body)
    streams: dict[int, tuple[AnswerStream, ChatDeltas]] = {}

    def read(c: CompletionOutput, is_delta: bool) -> dict[str, Any]:
        """Returns the message or delta of an answer with reasoning or calls, and why it ended."""
        answers, deltas = streams.setdefault(c.index, (AnswerStream(ready.plan), ChatDeltas()))
        events = answers.take(c.text, c.finish_reason is not None)
        reason = None if c.finish_reason is None else answers.finish_reason(c.finish_reason)
        if is_delta:
            return {"delta": deltas.take(events), "finish_reason": reason}
        answer = Answer()
        answer.add(events)
        return {"message": chat_message(answer, role, ready.plan.reasoning is not None), "finish_reason": reason}

    def write(job: Job, number: int, c: CompletionOutput, output: RequestOutput, is_first: bool, is_delta: bool) -> dict[str, Any]:
        if ready.plan.reads:
            choice = read(c, is_delta)
        else:
            choice = {"delta": {"content": c.text}} if is_delta else {"message": {"role": role, "content": c.text}}
        if ready.top_logprobs is not None and c.logprobs is not None:
            choice["logprobs"] = chat_logprobs(c.token_ids, c.logprobs, ready.top_logprobs, shows_ids)
        if body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return choice

    def opening(job: Job) -> dict[str, Any]:
        delta = {"role": role, "content": ""}
        choices = [{"index": i, "delta": delta, "logprobs": None, "finish_reason": None} for i in range(job.n)]
        return job.body(choices, job.chunk_object, None)

    name = f"chatcmpl-{body.request_id or uuid.uuid4().hex}"
    job = Job(
        id=name, model=body.model or state.model_name, object="chat.completion",
        chunk_object="chat.completion.chunk", requests=_requests(state, body, name, [ready.prompt], ready.params, adapter), n=body.n or 1,
        return_token_ids=bool(body.return_token_ids), write=write, options=body.stream_options, opening=opening, kv_transfer=body.kv_transfer_params,
    )  # fmt: skip
    return await _answer(state, job, request, bool(body.stream))


def _check_model(state: ServerState, body: OpenAIFields) -> LoRARequest | None:
    if body.stream_options is not None and not body.stream:
        raise invalid("'stream_options' is given without 'stream'; set 'stream' to true", "stream_options")
    return state.check_model(body.model)


def _shows_ids(state: ServerState, body: OpenAIFields) -> bool:
    given = body.return_tokens_as_token_ids
    return state.settings.return_tokens_as_token_ids if given is None else given


def _known(state: ServerState, tokens: list[int]) -> list[int]:
    return [token for token in tokens if token < state.tokenizer.vocab_size]


def _requests(
    state: ServerState, body: OpenAIFields, name: str, prompts: list[list[int]], params: dict[str, Any], adapter: LoRARequest | None
) -> list[EngineRequest]:
    # With a seed the answer depends on the request alone; without one no two requests draw the same.
    return [
        EngineRequest(
            id=f"{name}-{i}", prompt_token_ids=tokens, params=params, stream=bool(body.stream),
            key=i if body.seed is not None else state.pool.next_key(), priority=body.priority or 0, cache_salt=body.cache_salt or "",
            num_draft_tokens=body.num_draft_tokens, adapter=adapter_meta(adapter),
        )
        for i, tokens in enumerate(prompts)
    ]  # fmt: skip


async def _answer(state: ServerState, job: Job, request: Request, stream: bool) -> Response:
    job.usage = request.scope.get(USAGE, job.usage)
    if job.kv_transfer is not None and len(job.requests) > 1:
        raise invalid("'kv_transfer_params' is given with several prompts; send one prompt", "kv_transfer_params")
    if state.kv_transfers.is_prefill(job.kv_transfer):
        return await _prefill(state, job, request)
    if stream:
        return await begin(request, _events(state, job), lambda: job.versions.header)
    outputs = await while_connected(request, _whole(state, job))
    choices = []
    for number, output in enumerate(outputs):
        choices += [job.choice(number, completion, output, True, False) for completion in output.outputs]
        _count(state, job, number, output)
        job.usage.prompt += len(job.requests[number].prompt_token_ids)
    return JSONResponse(job.body(choices, job.object, job.usage), headers=job.versions.header)


async def _whole(state: ServerState, job: Job) -> list[RequestOutput]:
    preferred = await state.kv_transfers.receive(job.requests[0], job.kv_transfer)
    return await answers(state.pool, job.requests, preferred)


async def _prefill(state: ServerState, job: Job, request: Request) -> Response:
    """The answer to a request whose prompt alone is computed here: no choices, and where its KV blocks are."""
    prompt = replace(job.requests[0], params={"max_tokens": 1, "temperature": 0.0, "ignore_eos": True}, stream=False, num_draft_tokens=0)
    output, params = await while_connected(request, state.kv_transfers.prefill(prompt))
    job.versions.take(output, state.pool.weights.version)
    job.usage.prompt, job.usage.cached = len(prompt.prompt_token_ids), output.num_cached_tokens
    return JSONResponse(job.body([], job.object, job.usage) | {"kv_transfer_params": params}, headers=job.versions.header)


def _count(state: ServerState, job: Job, number: int, output: RequestOutput) -> None:
    job.versions.take(output, state.pool.weights.version)
    job.usage.completion += sum(len(completion.token_ids) for completion in output.outputs)
    if output.finished:
        job.usage.cached += output.num_cached_tokens


async def _events(state: ServerState, job: Job) -> AsyncGenerator[bytes, None]:
    """The events of a stream, those that are ready at once together. The first is there when nothing can be refused any
    more; an error after it is an event itself."""
    seen: set[tuple[int, int]] = set()
    numbers = {request.id: number for number, request in enumerate(job.requests)}
    continuous = bool(job.options and job.options.continuous_usage_stats)
    preferred = await state.kv_transfers.receive(job.requests[0], job.kv_transfer)
    with submitted(state.pool, job.requests, preferred) as (streams, queue):
        job.usage.prompt = sum(len(request.prompt_token_ids) for request in job.requests)
        try:
            async for stream, output in each(queue, len(streams)):
                number = numbers[stream.request.id]
                _count(state, job, number, output)
                parts = []
                if not seen and job.opening is not None:
                    parts.append(sse(job.opening(job)))
                for completion in output.outputs:
                    is_first = (number, completion.index) not in seen
                    seen.add((number, completion.index))
                    choice = job.choice(number, completion, output, is_first, True)
                    # A token whose text is held back is no news to a reader of text.
                    is_text = choice.get("text") or any(choice.get("delta", {}).values())
                    is_opening = is_first and (job.opening is None or "prompt_logprobs" in choice)
                    if is_text or completion.finish_reason or completion.logprobs or job.return_token_ids or is_opening:
                        parts.append(sse(job.body([choice], job.chunk_object, job.usage if continuous else None)))
                if parts:
                    yield b"".join(parts)
        except ApiError as error:
            if not seen:
                raise
            yield sse(error.body) + DONE
            return
    if job.options and job.options.include_usage:
        yield sse(job.body([], job.chunk_object, job.usage))
    yield DONE
