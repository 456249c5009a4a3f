"""Refusals in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``, and in Anthropic's."""

from typing import Any

_MAX_CHARACTERS = 1000


class ApiError(Exception):
    """A request that is answered with an error. ``message``: one line, cut after 1000 characters, as it may quote what the client sent. ``param``:
    the field that is to blame; ``retry_after_s``: when it is worth trying again; ``is_final``: it never is, which clients of OpenAI and Anthropic would
    not know of status 429; ``allow``: the methods that the path is answered to."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None,
        retry_after_s: int | None = None, allow: str = "", is_final: bool = False,
    ) -> None:
        message = " ".join(message[:_MAX_CHARACTERS].splitlines())
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after_s, self.allow, self.is_final = retry_after_s, allow, is_final

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        retry = {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}
        return {**retry, **({"X-Should-Retry": "false"} if self.is_final else {}), **({"Allow": self.allow} if self.allow else {})}


class ClientLeft(Exception):
    """Raised where the client of a request has left before its answer."""


def invalid(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def wrong_method(path: str, *methods: str) -> ApiError:
    """Returns the error for a request with another method than ``methods``."""
    return ApiError(405, f"{path[:100]} is answered to {' and '.join(methods)}", code="method_not_allowed", allow=", ".join(methods))


def unauthorised(message: str) -> ApiError:
    return ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def overloaded(message: str) -> ApiError:
    return ApiError(429, message, kind="rate_limit_error", code="queue_full", retry_after_s=1)


def unavailable(message: str, retry_after_s: int = 1) -> ApiError:
    return ApiError(503, message, kind="service_unavailable_error", retry_after_s=retry_after_s)


def internal(message: str) -> ApiError:
    return ApiError(500, message, kind="internal_error")


_ANTHROPIC = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error",
    500: "api_error", 502: "api_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip


def anthropic_error(error: ApiError, request_id: str = "") -> dict[str, Any]:
    """Returns ``error`` in the form of Anthropic's API, with the id of the request if there is one."""
    kind = _ANTHROPIC.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, **({"request_id": request_id} if request_id else {})}


def error_body(error: ApiError, path: str, request_id: str = "") -> dict[str, Any]:
    """Returns ``error`` in the form that clients of ``path`` read."""
    return anthropic_error(error, request_id) if is_anthropic(path) else error.body


def is_anthropic(path: str) -> bool:
    """Returns whether clients of ``path`` are those of Anthropic's API."""
    return path.startswith("/v1/messages")


def id_headers(path: str, request_id: str) -> list[tuple[bytes, bytes]]:
    """Returns the headers that say the id of a request; Anthropic's clients read another one."""
    id = request_id.encode()
    return [(b"x-request-id", id), *([(b"request-id", id)] if is_anthropic(path) else [])]
