"""Who is an administrator where the gateway has no keys: a program or a page of this machine, and no page of the web."""

import ipaddress
from urllib.parse import urlsplit

from tandem.gateway.headers import Headers
from tandem.serving.errors import ApiError

_FORWARDED = (b"forwarded", b"via", b"x-real-ip")
_HOW = "give the gateway a keys_file and make a key for it: tandem keys create --role admin --tenant NAME --file FILE"


def check_local(headers: Headers, client: str, *, changes: bool) -> None:
    """Raises ``ApiError`` for a request that is not certainly the doing of somebody at this machine.

    It must come from a loopback address, through no proxy, whose clients all seem to be local. Its ``Host`` must be a loopback name: a page whose name was
    made to point here after it was loaded (DNS rebinding) sends that name. One that ``changes`` something must be JSON by its Content-Type, which a page of
    another origin may not send without a preflight request, which is never granted; and its ``Origin``, if it has one, must be that of ``Host``."""
    if not _is_loopback(client) or any(name in _FORWARDED or name.startswith(b"x-forwarded-") for name, _ in headers):
        raise _refused(f"the administration is open to this machine alone while the gateway has no keys; {_HOW}")
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not _is_loopback(_host(f"//{hosts[0]}")):
        raise _refused(f"the administration is reached as localhost or 127.0.0.1 while the gateway has no keys; {_HOW}")
    if not changes:
        return
    kinds = [value.partition(b";")[0].strip().lower() for name, value in headers if name == b"content-type"]
    if kinds != [b"application/json"]:
        raise _refused("a change is asked for with 'Content-Type: application/json'")
    origins = [value.decode("latin-1") for name, value in headers if name == b"origin"]
    if any(urlsplit(origin).netloc != hosts[0] for origin in origins):
        raise _refused("a page of another origin asks for a change")


def _refused(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="not_an_administrator")


def _host(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
