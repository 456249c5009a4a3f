"""A configuration of nginx (1.18 or later) in front of several gateways."""

from tandem.gateway.emit.front import PROBE_S, Front, address


def nginx(front: Front) -> str:
    """Returns the content of a file of ``conf.d``, which ``nginx.conf`` includes in its section ``http``."""
    servers = "\n".join(f"    server {address(*place)} max_fails=1 fail_timeout={PROBE_S}s;" for place in front.gateways)
    scheme, tls = ("https", _TLS) if front.is_tls else ("http", "")
    return f"""\
# From `tandem gateway --emit nginx`, for conf.d. Check it with: nginx -t
# nginx without a subscription does not probe: a gateway that cannot be reached is left out for {PROBE_S} s.
# Take one that is to drain out of this file first.
upstream tandem_gateways {{
    least_conn;
{servers}
    keepalive 256;
}}

server {{
    listen {address("" if front.host == "0.0.0.0" else front.host, front.port).lstrip(":")};
    client_max_body_size {front.max_body_bytes};
    client_header_timeout {_milliseconds(front.request_s)};
    client_body_timeout {_milliseconds(front.request_s)};
    gzip off;

    location / {{
        proxy_pass {scheme}://tandem_gateways;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $http_host;
        # The client's address, for 'trusted_proxies' of the gateways.
        proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
        # Tokens are passed on as they come, and a long prompt too.
        proxy_buffering off;
        proxy_request_buffering off;
        proxy_connect_timeout {_milliseconds(front.connect_s)};
        # How long an answer may take is the gateways' to decide.
        proxy_read_timeout {front.wait_s}s;
        proxy_send_timeout {front.wait_s}s;
        send_timeout {front.wait_s}s;
        # Only what no gateway has seen is sent to another one: the rest the gateways repeat themselves.
        proxy_next_upstream error;
{tls}    }}
}}
"""


_TLS = """\
        proxy_ssl_verify on;
        proxy_ssl_server_name on;
        proxy_ssl_trusted_certificate /etc/ssl/certs/ca-certificates.crt;
"""


def _milliseconds(value: float) -> str:
    return f"{max(1, round(1000 * value))}ms"
