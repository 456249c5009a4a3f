"""A configuration of HAProxy (2.6 or later) in front of several gateways."""

from tandem.gateway.emit.front import PROBE_FAILURES, PROBE_PATH, PROBE_S, RETRIES, Front, address


def haproxy(front: Front) -> str:
    """Returns the content of ``haproxy.cfg``."""
    tls = " ssl verify required ca-file @system-ca" if front.is_tls else ""
    servers = "\n".join(f"    server gateway-{number} {address(*place)} check" for number, place in enumerate(front.gateways, 1))
    return f"""\
# From `tandem gateway --emit haproxy`. Check it with: haproxy -c -f haproxy.cfg
defaults
    mode http
    timeout connect {_seconds(front.connect_s)}
    timeout http-request {_seconds(front.request_s)}
    # How long an answer may take is the gateways' to decide.
    timeout client {front.wait_s}s
    timeout server {front.wait_s}s
    # Tokens are passed on as they come.
    option http-no-delay
    # Only what no gateway has seen is sent to another one: the rest the gateways repeat themselves.
    option redispatch 1
    retries {RETRIES}
    retry-on conn-failure
    # The client's address, for 'trusted_proxies' of the gateways.
    option forwardfor

frontend clients
    bind {address("" if front.host == "0.0.0.0" else front.host, front.port)}
    http-request deny deny_status 413 if {{ req.body_size gt {front.max_body_bytes} }}
    default_backend gateways

backend gateways
    balance leastconn
    option httpchk GET {PROBE_PATH}
    http-check expect status 200
    default-server inter {PROBE_S}s fall {PROBE_FAILURES} rise 1{tls}
{servers}
"""


def _seconds(value: float) -> str:
    return f"{max(1, round(1000 * value))}ms"
