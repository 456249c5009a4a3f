"""A configuration of Envoy (API v3) in front of several gateways."""

from typing import Any

import yaml

from tandem.gateway.emit.front import PROBE_FAILURES, PROBE_PATH, PROBE_S, RETRIES, Front

_HEAD = "# From `tandem gateway --emit envoy`. Check it with: envoy --mode validate -c envoy.yaml\n"
_TYPES = "type.googleapis.com/envoy.extensions"
_MOST = 1_000_000


def envoy(front: Front) -> str:
    """Returns the content of ``envoy.yaml``."""
    resources = {"static_resources": {"listeners": [_listener(front)], "clusters": [_cluster(front)]}}
    return _HEAD + yaml.safe_dump(resources, sort_keys=False)


def _listener(front: Front) -> dict[str, Any]:
    route = {
        "match": {"prefix": "/"},
        "route": {
            "cluster": "gateways",
            # How long an answer may take is the gateways' to decide.
            "timeout": "0s",
            "idle_timeout": f"{front.wait_s}s",
            # Only what no gateway has seen is sent to another one: the rest the gateways repeat themselves.
            "retry_policy": {
                "retry_on": "connect-failure,refused-stream,reset-before-request",
                "num_retries": RETRIES,
                "host_selection_retry_max_attempts": RETRIES,
                "retry_host_predicate": [_named("envoy.retry_host_predicates.previous_hosts", "retry.host.previous_hosts.v3.PreviousHostsPredicate")],
            },
        },
    }
    manager = {
        **_type("filters.network.http_connection_manager.v3.HttpConnectionManager"),
        "stat_prefix": "clients",
        # Adds the client's address to X-Forwarded-For, for 'trusted_proxies' of the gateways.
        "use_remote_address": True,
        "stream_idle_timeout": f"{front.wait_s}s",
        "request_headers_timeout": f"{front.request_s:g}s",
        "route_config": {"name": "gateways", "virtual_hosts": [{"name": "gateways", "domains": ["*"], "routes": [route]}]},
        "http_filters": [_named("envoy.filters.http.router", "filters.http.router.v3.Router")],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    return {"name": "clients", "address": _address(front.host, front.port), "filter_chains": [chain]}


def _cluster(front: Front) -> dict[str, Any]:
    limits = {"max_connections": _MOST, "max_pending_requests": _MOST, "max_requests": _MOST, "max_retries": 1000}
    probe = {
        "timeout": f"{PROBE_S}s", "interval": f"{PROBE_S}s", "unhealthy_threshold": PROBE_FAILURES, "healthy_threshold": 1,
        # Without it a gateway without requests is probed once a minute.
        "no_traffic_interval": f"{PROBE_S / 2:g}s", "no_traffic_healthy_interval": f"{PROBE_S}s",
        "http_health_check": {"path": PROBE_PATH},
    }  # fmt: skip
    tls = {"transport_socket": _tls(front)} if front.is_tls else {}
    return {
        "name": "gateways",
        "type": "STRICT_DNS",
        "lb_policy": "LEAST_REQUEST",
        "connect_timeout": f"{front.connect_s:g}s",
        "circuit_breakers": {"thresholds": [limits]},
        # If no gateway is ready, a request is refused at once and not sent to one that is not.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "health_checks": [probe],
        **tls,
        "load_assignment": {
            "cluster_name": "gateways",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(*place)}} for place in front.gateways]}],
        },
    }


def _tls(front: Front) -> dict[str, Any]:
    authorities = {"trusted_ca": {"filename": "/etc/ssl/certs/ca-certificates.crt"}}
    context = {
        **_type("transport_sockets.tls.v3.UpstreamTlsContext"), "auto_host_sni": True, "auto_sni_san_validation": True,
        "common_tls_context": {"validation_context": authorities},
    }  # fmt: skip
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def _named(name: str, kind: str) -> dict[str, Any]:
    return {"name": name, "typed_config": _type(kind)}


def _type(kind: str) -> dict[str, str]:
    return {"@type": f"{_TYPES}.{kind}"}
