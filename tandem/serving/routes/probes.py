"""Probes and metrics: what a load balancer, a supervisor and a dashboard ask."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

import tandem
from tandem.runtime.exposition.text import CONTENT_TYPE
from tandem.serving.state import ServerState

_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def router(state: ServerState) -> APIRouter:
    """All probes; none needs a key."""
    routes = APIRouter(tags=["probes"])

    @routes.get("/liveness")
    async def liveness() -> dict[str, Any]:
        """Returns 200 while the event loop runs, under any load: the answer itself is the proof."""
        return {"status": "alive"}

    @routes.get("/health")
    async def health() -> Response:
        """200 while an engine answers; 503 while the model is loaded for the first time, as clients of vLLM wait for it, and while every engine is dead
        or hung."""
        why = "" if state.is_started and state.pool.has_engine else "no engine answers" if state.is_started else "loading"
        return JSONResponse({"status": why or "healthy"}, 503 if why else 200)

    for method in (routes.get, routes.post):
        # As SageMaker asks, which vLLM answers too.
        method("/ping")(health)

    @routes.get("/readiness")
    async def readiness() -> Response:
        """503 while loading, draining or asleep, and while no engine answers. Asks the engines for a sign of life."""
        state.pool.probe()
        why = state.why_not_ready
        return JSONResponse({"status": why or "ready"}, 503 if why else 200)

    @routes.get("/startup")
    async def startup() -> Response:
        """503 until the model is loaded, 200 ever after."""
        return JSONResponse({"status": "started" if state.is_started else "loading"}, 200 if state.is_started else 503)

    @routes.get("/version")
    async def version() -> dict[str, Any]:
        return {"version": tandem.__version__}

    @routes.get("/metrics", responses=_TEXT, response_model=None)
    async def metrics() -> Response:
        return Response(state.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    return routes
