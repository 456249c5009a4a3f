"""The dashboard's pages and what they ask for: small JSON answers, all of them GET."""

import json
import math
from collections.abc import Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from tandem.dashboard.curves import curves
from tandem.dashboard.guard import Guard, error_response
from tandem.dashboard.hardware import hardware, hardware_curves
from tandem.dashboard.logs import log_files, log_part
from tandem.dashboard.overview import comparison, overview
from tandem.dashboard.phase_answers import phase_detail, phase_window, trace_window
from tandem.dashboard.query import axis, integer, number, text
from tandem.dashboard.runs import Runs
from tandem.dashboard.samples import Filter, one_sample, search, step_samples
from tandem.dashboard.stream import list_events, run_events
from tandem.gateway.pages import PageFiles, assets_of
from tandem.report.compare import MOST_RUNS
from tandem.types import RunError, UserError

SHARED = ("dom.js", "events.js", "page.css", "icon.svg")
"""Files of the gateway's pages that these pages use too."""
_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Cross-Origin-Resource-Policy": "same-origin"}
MOST_LINES = 500
"""Of the charts of hardware in one request: those of several ranks and workers in two charts."""
Answer = Callable[[Runs, Request], Any]


def make_app(runs: Runs, token: str) -> ASGIApp:
    """Returns the application of the dashboard of ``runs``; ``token`` is what clients need, empty on a loopback address."""
    shared = assets_of("tandem.gateway")
    pages = PageFiles({"/": "dashboard.html"}, {**assets_of("tandem.dashboard"), **{name: shared[name] for name in SHARED}}, "'none'")

    async def page(request: Request) -> Response:
        found = pages.answer(request.url.path, request.scope["headers"])
        return found or error_response(404, f"there is no {request.url.path[:200]}")

    routes = [Route(f"/api/{name}", _endpoint(runs, answer)) for name, answer in ANSWERS.items()]
    return Guard(Starlette(routes=[*routes, Route("/api/stream", _stream(runs)), Route("/health", _health), Route("/{path:path}", page)]), token)


def _endpoint(runs: Runs, answer: Answer) -> Callable[[Request], Any]:
    async def endpoint(request: Request) -> Response:
        try:
            found = await run_in_threadpool(answer, runs, request)
        except RunError as error:  # One of them is a UserError.
            return error_response(409, str(error))
        except UserError as error:
            return error_response(404, str(error))
        except OSError as error:
            return error_response(409, f"'{error.filename}': {error.strerror or error}" if error.filename else str(error.strerror or error))
        return Response(await run_in_threadpool(to_json, found), headers=_HEADERS, media_type="application/json")

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


def to_json(value: Any) -> bytes:
    """Returns ``value`` as JSON, with words in the place of numbers that JSON has not."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False, default=str).encode()
    except ValueError:
        return json.dumps(_without_nan(value), separators=(",", ":"), allow_nan=False, default=str).encode()


def _without_nan(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _without_nan(inner) for key, inner in value.items()}
    return [_without_nan(inner) for inner in value] if isinstance(value, list | tuple) else value


# -- the answers -------------------------------------------------------------------------------------------------------


def _runs(runs: Runs, request: Request) -> Any:
    return {"folder": str(runs.folder), "runs": runs.list()}


def _run(runs: Runs, request: Request) -> Any:
    return overview(runs.open(text(request, "run")))


def _curves(runs: Runs, request: Request) -> Any:
    run = runs.open(text(request, "run"))
    keys = request.query_params.getlist("key")
    return curves(run, keys, number(request, "from"), number(request, "to"), integer(request, "points") or 1000, axis(request))


def _hardware(runs: Runs, request: Request) -> Any:
    return hardware(runs.open(text(request, "run")))


def _hardware_curves(runs: Runs, request: Request) -> Any:
    keys = request.query_params.getlist("key")[:MOST_LINES]
    return hardware_curves(runs.open(text(request, "run")), keys, number(request, "from"), number(request, "to"), integer(request, "points") or 200)


def _compare(runs: Runs, request: Request) -> Any:
    names = list(dict.fromkeys(request.query_params.getlist("run")))
    if not 2 <= len(names) <= MOST_RUNS:
        raise UserError(f"{len(names)} runs are named; a comparison has 2 to {MOST_RUNS}")
    return comparison([runs.open(name) for name in names])


def _phases(runs: Runs, request: Request) -> Any:
    return phase_window(runs.open(text(request, "run")), number(request, "from"), number(request, "to"), integer(request, "step"))


def _phase(runs: Runs, request: Request) -> Any:
    return phase_detail(runs.open(text(request, "run")), integer(request, "id") or 0)


def _trace(runs: Runs, request: Request) -> Any:
    return trace_window(runs.open(text(request, "run")), integer(request, "step") or 0)


def _filter(request: Request) -> Filter:
    return Filter(text(request, "text", ""), text(request, "only", ""))


def _samples(runs: Runs, request: Request) -> Any:
    offset, limit = integer(request, "offset") or 0, min(integer(request, "limit") or 20, 100)
    return step_samples(runs.open(text(request, "run")), integer(request, "step"), _filter(request), offset, limit)


def _search(runs: Runs, request: Request) -> Any:
    same_id, same_step = text(request, "same_id", ""), integer(request, "same_step")
    same_as = (same_step, same_id) if same_id and same_step is not None else None
    return search(runs.open(text(request, "run")), _filter(request), integer(request, "before"), same_as, min(integer(request, "limit") or 40, 200))


def _sample(runs: Runs, request: Request) -> Any:
    return one_sample(runs.open(text(request, "run")), integer(request, "step") or 0, text(request, "id"))


def _logs(runs: Runs, request: Request) -> Any:
    return {"files": log_files(runs.open(text(request, "run")).directory)}


def _log(runs: Runs, request: Request) -> Any:
    return log_part(runs.open(text(request, "run")).directory, text(request, "file"), integer(request, "before"), text(request, "text", ""))


ANSWERS: dict[str, Answer] = {
    "runs": _runs, "run": _run, "curves": _curves, "compare": _compare, "phases": _phases, "phase": _phase, "trace": _trace, "samples": _samples,
    "hardware": _hardware, "hardware_curves": _hardware_curves, "search": _search, "sample": _sample, "logs": _logs, "log": _log,
}  # fmt: skip
