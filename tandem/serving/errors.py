"""Refusals in OpenAI's shape, ``{"error": {"message", "type", "param", "code"}}``, and in Anthropic's."""

from typing import Any

_MAX_CHARACTERS = 1000


class ApiError(Exception):
    """A request that is answered with an error. ``message``: one line, cut after 1000 characters, as it may quote what the client sent. ``param``:
    the field that is to blame; ``retry_after_s``: when it is worth trying again; ``allow``: the methods that the path is answered to."""

    def __init__(
        self, status: int, message: str, *, kind: str = "invalid_request_error", param: str | None = None, code: str | None = None,
        retry_after_s: int | None = None, allow: str = "",
    ) -> None:
        message = " ".join(message[:_MAX_CHARACTERS].splitlines())
        super().__init__(message)
        self.status, self.message, self.kind, self.param, self.code = status, message, kind, param, code
        self.retry_after_s, self.allow = retry_after_s, allow

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        return {**({} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}), **({"Allow": self.allow} if self.allow else {})}


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


_ANTHROPIC = {404: "not_found_error", 413: "request_too_large", 500: "api_error", 503: "overloaded_error"}


def anthropic_error(error: ApiError) -> dict[str, Any]:
    """Returns ``error`` in the form of Anthropic's API."""
    return {"type": "error", "error": {"type": _ANTHROPIC.get(error.status, error.kind), "message": error.message}}


def error_body(error: ApiError, path: str) -> dict[str, Any]:
    """Returns ``error`` in the form that clients of ``path`` read."""
    return anthropic_error(error) if path.startswith("/v1/messages") else error.body
