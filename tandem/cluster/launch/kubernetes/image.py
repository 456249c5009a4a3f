"""Asks the registry of an image whether it has it, so that no pods wait for a misspelt name. A registry that wants a login, or is not reached from here, may
well be reached from the nodes: then nothing is said."""

import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass

from tandem.types import UserError

_TIMEOUT_S = 10.0
_FORMS = (
    "application/vnd.oci.image.index.v1+json, application/vnd.oci.image.manifest.v1+json, "
    "application/vnd.docker.distribution.manifest.list.v2+json, application/vnd.docker.distribution.manifest.v2+json"
)
_MOST_BYTES = 2**20
_REFERENCE = re.compile(
    r"(?:(?P<host>[a-zA-Z0-9.-]+\.[a-zA-Z0-9-]+(?::\d+)?|localhost(?::\d+)?|[a-zA-Z0-9-]+:\d+)/)?"
    r"(?P<name>[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*)(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)


@dataclass(frozen=True, slots=True)
class Image:
    """``host``: of the registry, with its port. ``name``: the repository there. ``version``: a tag or a digest."""

    host: str
    name: str
    version: str


def parse_image(text: str) -> Image:
    """Returns the parts of a reference as Kubernetes reads it. Raises ``UserError``."""
    match = _REFERENCE.fullmatch(text)
    if match is None:
        raise UserError(f"'kubernetes.image' is '{text}', which is not the name of an image; write it as REGISTRY/NAME:TAG")
    host, name = match["host"] or "registry-1.docker.io", match["name"]
    if host in ("docker.io", "index.docker.io"):
        host = "registry-1.docker.io"
    if host == "registry-1.docker.io" and "/" not in name:
        name = f"library/{name}"
    return Image(host, name, match["digest"] or match["tag"] or "latest")


def check_image(text: str, context: ssl.SSLContext | None = None) -> None:
    """Raises ``UserError`` if the registry says that it does not have the image ``text``. ``context``: for a registry of an authority of its own."""
    image = parse_image(text)
    address = f"https://{image.host}/v2/{image.name}/manifests/{image.version}"
    try:
        status, challenge = _ask(address, {}, context)
        if status == 401 and (token := _token(challenge, context)):
            status, _ = _ask(address, {"Authorization": f"Bearer {token}"}, context)
    except (OSError, ValueError):
        return
    if status == 404:
        raise UserError(f"'kubernetes.image' is '{text}', which registry {image.host} does not have; push it, or correct the name")


def _ask(address: str, headers: dict[str, str], context: ssl.SSLContext | None) -> tuple[int, str]:
    """Returns the status of the answer, and what the registry wants to be shown."""
    request = urllib.request.Request(address, headers={"Accept": _FORMS, **headers}, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as reply:
            return int(reply.status), ""
    except urllib.error.HTTPError as error:
        return error.code, error.headers.get("WWW-Authenticate", "")


def _token(challenge: str, context: ssl.SSLContext | None) -> str:
    """Returns the token that anybody is given for an image that anybody may pull; empty without one."""
    if not challenge.lower().startswith("bearer "):
        return ""
    facts = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    realm = facts.pop("realm", "")
    if not realm.startswith("https://"):
        return ""
    query = urllib.parse.urlencode({key: facts[key] for key in ("service", "scope") if key in facts})
    try:
        with urllib.request.urlopen(f"{realm}?{query}", timeout=_TIMEOUT_S, context=context) as reply:
            data = json.loads(reply.read(_MOST_BYTES))
    except urllib.error.HTTPError:
        return ""
    return str(data.get("token") or data.get("access_token") or "") if isinstance(data, dict) else ""
