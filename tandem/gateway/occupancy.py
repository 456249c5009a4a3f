"""What a gateway holds at the moment, for operators who look for what is never given back."""

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.gateway.connector import SilentConnector

if TYPE_CHECKING:
    from tandem.gateway.app import GatewayState
    from tandem.gateway.upstream import Upstream


class Occupancy(Collector):
    """Gauges that are read when they are asked for. All but ``tasks`` and idle connections are 0 in an idle gateway."""

    def __init__(self, state: "GatewayState", connector: SilentConnector, upstream: "Upstream") -> None:
        self._state, self._connector, self._upstream = state, connector, upstream

    def describe(self) -> Iterator[GaugeMetricFamily]:
        """Returns no names: nothing has to be read before the gateway serves."""
        yield from ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self._state
        for name, text, value in (
            ("tasks", "Tasks of the event loop: those of the gateway itself and a few for each request.", len(asyncio.all_tasks())),
            ("open_requests", "Requests of clients that are received, wait or are answered.", state.open_requests),
            ("client_connections", "Connections that clients have open.", state.connections.count),
            ("unfinished_body_bytes", "Of bodies that are not complete yet, beyond what every body may have.", state.bodies.held_bytes),
            ("reservations", "Requests whose share of a limit is reserved and not settled.", state.limits.reservations),
        ):
            yield GaugeMetricFamily(f"tandem_gateway_{name}", text, value)
        connections = GaugeMetricFamily("tandem_gateway_backend_connections", "Connections to backends.", labels=("state",))
        connections.add_metric(["busy"], self._connector.busy + self._upstream.busy)
        connections.add_metric(["idle"], self._connector.idle + self._upstream.idle)
        yield connections
