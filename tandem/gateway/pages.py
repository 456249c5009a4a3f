"""The gateway's pages: files of the package, sent with headers that let them load and run nothing else."""

import functools
import hashlib
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.responses import Response

from tandem.gateway.headers import Headers

PAGES = {"/": "chat.html", "/admin": "admin.html"}
"""The pages by their paths."""
ASSETS = "/assets/"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "LICENSE": "text/plain"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types "
)
"""Content Security Policy (level 3) and Trusted Types: no inline script or style, nothing from another host, no frame around the page, and no text that is
read as HTML but by the policies that are named at its end."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class PageFiles:
    """Pages and their files, of which only these are ever sent, whatever a path says.

    Args:
        pages: the files that are pages, by their paths.
        content: each file by its name below ``assets/``.
        trusted_types: the policies of Trusted Types that may make HTML, ``'none'`` without one.
    """

    def __init__(self, pages: Mapping[str, str], content: Mapping[str, Traversable], trusted_types: str) -> None:
        self._pages = pages
        self._headers = {**_HEADERS, "Content-Security-Policy": _POLICY + trusted_types}
        self._files = {name: (body := each.read_bytes(), f'"{hashlib.sha256(body).hexdigest()[:32]}"') for name, each in content.items()}

    def answer(self, path: str, request: Headers) -> Response | None:
        """Returns the answer to a GET of ``path`` if a page or a file of a page is there, else ``None``. ``request``: its headers; a browser that has the
        file already is told so."""
        name = self._pages.get(path) or (path.removeprefix(ASSETS) if path.startswith(ASSETS) else None)
        content = self._files.get(name) if name else None
        if name is None or content is None:
            return None
        body, tag = content
        headers = {**self._headers, "ETag": tag}
        if any(key == b"if-none-match" and tag.encode() in value for key, value in request):
            return Response(status_code=304, headers=headers)
        return Response(body, headers=headers, media_type=_KINDS[name.rpartition(".")[2]])


def assets_of(package: str) -> dict[str, Traversable]:
    """Returns the files of the pages of ``package`` by their names below its folder ``assets``."""
    root = files(package).joinpath("assets")
    there = {each.name: each for each in root.iterdir() if each.is_file()}
    return there | {f"vendor/{each.name}": each for each in root.joinpath("vendor").iterdir()}


@functools.cache
def _files() -> PageFiles:
    # The policy `worker` knows one file.
    return PageFiles(PAGES, assets_of("tandem.gateway"), "dompurify worker")


def page(path: str, request: Headers) -> Response | None:
    """Returns the answer to a GET of ``path`` if a page of the gateway or a file of one is there, else ``None``."""
    return _files().answer(path, request)
