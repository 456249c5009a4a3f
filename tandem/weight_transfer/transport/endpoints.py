"""Where the weights of a pod can be read by others: one key for each pod in the coordination store, beside the manifest. No torch."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from tandem.runtime.coordination.leased_key import LeasedKey
from tandem.runtime.coordination.store import Store
from tandem.types.errors import RunError, UserError
from tandem.types.sample import WeightVersion
from tandem.weight_transfer.shared_memory import Contents

Protocol = Literal["rdma", "mooncake", "tcp"]
"""What carries the bytes: Mooncake over RDMA, Mooncake over TCP, or plain TCP. The first that both pods have is used."""
PROTOCOLS: tuple[Protocol, ...] = get_args(Protocol)
PREFIX = "weights/endpoints/"


@dataclass(frozen=True, slots=True)
class Offer:
    """One protocol of a pod. ``addresses``: of each of its segments in the memory of the process that serves them, for protocols that read by address."""

    protocol: Protocol
    host: str
    port: int
    addresses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Holding:
    """Weights that a pod has received, in ``segment``: the step and incarnation of their version, and the digest of their manifest."""

    segment: str
    incarnation: int
    step: int
    digest: str


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The segments that ``pod`` serves, each of ``size_bytes``, and how. ``holds``: what it has received from others. A segment's name has the process and
    inode of its owner, so a key that a dead pod has left behind is never taken for that of a living one."""

    pod: str
    segments: tuple[str, ...]
    size_bytes: int
    offers: tuple[Offer, ...]
    holds: Holding | None = None


def publish_endpoint(store: Store, endpoint: Endpoint, lease_s: float) -> LeasedKey:
    """Replaces what the pod has published before. It is there until the result is closed, and ``lease_s`` longer if this process dies."""
    return LeasedKey(store, PREFIX + endpoint.pod, endpoint_value(endpoint), lease_s)


def endpoint_value(endpoint: Endpoint) -> bytes:
    plain = asdict(endpoint)
    del plain["pod"]
    return json.dumps(plain, separators=(",", ":")).encode("ascii")


def endpoint_of(store: Store, segment: str) -> Endpoint:
    """Returns the endpoint that serves ``segment``. Raises ``RunError`` if there is none."""
    for entry in store.list(PREFIX):
        endpoint = _parsed(entry.key, entry.value)
        if segment in endpoint.segments:
            return endpoint
    raise RunError(f"no pod serves the shared memory {segment} of the published weights; its pod has ended, or was not asked to serve its weights")


def peers_with(store: Store, contents: Contents, own_pod: str) -> list[tuple[Endpoint, Offer, str]]:
    """Returns the pods but ``own_pod`` that say that they have received ``contents`` and serve them over TCP: with that offer, and the segment."""
    found = []
    for entry in store.list(PREFIX):
        endpoint = _parsed(entry.key, entry.value)
        held, offers = endpoint.holds, [offer for offer in endpoint.offers if offer.protocol == "tcp"]
        if held is None or not offers or endpoint.pod == own_pod or held.segment not in endpoint.segments:
            continue
        if Contents(WeightVersion(held.incarnation, held.step), held.digest) == contents:
            found.append((endpoint, offers[0], held.segment))
    return found


def choose(endpoint: Endpoint, available: Collection[Protocol]) -> Offer:
    """Returns the fastest offer among the ``available`` protocols. Raises ``RunError`` if there is none."""
    offers = {offer.protocol: offer for offer in endpoint.offers}
    for protocol in PROTOCOLS:
        if protocol in offers and protocol in available:
            return offers[protocol]
    theirs, ours = ", ".join(offers), ", ".join(protocol for protocol in PROTOCOLS if protocol in available)
    raise RunError(f"pod {endpoint.pod} serves weights over {theirs or 'nothing'} and this pod reads over {ours or 'nothing'}; give both a common protocol")


def check_protocols(protocols: Sequence[str]) -> tuple[Protocol, ...]:
    """Returns ``protocols``. Raises ``UserError`` for an unknown one, and if there are none."""
    for protocol in protocols:
        if protocol not in PROTOCOLS:
            raise UserError(f"'{protocol}' is not a protocol for weights; use {', '.join(PROTOCOLS)}")
    if not protocols:
        raise UserError(f"no protocol for weights is named; use one or more of {', '.join(PROTOCOLS)}")
    return tuple(protocol for protocol in PROTOCOLS if protocol in protocols)


def _parsed(key: str, value: bytes) -> Endpoint:
    try:
        plain = json.loads(value)
        offers = tuple(
            Offer(offer["protocol"], str(offer["host"]), int(offer["port"]), tuple(map(int, offer["addresses"]))) for offer in plain["offers"]
        )
        held = plain["holds"]
        holds = None if held is None else Holding(str(held["segment"]), int(held["incarnation"]), int(held["step"]), str(held["digest"]))
        return Endpoint(key.removeprefix(PREFIX), tuple(map(str, plain["segments"])), int(plain["size_bytes"]), offers, holds)
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"the entry '{key}' of the coordination store is not the endpoint of a pod: {error}") from None
