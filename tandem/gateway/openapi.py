"""The OpenAPI 3.1 description of what the gateway itself answers, at ``/openapi.json``.

Of bodies of inference only the fields are described whose type the gateway checks; all others are the backend's business, and so are answers of 200.
"""

import functools
from typing import Any

import tandem
from tandem.gateway.inference_request import INFERENCE_PATHS
from tandem.serving.errors import is_anthropic

READ_PATHS = ("/liveness", "/readiness", "/health", "/startup", "/version", "/metrics", "/openapi.json", "/v1/models", "/", "/admin")
"""What is answered to GET, without parameters."""
_ADMIN_ACTIONS: dict[str, tuple[str, ...]] = {"drain": ("backend",), "undrain": ("backend",), "update": ("model", "version"), "reload": ()}
"""The fields that each needs, all of them texts."""
_FIELDS = {"model": {"type": ["string", "null"]}, "stream": {"type": ["boolean", "null"]}}
_ERROR = {
    "type": "object", "required": ["error"],
    "properties": {"error": {
        "type": "object", "required": ["message", "type", "param", "code"],
        "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]}},
    }},
}  # fmt: skip
_ANTHROPIC_ERROR = {
    "type": "object", "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"}, "request_id": {"type": "string"},
        "error": {"type": "object", "required": ["type", "message"], "properties": {"type": {"type": "string"}, "message": {"type": "string"}}},
    },
}  # fmt: skip
_REASONS = {
    400: "The request is not right.", 401: "The key is missing, wrong or expired.", 403: "The key does not allow it.", 404: "There is no such thing.",
    405: "The path is answered to another method.", 408: "The request did not arrive in time.", 409: "No backend can go on with the stream.",
    413: "The body is too large.", 429: "A limit, or the queue, is full.", 500: "The backend failed at the request.", 502: "No backend could answer.",
    503: "No backend is ready, or the gateway is shutting down.", 504: "The answer has not begun in the client's time.",
}  # fmt: skip
_OF_INFERENCE = (400, 401, 403, 404, 405, 408, 409, 413, 429, 500, 502, 503, 504)


@functools.cache
def description() -> dict[str, Any]:
    """Returns the description as a JSON object."""
    anything = {"application/json": {"schema": {"type": "object"}}}

    def answers(*statuses: int, of_200: dict[str, Any] = anything, error: str = "Error") -> dict[str, Any]:
        content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{error}"}}}
        refused = {str(status): {"description": _REASONS[status], "content": content} for status in statuses}
        return {"200": {"description": "The answer.", "content": of_200}, **refused}

    paths: dict[str, Any] = {}
    body = {"required": True, "content": {"application/json": {"schema": {"type": "object", "properties": _FIELDS}}}}
    streams = {**anything, "text/event-stream": {"schema": {"type": "string"}}}
    for path in INFERENCE_PATHS:
        passed = answers(*_OF_INFERENCE, of_200=streams, error="AnthropicError" if is_anthropic(path) else "Error")
        headers = [_header("Idempotency-Key", 256), _header("X-Session-Id"), _header("X-Request-Id")]
        paths[path] = {"post": {"operationId": f"post{path.replace('/', '_')}", "requestBody": body, "parameters": headers, "responses": passed}}
    for path in READ_PATHS:
        kind = "text/html" if path in ("/", "/admin") else "text/plain" if path == "/metrics" else "application/json"
        responses = answers(405, of_200={kind: {"schema": {"type": "object" if kind == "application/json" else "string"}}})
        if path in ("/readiness", "/health", "/startup"):
            responses["503"] = {"description": "It takes no requests.", "content": anything}
        paths[path] = {"get": {"operationId": f"get{path.replace('/', '_')}", "responses": responses}}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{model}"] = {"get": {"operationId": "get_model", "parameters": [name], "responses": answers(404, 405)}}
    administration = answers(400, 401, 403, 404, 405, 408, 413, 429)
    paths["/admin/api/state"] = {"get": {"operationId": "admin_state", "responses": administration}}
    for action, fields in _ADMIN_ACTIONS.items():
        schema = {"type": "object", "properties": {field: {"type": "string"} for field in fields}, "required": list(fields)}
        content = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[f"/admin/api/{action}"] = {"post": {"operationId": f"admin_{action}", "requestBody": content, "responses": administration}}
    return {
        "openapi": "3.1.0", "info": {"title": "Tandem gateway", "version": tandem.__version__}, "paths": paths,
        "components": {"schemas": {"Error": _ERROR, "AnthropicError": _ANTHROPIC_ERROR}, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }  # fmt: skip


def _header(name: str, longest: int | None = None) -> dict[str, Any]:
    """Returns an optional header of at most ``longest`` characters."""
    return {"name": name, "in": "header", "required": False, "schema": {"type": "string", **({} if longest is None else {"maxLength": longest})}}
