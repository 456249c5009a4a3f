"""Embeddings and scores: ``/v1/embeddings`` of OpenAI, ``/pooling``, ``/classify`` and ``/score`` of vLLM, ``/rerank`` of Jina and Cohere."""

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from tandem.engine.pooling.outputs import PooledData
from tandem.engine.pooling.pairs import check_one_label, cosine_similarity, pair_text, paired
from tandem.model.huggingface.pooling_config import ModelPooling
from tandem.serving.engines.messages import EngineRequest
from tandem.serving.errors import invalid, unavailable
from tandem.serving.ignored_fields import warned
from tandem.serving.log_lines import USAGE, Usage
from tandem.serving.parsed_route import ParsedRoute
from tandem.serving.pooling_protocol import (
    ClassifyRequest,
    EmbeddingRequest,
    EncodedFields,
    PairFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    TextFields,
    TextOrTexts,
)
from tandem.serving.prompts import Conversation, rendered_beside
from tandem.serving.routes.adapters import adapter_meta
from tandem.serving.sessions import answers, while_connected
from tandem.serving.state import ServerState
from tandem.serving.text_encoder import INLINE_CHARACTERS
from tandem.serving.weight_versions import WeightVersions
from tandem.types import UserError

_PAIR_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


def router(state: ServerState) -> APIRouter:
    """The routes, each of which needs a model that can do what it is asked for."""
    routes = APIRouter(route_class=ParsedRoute)

    @routes.post("/v1/embeddings", response_model=None)
    async def vectors(body: EmbeddingRequest, request: Request) -> Response:
        """The vectors of texts."""
        return warned(body, await embeddings(state, body, request))

    @routes.post("/pooling", response_model=None)
    async def pooled(body: PoolingRequest, request: Request) -> Response:
        """What the model makes of texts, or of each of their tokens."""
        return warned(body, await pooling(state, body, request))

    @routes.post("/classify", response_model=None)
    async def classes(body: ClassifyRequest, request: Request) -> Response:
        """The scores of texts."""
        return warned(body, await classify(state, body, request))

    async def scores(body: ScoreRequest, request: Request) -> Response:
        """How well texts belong together."""
        return warned(body, await score(state, body, request))

    async def ranks(body: RerankRequest, request: Request) -> Response:
        """Documents in the order of how well they answer a query."""
        return warned(body, await rerank(state, body, request))

    for path in ("/score", "/v1/score"):
        routes.post(path, response_model=None)(scores)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        routes.post(path, response_model=None)(ranks)
    return routes


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. ``prefix``: of the answer's id. ``task``: what is pooled; ``None``: what the model does. Raises ``ApiError`` for a field that is
    not supported."""

    state: ServerState
    body: PoolingFields
    request: Request
    prefix: str
    task: str | None

    def __post_init__(self) -> None:
        self.body.check()

    @property
    def pooling(self) -> ModelPooling:
        """Raises ``ApiError`` for a model that generates text."""
        if self.state.pooling is None:
            raise invalid(
                f"the model '{self.state.model_name}' generates text and neither embeds nor scores it; serve a model for that, or start the server with "
                "--runner pooling (and --convert embed for the hidden states of this one)",
                "model",
            )
        return self.state.pooling


class Pooled:
    """The answers to the prompts of one HTTP request."""

    def __init__(self, call: Call, prompts: Sequence[Sequence[int]], results: Sequence[PooledData]) -> None:
        self.call, self.results = call, results
        self.usage = call.request.scope.get(USAGE, Usage())
        self.usage.prompt = sum(map(len, prompts))

    def response(self, **fields: Any) -> Response:
        """Returns the answer with ``fields``, and what all answers have."""
        count, seen = self.usage.prompt, WeightVersions()
        seen.note(result.weight_version for result in self.results)
        body = {
            "id": f"{self.call.prefix}-{self.call.body.request_id or uuid.uuid4().hex}", "object": "list", "created": int(time.time()),
            "model": self.call.body.model or self.call.state.model_name, **fields, "usage": {"prompt_tokens": count, "total_tokens": count},
        }  # fmt: skip
        return JSONResponse(body | {"weight_versions": seen.body}, headers=seen.header)


async def embeddings(state: ServerState, body: EmbeddingRequest, request: Request) -> Response:
    """``POST /v1/embeddings``."""
    call = Call(state, body, request, "embd", "embed")
    pooled = await _of_texts(call, body)
    data = [{"index": i, "object": "embedding", "embedding": _shown(result, body)} for i, result in enumerate(pooled.results)]
    return pooled.response(data=data)


async def pooling(state: ServerState, body: PoolingRequest, request: Request) -> Response:
    """``POST /pooling``."""
    call = Call(state, body, request, "pool", body.task)
    pooled = await _of_texts(call, body)
    return pooled.response(data=[{"index": i, "object": "pooling", "data": _shown(result, body)} for i, result in enumerate(pooled.results)])


async def classify(state: ServerState, body: ClassifyRequest, request: Request) -> Response:
    """``POST /classify``."""
    call = Call(state, body, request, "classify", "classify")
    pooled = await _of_texts(call, body)
    rows = [result.rows()[0] for result in pooled.results]
    labels = [call.pooling.labels[max(range(len(probs)), key=probs.__getitem__)] for probs in rows]
    return pooled.response(
        data=[{"index": i, "label": label, "probs": probs, "num_classes": len(probs)} for i, (label, probs) in enumerate(zip(labels, rows, strict=True))]
    )


async def score(state: ServerState, body: ScoreRequest, request: Request) -> Response:
    """``POST /score``."""
    call = Call(state, body, request, "score", None)
    given = [names for names in _PAIR_NAMES if all(getattr(body, name) is not None for name in names)]
    if not given:
        raise invalid("give 'text_1' and 'text_2', or 'queries' and 'documents'", "text_1")
    if len({name for name in body.model_fields_set if name in {n for names in _PAIR_NAMES for n in names}}) > 2:
        raise invalid(f"'{given[0][0]}' and '{given[0][1]}' are given with further texts; give one pair of fields", given[0][0])
    first, second = (_texts(getattr(body, name)) for name in given[0])
    pooled, scores = await _of_pairs(call, body, first, second, given[0])
    return pooled.response(data=[{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)])


async def rerank(state: ServerState, body: RerankRequest, request: Request) -> Response:
    """``POST /rerank``."""
    call = Call(state, body, request, "rerank", None)
    documents = _texts(body.documents)
    pooled, scores = await _of_pairs(call, body, [body.query], documents, ("query", "documents"))
    order = sorted(range(len(scores)), key=lambda i: -scores[i])[: body.top_n or None]
    shown = [{} if body.return_documents is False else {"document": {"text": documents[i]}} for i in order]
    return pooled.response(results=[{"index": i, "relevance_score": scores[i]} | text for i, text in zip(order, shown, strict=True)])


async def _of_texts(call: Call, body: TextFields) -> Pooled:
    """Computes the texts, token ids or the conversation of ``body``. Raises ``ApiError``."""
    _check_task(call)
    if (body.input is None) == (body.messages is None):
        raise invalid("give either 'input' or 'messages'", "input")
    if body.messages is not None:
        variables = {**call.state.settings.chat_template_kwargs, **(body.chat_template_kwargs or {})}
        chat = Conversation(body.messages, bool(body.add_generation_prompt), (), variables)
        text = await call.state.prompt_reader(call.request).chat_text(call.state.chat_template(), chat)
        prompts = [await _encoded(call, text, bool(body.add_special_tokens), "messages")]
    else:
        listed: Sequence[Any] = body.input if isinstance(body.input, list) else [body.input]
        if not listed:
            raise invalid("'input' is empty; give at least one text or token", "input")
        listed = [listed] if isinstance(listed[0], int) else listed
        call.state.pool.check_room(len(listed))
        special = body.add_special_tokens is not False
        prompts = [await _encoded(call, each, special, "input") if isinstance(each, str) else _fitting(call, each, "input") for each in listed]
    dimensions = body.dimensions if isinstance(body, EncodedFields) else None
    return await _computed(call, prompts, {"task": call.task, "use_activation": body.use_activation, "dimensions": dimensions})


async def _of_pairs(call: Call, body: PairFields, first: list[str], second: list[str], names: tuple[str, str]) -> tuple[Pooled, list[float]]:
    """Computes the score of each pair. Raises ``ApiError``."""
    pooling, state = call.pooling, call.state
    try:
        check_one_label(pooling)
        pairs = paired(first, second, names)
        state.pool.check_room(len(pairs))
        first = [await _first_tokens(call, text, body.max_tokens_per_query, names[0]) for text in first]
        second = [await _first_tokens(call, text, body.max_tokens_per_doc, names[1]) for text in second]
        params = {"use_activation": body.use_activation}
        if pooling.scored_by is None:
            for name in ("instruction", "chat_template_kwargs"):
                if getattr(body, name):
                    raise invalid(f"'{name}' is for models that read both texts; the model '{state.model_name}' compares their vectors: leave it out", name)
            prompts = [await _encoded(call, text, True, name) for name, texts in zip(names, (first, second), strict=True) for text in texts]
            pooled = await _computed(call, prompts, {**params, "task": "embed"})
            vectors = [result.rows()[0] for result in pooled.results]
            return pooled, [cosine_similarity(a, b) for a, b in paired(vectors[: len(first)], vectors[len(first) :], names)]
        template = state.pair_template()
        instruction = {} if body.instruction is None else {"instruction": body.instruction}
        variables: Mapping[str, Any] = {**state.settings.chat_template_kwargs, **instruction, **(body.chat_template_kwargs or {})}
        rows = paired(first, second, names)

        def render() -> list[str]:
            return [pair_text(query, document, template, variables) for query, document in rows]

        is_long = sum(len(query) + len(document) for query, document in rows) > INLINE_CHARACTERS
        texts = render() if template is None else await rendered_beside(template, render, is_long)
    except UserError as error:
        raise invalid(str(error), names[0]) from None
    pooled = await _computed(call, [await _encoded(call, text, template is None, names[1]) for text in texts], {**params, "task": "classify"})
    return pooled, [result.rows()[0][0] for result in pooled.results]


def _check_task(call: Call) -> None:
    """Raises ``ApiError`` for a model that cannot do what is asked for, before anything is encoded."""
    embeds = call.pooling.scored_by is None
    if call.task in ("embed", "token_embed") and not embeds:
        raise invalid(f"the model '{call.state.model_name}' scores texts and embeds none; ask /score, /rerank or /classify", "model")
    if call.task in ("classify", "token_classify") and embeds:
        raise invalid(f"the model '{call.state.model_name}' embeds texts and has no score of one; ask /v1/embeddings, or /score for pairs", "model")


async def _computed(call: Call, prompts: list[list[int]], params: Mapping[str, Any]) -> Pooled:
    state, body = call.state, call.body
    adapter = state.check_model(body.model)
    name = f"{call.prefix}-{body.request_id or uuid.uuid4().hex}"
    asked = [
        EngineRequest(
            id=f"{name}-{i}", prompt_token_ids=tokens, params={"max_tokens": 0}, stream=False, key=0, priority=body.priority or 0,
            cache_salt=body.cache_salt or "", adapter=adapter_meta(adapter), pooling=dict(params),
        )
        for i, tokens in enumerate(prompts)
    ]  # fmt: skip
    outputs = await while_connected(call.request, answers(state.pool, asked))
    results = [output.pooled for output in outputs if output.pooled is not None]
    if len(results) < len(outputs):
        raise unavailable("the request was aborted by a control call")
    return Pooled(call, prompts, results)


async def _encoded(call: Call, text: str, add_special_tokens: bool, param: str) -> list[int]:
    state = call.state
    if call.body.truncate_prompt_tokens is None:
        return await state.prompt_reader(call.request).encode(text, add_special_tokens, param)
    return _fitting(call, await state.encoder.encode(call.request, text, add_special_tokens, param), param)


def _fitting(call: Call, tokens: list[int], param: str) -> list[int]:
    """Returns the tokens that are left by a truncation. Raises ``ApiError`` if they do not fit the context."""
    limits, limit = call.state.limits, call.body.truncate_prompt_tokens
    if limit is not None:
        limit = limits.max_prompt_tokens if limit < 0 else limit
        tokens = tokens[len(tokens) - min(limit, len(tokens)) :] if call.body.truncation_side == "left" else tokens[:limit]
    if not tokens:
        raise invalid(f"'{param}' has no tokens; give a text of at least one", param)
    limits.check_tokens(len(tokens), param)
    return tokens


async def _first_tokens(call: Call, text: str, limit: int | None, param: str) -> str:
    """Returns the beginning of ``text`` that has ``limit`` tokens; all of it without a limit."""
    if not limit:
        return text
    tokens = await call.state.encoder.encode(call.request, text, False, param)
    return text if len(tokens) <= limit else call.state.tokenizer.decode(tokens[:limit], skip_special_tokens=False)


def _texts(given: TextOrTexts) -> list[str]:
    return [given] if isinstance(given, str) else given


def _shown(result: PooledData, body: EncodedFields) -> str | list[float] | list[list[float]]:
    if body.encoding_format == "base64":
        return base64.b64encode(result.data).decode("ascii")
    return result.rows()[0] if len(result.shape) == 1 else result.rows()
