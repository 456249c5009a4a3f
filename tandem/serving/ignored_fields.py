"""Names, in a header of the answer, the fields of a request that are ignored, or have no effect."""

from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from tandem.serving.protocol import Body

WARNING = "X-Tandem-Warning"
_MOST_FIELDS = 20
_LONGEST_NAME = 60


def warn_of(request: Request, text: str) -> None:
    """Notes ``text``, in printable ASCII, for the header of the answer to ``request``."""
    request.state.warning = text


def warned(body: Body, response: Response, request: Request | None = None) -> Response:
    """Returns ``response`` with the header ``X-Tandem-Warning`` if ``body`` has fields that are not read, as OpenAI's clients of later versions send, or
    something was noted of ``request``."""
    noted = None if request is None else getattr(request.state, "warning", None)
    if noted is not None:
        response.headers[WARNING] = noted
    names = list(_ignored(body, ""))
    if names:
        shown = ", ".join(f"'{name}'" for name in names[:_MOST_FIELDS])
        more = f" and {len(names) - _MOST_FIELDS} more" if len(names) > _MOST_FIELDS else ""
        ignored = f"ignored: unknown field{'s' if len(names) > 1 else ''} {shown}{more}"
        response.headers[WARNING] = ignored if noted is None else f"{noted}; {ignored}"
    return response


def _ignored(body: Body, where: str) -> Iterator[str]:
    for name, value in (body.model_extra or {}).items():
        if value is not None and name not in body.not_supported:
            yield _printable(where + name)
    for name in type(body).model_fields:
        inner = getattr(body, name)
        # The fields of a message are for the chat template.
        if isinstance(inner, Body):
            yield from _ignored(inner, f"{where}{name}.")


def _printable(name: str) -> str:
    """Returns ``name`` as a header may have it."""
    text = "".join(c if " " <= c <= "~" else "?" for c in name)
    return text if len(text) <= _LONGEST_NAME else f"{text[:_LONGEST_NAME]}..."
