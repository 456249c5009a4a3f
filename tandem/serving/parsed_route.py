"""FastAPI routes that take the body that ``BodyParser`` has parsed."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from tandem.serving.json_body import PARSED


class ParsedRequest(Request):
    """A request whose body ``BodyParser`` has parsed."""

    async def json(self) -> Any:
        return self.scope[PARSED] if PARSED in self.scope else await super().json()


class ParsedRoute(APIRoute):
    """A route that takes the parsed body from the scope."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            return await handler(ParsedRequest(request.scope, request.receive))

        return handle
