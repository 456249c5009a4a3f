"""What the gateway must know of a request: its model, whether it is streamed, and about how much work it is."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.gateway.headers import Headers, first_values
from tandem.gateway.routing.prefix_index import Prefix, read_prefix
from tandem.serving.errors import invalid

INFERENCE_PATHS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings", "/v1/score", "/score",
    "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify", "/generate", "/tokenize", "/detokenize",
)  # fmt: skip
"""What is passed to backends, all with POST. Control calls of a backend are none of it: they would reach one that the client has not chosen."""
BYTES_PER_TOKEN = 4
"""Of English text in JSON, about; the order of backends by load needs no more."""
MAX_TOKENS = {"/v1/completions": 16}
"""What a request that names no limit may generate: OpenAI's default for completions."""
OTHER_MAX_TOKENS = 256
"""A guess for chats, which have no limit by default."""
_SESSION_FIELDS = ("session_id", "prompt_cache_key", "user")
"""Fields that are equal in the requests of one conversation: ours, and two of OpenAI's."""
_LONGEST_SESSION = 256
_MOST_PRIORITY = 2**31
_FREE = ("/v1/messages/count_tokens", "/tokenize", "/detokenize")
"""Paths whose requests compute nothing: they count as requests, and cost no tokens."""
_NO_GENERATION = (*_FREE, "/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/v2/rerank", "/rerank", "/pooling", "/classify")


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """A request as it came, and what was read from it. ``body``: its bytes, which are sent to the backend as they are. ``prompt_tokens`` and
    ``max_tokens``: estimates of the work, over all prompts and completions."""

    id: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: str
    model: str | None
    stream: bool
    prompt_tokens: int
    max_tokens: int
    has_seed: bool = False
    """Whether the client has chosen the seed of its random numbers."""
    tenant: str = ""
    timeout_s: float | None = None
    """How long the client waits for the beginning of its answer, as it says."""
    priority: int = 0
    """Among the requests of its tenant, the lowest first."""
    prefix: Prefix = ()
    """The blocks of its prompt, if backends are chosen by them."""
    block_share: float = 0.0
    """The part of the prompt that is in each of these blocks."""
    idempotency_key: str = ""
    """Requests of a tenant with the same one give the same tokens, at any gateway and at any of Tandem's servers with the same weights."""
    last_event_id: bytes = b""
    """The last event that the client has of an answer to the same request."""
    session: str = ""
    """The conversation that it belongs to, if it says so."""
    asked_model: str | None = None
    """The name that the client asked for; limits and keys go by it."""
    previous_response: str = ""
    """The answer of ``/v1/responses`` that it continues."""
    most_tokens: int | None = None
    """Tokens that may be generated at most, over all completions; ``None`` for a chat without a limit."""
    is_deterministic: bool = False
    """Whether the same request gives the same answer: it has a seed, or temperature 0."""
    weights: str = ""
    """The version of the weights that it asks for (``MODEL@0.7``); empty: any."""
    home: str = ""
    """The name of the backend that alone can serve it, because that holds the answer before; empty: any."""
    longest_prompt: int = 0
    """Tokens of its longest prompt, if all are token ids that are not cut; else 0."""
    shadows: "tuple[InferenceRequest, ...]" = ()
    """Its copies for models in the shadow."""

    @property
    def tokens(self) -> int:
        """All its work, estimated."""
        return self.prompt_tokens + self.max_tokens


def read_request(
    id: str, path: str, query: bytes, headers: Headers, body: bytes, content: Any, client: str, *, tenant: str = "", by_prefix: bool = False
) -> InferenceRequest:
    """Returns the request with the parsed body ``content``. Raises ``ApiError`` if that is no object, or the fields that are read here are not of their
    type; all others are the backend's business."""
    if not isinstance(content, dict):
        raise invalid("the body is not a JSON object; send one with 'Content-Type: application/json'")
    model, stream = content.get("model"), content.get("stream")
    if model is not None and not isinstance(model, str):
        raise invalid("'model' is not a text", "model")
    if stream is not None and not isinstance(stream, bool):
        raise invalid("'stream' is neither true nor false", "stream")
    prompts, tokens = (0, 0) if path in _FREE else _prompt(content, len(body))
    previous = content.get("previous_response_id") if path == "/v1/responses" else None
    longest = prompts * _generated(path, content)
    prefix, share = read_prefix(content) if by_prefix else ((), 0.0)
    first = first_values(headers)
    return InferenceRequest(
        id, path, query, headers, body, client, model, bool(stream), tokens, longest, content.get("seed") is not None, tenant, _timeout_s(first),
        _priority(content), prefix, share, _idempotency_key(first, tenant), _last_event_id(first, stream=bool(stream)),
        session_of(first, content, tenant), model, previous[:_LONGEST_SESSION] if isinstance(previous, str) else "",
        longest if path in MAX_TOKENS or _limit(content) is not None else None, content.get("seed") is not None or _is_zero(content.get("temperature")),
        longest_prompt=_longest_prompt(path, content),
    )  # fmt: skip


