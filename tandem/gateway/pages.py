"""The gateway's pages: files of the package, sent with headers that let them load and run nothing else."""

import functools
import hashlib
from importlib.resources import files

from starlette.responses import Response

from tandem.gateway.headers import Headers

PAGES = {"/": "chat.html", "/admin": "admin.html"}
"""The pages by their paths."""
ASSETS = "/assets/"
_KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "LICENSE": "text/plain"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types dompurify worker"
)
"""Content Security Policy (level 3) and Trusted Types: no inline script or style, nothing from another host, no frame around the page, and no text that is
read as HTML but by DOMPurify. The policy ``worker`` knows one file."""
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


def page(path: str, request: Headers) -> Response | None:
    """Returns the answer to a GET of ``path`` if a page or a file of a page is there, else ``None``. ``request``: its headers; a browser that has the file
    already is told so."""
    name = PAGES.get(path) or (path.removeprefix(ASSETS) if path.startswith(ASSETS) else None)
    content = _files().get(name) if name else None
    if name is None or content is None:
        return None
    body, tag = content
    headers = {**_HEADERS, "ETag": tag}
    if any(key == b"if-none-match" and tag.encode() in value for key, value in request):
        return Response(status_code=304, headers=headers)
    return Response(body, headers=headers, media_type=_KINDS[name.rpartition(".")[2]])


@functools.cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Returns the content and the entity tag of each file by its name below ``assets``. Only these are ever sent, whatever a path says."""
    root = files("tandem.gateway").joinpath("assets")
    there = {each.name: each for each in root.iterdir() if each.is_file()}
    there |= {f"vendor/{each.name}": each for each in root.joinpath("vendor").iterdir()}
    return {name: (body := each.read_bytes(), f'"{hashlib.sha256(body).hexdigest()[:32]}"') for name, each in there.items()}
