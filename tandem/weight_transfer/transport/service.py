"""Serves the segments of a pod to other pods, over the protocols that it is asked for, and says where in the coordination store. No torch."""

import logging
from collections.abc import Sequence
from dataclasses import replace

from tandem.runtime.coordination.store import Store
from tandem.runtime.rpc.pod_tls import PodTls
from tandem.types.errors import UserError
from tandem.types.weights import WeightManifest
from tandem.weight_transfer.shared_memory import Segment
from tandem.weight_transfer.transport.endpoints import Endpoint, Holding, Offer, Protocol, endpoint_value, publish_endpoint
from tandem.weight_transfer.transport.mooncake import MooncakeService
from tandem.weight_transfer.transport.tcp_server import WeightServer

logger = logging.getLogger(__name__)


class WeightService:
    """``host``: the address that is listened on; ``advertised``: the one that other pods connect to, ``host`` if empty. ``port``: that of plain TCP, 0
    for any free one. ``lease_s``: of the endpoint in the store. ``tls``: of plain TCP. Raises ``UserError`` if a port cannot be taken, or a protocol is not
    there."""

    def __init__(
        self, pod: str, segments: Sequence[Segment], store: Store, credential: str, protocols: Sequence[Protocol], *,
        host: str = "127.0.0.1", port: int = 0, advertised: str = "", lease_s: float = 15.0, tls: PodTls | None = None,
    ) -> None:  # fmt: skip
        if not advertised and host in ("0.0.0.0", "::", ""):
            raise UserError(f"weights are served on every address ('{host}'); say which one other pods connect to (advertised)")
        self.pod = pod
        self._services: list[WeightServer | MooncakeService] = []
        offers = []
        try:
            for protocol in protocols:
                if protocol == "tcp":
                    server = WeightServer(segments, credential, name=f"the weights of pod {pod}", host=host, port=port, tls=tls)
                    server.start()
                    self._services.append(server)
                    offers.append(Offer("tcp", advertised or host, server.port))
                else:
                    mooncake = MooncakeService(protocol, segments, advertised or host)
                    self._services.append(mooncake)
                    offers.append(mooncake.offer)
        except BaseException:
            self._end()
            raise
        size_bytes = min(segment.size_bytes for segment in segments)
        self.endpoint = Endpoint(pod, tuple(segment.name for segment in segments), size_bytes, tuple(offers))
        self._published = publish_endpoint(store, self.endpoint, lease_s)
        logger.info("weights are served at %s", ", ".join(f"{offer.protocol} {offer.host}:{offer.port}" for offer in offers))

    def serve_too(self, segment: Segment) -> None:
        """Serves one more segment over TCP."""
        for service in self._services:
            if isinstance(service, WeightServer):
                service.serve_too(segment)

    def tell_holding(self, manifest: WeightManifest) -> None:
        """Says in the store that this pod has received ``manifest``, so that others can read it here. It must be in one of the segments."""
        holding = Holding(manifest.tensors[0].segment, *manifest.version, manifest.digest) if manifest.tensors else None
        self.endpoint = replace(self.endpoint, holds=holding)
        self._published.replace(endpoint_value(self.endpoint))

    def close(self) -> None:
        """Takes the endpoint from the store and serves no more."""
        self._published.close()
        self._end()

    def _end(self) -> None:
        for service in self._services:
            service.close()