def for_model(request: InferenceRequest, content: dict[str, Any], model: str | None, *, by_prefix: bool = False) -> InferenceRequest:
    """Returns ``request``, whose body is ``content``, for a model of another name: the body is written anew."""
    if model == request.model:
        return request
    content = {**content, "model": model}
    body = json.dumps(content, separators=(",", ":")).encode()
    return replace(request, model=model, body=body, prefix=read_prefix(content)[0] if by_prefix else ())


def _idempotency_key(headers: Mapping[bytes, bytes], tenant: str) -> str:
    """Returns the header ``Idempotency-Key``, within its tenant; empty if there is none. Raises ``ApiError`` for one that is too long."""
    given = headers.get(b"idempotency-key", b"").decode("latin-1")
    if len(given) > _LONGEST_SESSION:
        raise invalid(f"the header Idempotency-Key has {len(given)} characters; give at most {_LONGEST_SESSION}")
    return f"{tenant}\0{given}" if given else ""


def _last_event_id(headers: Mapping[bytes, bytes], *, stream: bool) -> bytes:
    """Returns the header ``Last-Event-ID``; empty if there is none. Raises ``ApiError`` if the request is not one that can go on."""
    given = headers.get(b"last-event-id", b"")
    if given and not stream:
        raise invalid("the header Last-Event-ID goes on with a stream; set 'stream' to true, or leave it out")
    if given and not headers.get(b"idempotency-key"):
        raise invalid("the header Last-Event-ID needs the Idempotency-Key that the request had before")
    return given


def session_of(headers: Mapping[bytes, bytes], content: dict[str, Any], tenant: str) -> str:
    """Returns the session that a request names, within its tenant; empty if it names none."""
    given: Any = headers.get(b"x-session-id", b"").decode("latin-1")
    if not given:
        given = next((value for name in _SESSION_FIELDS if isinstance(value := content.get(name), str) and value), None)
    return f"{tenant}\0{given[:_LONGEST_SESSION]}" if given else ""


def _timeout_s(headers: Mapping[bytes, bytes]) -> float | None:
    """Returns the header ``X-Request-Timeout``. Raises ``ApiError`` if it is no number of seconds."""
    given = headers.get(b"x-request-timeout")
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise invalid(f"the header X-Request-Timeout is '{given.decode('latin-1')[:40]}'; give a number of seconds above 0")
    return seconds


def _priority(content: dict[str, Any]) -> int:
    """Returns the field ``priority``, vLLM's, which the backend checks."""
    given = content.get("priority")
    return max(-_MOST_PRIORITY, min(_MOST_PRIORITY, given)) if type(given) is int else 0


def _prompt(content: dict[str, Any], body_bytes: int) -> tuple[int, int]:
    """Returns the number of prompts, and of their tokens: counted if they are token ids, else by the length of the body."""
    given = next((content[name] for name in ("prompt", "prompt_token_ids", "input", "tokens") if isinstance(content.get(name), list)), None)
    if not given:
        return 1, body_bytes // BYTES_PER_TOKEN + 1
    if isinstance(given[0], int):
        return 1, len(given)
    if isinstance(given[0], list):
        return len(given), sum(len(each) for each in given if isinstance(each, list))
    return len(given), body_bytes // BYTES_PER_TOKEN + 1


def _longest_prompt(path: str, content: dict[str, Any]) -> int:
    """Returns the length of the longest prompt of token ids, 0 if there is none or it is cut to fit."""
    name = {"/v1/completions": "prompt", "/generate": "prompt_token_ids"}.get(path, "")
    given, sampling = content.get(name), content.get("sampling_params")
    if not isinstance(given, list) or not given or any(isinstance(part, dict) and part.get("truncate_prompt_tokens") for part in (content, sampling)):
        return 0
    return len(given) if isinstance(given[0], int) else max((len(each) for each in given if isinstance(each, list)), default=0)


def _generated(path: str, content: dict[str, Any]) -> int:
    """Returns how many tokens may be generated for each prompt."""
    if path in _NO_GENERATION:
        return 0
    sampling = content.get("sampling_params")
    fields = {**content, **sampling} if isinstance(sampling, dict) else content
    limit = _limit(fields)
    longest = MAX_TOKENS.get(path, OTHER_MAX_TOKENS) if limit is None else limit
    count = fields.get("n")
    return max(0, longest) * (count if type(count) is int and 1 <= count <= 1024 else 1)


def _limit(fields: dict[str, Any]) -> int | None:
    """Returns how many tokens a request lets each completion have, ``None`` if it does not say."""
    return next((fields[name] for name in ("max_completion_tokens", "max_tokens", "max_output_tokens") if type(fields.get(name)) is int), None)


def _is_zero(temperature: Any) -> bool:
    return type(temperature) in (int, float) and temperature == 0
