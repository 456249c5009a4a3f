"""The settings of the gateways of an emitted inference topology, and of the load balancer in front of them."""

from collections.abc import Sequence
from typing import Any

import yaml

from tandem.config.gateway import BackendConfig, GatewayConfig
from tandem.config.load import build
from tandem.gateway.emit.envoy import envoy
from tandem.gateway.emit.front import make_front

HEAD = "# Written by 'tandem emit'.\n"
KEYS_HINT = "# Without 'keys_file' (see 'tandem keys create') every client that reaches the load balancer is served.\n"


def gateway_settings(
    engines: Sequence[str], port: int, trusted_proxies: Sequence[str], *, host: str = "0.0.0.0", jaeger: str = "", engine_key: str = "",
    folders: dict[str, str] | None = None, replicas: int = 0,
) -> dict[str, Any]:  # fmt: skip
    """Returns the settings of a gateway in front of ``engines``, their URLs. ``trusted_proxies``: networks in which the load balancer is. ``jaeger``: the
    address of a collector of traces, if there is one. ``engine_key``: the file with the key that engines ask for. ``folders``: keys of the gateway that name
    folders. ``replicas``: how many engines answer at each URL, behind a proxy that is not Tandem's; 0: one, without such a proxy."""
    more: dict[str, Any] = {"api_key_file": engine_key} if engine_key else {}
    if replicas:
        more |= {"replicated": True, "max_requests": replicas * BackendConfig(engines[0]).max_requests}
    settings = {
        "host": host, "port": port, "trusted_proxies": list(trusted_proxies),
        "backends": [{"url": url, "name": f"engine-{number}", **more} for number, url in enumerate(engines)],
        **({"traces": {"endpoint": jaeger}} if jaeger else {}), **(folders or {}),
    }  # fmt: skip
    build(GatewayConfig, settings)
    return settings


def gateway_file(settings: dict[str, Any]) -> str:
    """Returns the text of ``gateway.yaml``."""
    return HEAD + KEYS_HINT + yaml.safe_dump(settings, sort_keys=False)


def envoy_file(settings: dict[str, Any], gateways: Sequence[str], port: int, host: str = "0.0.0.0") -> str:
    """Returns the text of ``envoy.yaml``, in front of ``gateways``, their URLs, which have ``settings``."""
    return envoy(make_front(build(GatewayConfig, {**settings, "host": host, "port": port}), ",".join(gateways)))
