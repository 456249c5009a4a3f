"""The prefix that a proxy gives to all paths of a server."""

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that removes ``prefix`` from paths before anything reads them, keys included. Paths without it, from which the proxy has removed it,
    stay as they are."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == self._prefix or path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :] or "/"}
        await self._app(scope, receive, send)


def serve_docs(app: FastAPI, prefix: str) -> None:
    """Adds ``/docs``, the page of the API, which reads the schema at its path behind ``prefix``."""

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(openapi_url=f"{prefix}{app.openapi_url}", title=f"{app.title} - API")
