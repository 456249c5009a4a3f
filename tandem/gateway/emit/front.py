"""What the configuration of a load balancer in front of several gateways depends on."""

from dataclasses import dataclass
from urllib.parse import urlsplit

from tandem.config.gateway import GatewayConfig
from tandem.types import UserError

MOST_GATEWAYS = 256
PROBE_PATH = "/readiness"
"""A gateway that drains answers it with 503, and finishes its streams."""
PROBE_S, PROBE_FAILURES = 1, 2
RETRIES = 5
"""Attempts to find a gateway that takes a connection. A balancer may choose the dead one again before its probes have failed."""


@dataclass(frozen=True, slots=True)
class Front:
    """``gateways``: host and port of each. ``is_tls``: they are reached over TLS. ``wait_s``: how long neither side of a request may send
    anything, which is more than any wait of the gateways, who are to decide it."""

    gateways: tuple[tuple[str, int], ...]
    is_tls: bool
    host: str
    port: int
    max_body_bytes: int
    connect_s: float
    request_s: float
    wait_s: int


def make_front(config: GatewayConfig, gateways: str) -> Front:
    """Returns the front of ``gateways``, URLs divided by commas, that all have the settings ``config``. Raises ``UserError``."""
    urls = [url.strip() for url in gateways.split(",") if url.strip()]
    if not 1 <= len(urls) <= MOST_GATEWAYS:
        raise UserError(f"--gateways has {len(urls)} addresses; give 1 to {MOST_GATEWAYS}, http://HOST:PORT divided by commas")
    places, schemes = [_place(url) for url in urls], {urlsplit(url).scheme for url in urls}
    if len(schemes) > 1:
        raise UserError("--gateways has http:// and https:// addresses; give one kind")
    if len(set(places)) < len(places):
        twice = next(url for url, place in zip(urls, places, strict=True) if places.count(place) > 1)
        raise UserError(f"--gateways names '{twice}' twice; name each gateway once")
    if config.port == 0:
        raise UserError("'port' is 0; the load balancer needs a port of its own, give it with --port")
    waits = config.timeouts
    longest = max(waits.first_byte_s, waits.idle_s, config.stall_s, config.request_s) + config.queue.max_wait_s
    return Front(
        tuple(places), schemes == {"https"}, config.host, config.port, int(config.max_body_mib * 2**20), waits.connect_s, config.request_s, int(longest) + 1
    )


def _place(url: str) -> tuple[str, int]:
    fix = "write http://HOST:PORT"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UserError(f"--gateways has {url!r}, which is not a URL; {fix}") from None
    host = parts.hostname or ""
    is_plain = not (parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    # What a configuration file takes as a separator cannot be part of a host.
    if parts.scheme not in ("http", "https") or not is_plain or not all(each.isalnum() or each in ".-_:" for each in host) or not host or not host.isascii():
        raise UserError(f"--gateways has {url!r}; {fix}")
    return host, port or (443 if parts.scheme == "https" else 80)


def address(host: str, port: int) -> str:
    """Returns ``host:port``, with the brackets of an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
