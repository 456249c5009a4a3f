"""The dashboard's pages and what they ask for: small JSON answers, all of them GET."""

from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tandem.dashboard.answers import ANSWERS, Answer, to_json
from tandem.dashboard.guard import Guard, error_response
from tandem.dashboard.page_file import dashboard_assets
from tandem.dashboard.runs import Runs
from tandem.dashboard.stream import list_events, run_events
from tandem.gateway.pages import PageFiles
from tandem.report.differences import MOST_RUNS
from tandem.types import RunError, UserError

_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}


def make_app(runs: Runs, token: str) -> ASGIApp:
    """Returns the application of the dashboard of ``runs``; ``token`` is what clients need, empty on a loopback address."""
    pages = PageFiles({"/": "dashboard.html"}, dashboard_assets(), "'none'")

    async def page(request: Request) -> Response:
        answered = pages.answer(request.url.path, request.scope["headers"])
        return answered or error_response(404, f"there is no {request.url.path[:200]}")

    routes = [Route(f"/api/{name}", _endpoint(runs, answer)) for name, answer in ANSWERS.items()]
    return Guard(Starlette(routes=[*routes, Route("/api/stream", _stream(runs)), Route("/health", _health), Route("/{path:path}", page)]), token)


def _endpoint(runs: Runs, answer: Answer) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            answered = await run_in_threadpool(answer, runs, {name: request.query_params.getlist(name) for name in request.query_params})
        except RunError as error:  # One of them is a UserError.
            return error_response(409, str(error))
        except UserError as error:
            return error_response(404, str(error))
        except OSError as error:
            return error_response(409, f"'{error.filename}': {error.strerror or error}" if error.filename else str(error.strerror or error))
        return Response(await run_in_threadpool(to_json, answered), headers=_HEADERS, media_type="application/json")

    return endpoint


def _stream(runs: Runs) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        names = request.query_params.getlist("run")
        try:
            opened = [await run_in_threadpool(runs.open, name) for name in names[:MOST_RUNS]]
        except UserError as error:
            return error_response(404, str(error))
        events = run_events(opened) if names else list_events(runs)
        return StreamingResponse(events, headers={**_HEADERS, "X-Accel-Buffering": "no"}, media_type="text/event-stream")

    return endpoint


async def _health(request: Request) -> Response:
    return Response(b'{"status":"ok"}', headers=_HEADERS, media_type="application/json")
