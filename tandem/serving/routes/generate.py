"""``POST /generate``: tokens in, tokens out, with what a trainer needs to know of each of them."""

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from tandem.engine.processing.outputs import CompletionOutput, RequestOutput
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.errors import ApiError, invalid
from tandem.serving.log_lines import USAGE, Usage
from tandem.serving.logprobs import by_token_id, prompt_logprobs
from tandem.serving.prompts import Conversation, sampling_params
from tandem.serving.protocol import DetokenizeRequest, GenerateRequest, GenerateSampling, TokenizeRequest
from tandem.serving.routes.adapters import adapter_meta
from tandem.serving.sessions import DONE, answers, begin, each, sse, submitted, while_connected
from tandem.serving.state import ServerState
from tandem.serving.weight_versions import WeightVersions
from tandem.text.chat import template_source, tokenizer_settings
from tandem.text.tokenizer import Tokenizer
from tandem.types import UserError


async def generate(state: ServerState, body: GenerateRequest, request: Request) -> Response:
    """One prompt, as a text or as token ids."""
    if (body.prompt is None) == (body.prompt_token_ids is None):
        raise invalid("give either 'prompt' or 'prompt_token_ids'", "prompt")
    adapter = state.check_model(body.model)
    tokens = body.prompt_token_ids
    sampling = body.sampling_params or GenerateSampling()
    count = state.limits.check_logprobs(sampling.logprobs, "logprobs")
    state.limits.check_logprobs(sampling.prompt_logprobs, "prompt_logprobs")
    reader = state.prompt_reader(request, sampling.truncate_prompt_tokens, sampling.max_tokens)
    if tokens is None:
        tokens = await reader.encode(body.prompt or "", add_special_tokens=True)
    else:
        tokens = reader.fitting(tokens, "prompt_token_ids")
    key = body.key
    if key is None:
        key = 0 if sampling.seed is not None else state.pool.next_key()
    name = body.request_id or uuid.uuid4().hex
    params = sampling_params(sampling, max_tokens=sampling.max_tokens, logprobs=count, defaults=state.sampling_defaults)
    usage = request.scope.get(USAGE, Usage())
    usage.prompt = len(tokens)
    asked = EngineRequest(
        id=f"{name}-0", prompt_token_ids=tokens, params=params,
        stream=bool(body.stream), key=key, first_index=body.first_index or 0, priority=body.priority or 0, cache_salt=body.cache_salt or "",
        num_draft_tokens=body.num_draft_tokens, adapter=adapter_meta(adapter),
    )  # fmt: skip
    versions = WeightVersions()
    if body.stream:
        return await begin(request, _events(state, asked, name, usage, versions), lambda: versions.header)
    (output,) = await while_connected(request, answers(state.pool, [asked]))
    usage.completion = sum(len(completion.token_ids) for completion in output.outputs)
    versions.take(output, state.pool.weights.version)
    return JSONResponse(_body(name, output, versions) | {"prompt_token_ids": tokens}, headers=versions.header)


async def _events(
    state: ServerState, asked: EngineRequest, name: str, usage: Usage, versions: WeightVersions
) -> AsyncGenerator[bytes, None]:
    is_first = True
    with submitted(state.pool, [asked]) as (streams, queue):
        try:
            async for _, output in each(queue, len(streams)):
                usage.completion += sum(len(completion.token_ids) for completion in output.outputs)
                versions.take(output, state.pool.weights.version)
                yield sse(_body(name, output, versions))
                is_first = False
        except ApiError as error:
            if is_first:
                raise
            yield sse(error.body)
    yield DONE


def _body(name: str, output: RequestOutput, versions: WeightVersions) -> dict[str, Any]:
    return {
        "request_id": name,
        "finished": output.finished,
        "num_cached_tokens": output.num_cached_tokens,
        "prompt_logprobs": prompt_logprobs(output.prompt_logprobs),
        "weight_versions": versions.body,
        "outputs": [_completion(completion) for completion in output.outputs],
    }


def _completion(completion: CompletionOutput) -> dict[str, Any]:
    plain = {field.name: getattr(completion, field.name) for field in dataclasses.fields(completion)}
    plain["weight_versions"] = [list(version) for version in completion.weight_versions]
    plain["logprobs"] = None if completion.logprobs is None else [by_token_id(entry) for entry in completion.logprobs]
    return plain


async def tokenize(state: ServerState, body: TokenizeRequest, request: Request) -> dict[str, Any]:
    """``POST /tokenize``: the tokens of a text, or of a conversation. A text that no context can hold is refused as in a completion."""
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either 'prompt' or 'messages'", "prompt")
    reader = state.prompt_reader(request)
    if body.messages is not None:
        tools = [tool.model_dump(exclude_unset=True) for tool in body.tools or []]
        variables = {**state.settings.chat_template_kwargs, **(body.chat_template_kwargs or {})}
        chat = Conversation(body.messages, body.add_generation_prompt is not False, tools, variables)
        tokens = await reader.chat_prompt(state.chat_template(bool(tools)), chat)
    else:
        tokens = await reader.encode(body.prompt or "", body.add_special_tokens is not False)
    response: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": state.max_model_len}
    if body.return_token_strs:
        response["token_strs"] = await asyncio.to_thread(_token_texts, state.tokenizer, tokens)
    return response


def _token_texts(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    return [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]


async def tokenizer_info(state: ServerState) -> dict[str, Any]:
    """``GET /tokenizer_info``: what ``tokenizer_config.json`` has, and the chat template that is used. Raises ``ApiError`` unless the operator has turned it
    on."""
    if not state.settings.tokenizer_info:
        raise ApiError(404, "the tokenizer's settings are not shown: start the server with --enable-tokenizer-info-endpoint", code="not_supported")
    folder = state.settings.tokenizer_folder

    def read() -> dict[str, Any]:
        shown = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer_settings(folder)}
        with contextlib.suppress(UserError):  # A tokenizer may have no template.
            shown["chat_template"] = state.settings.chat_template or template_source(folder)
        return shown

    return await asyncio.to_thread(read)


async def detokenize(state: ServerState, body: DetokenizeRequest) -> dict[str, Any]:
    """``POST /detokenize``: the text of as many tokens as the context has, or fewer."""
    state.check_model(body.model)
    state.limits.check_tokens(len(body.tokens), "tokens")
    wrong = next((token for token in body.tokens if token >= state.tokenizer.vocab_size), None)
    if wrong is not None:
        raise invalid(f"token id {wrong} is not in the tokenizer's vocabulary of {state.tokenizer.vocab_size}", "tokens")
    return {"prompt": state.tokenizer.decode(body.tokens, skip_special_tokens=False)}
