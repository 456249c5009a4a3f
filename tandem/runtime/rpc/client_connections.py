"""Counts a server's open connections, in sum and by client."""

import functools
import ipaddress
from collections import Counter
from dataclasses import dataclass, field


@functools.lru_cache(maxsize=4096)
def client_of(address: str) -> str:
    """Returns what counts as one client: an IPv4 address, or a /64 network of IPv6, of which one host usually has all addresses."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))


@dataclass
class ClientConnections:
    """Open connections. ``limit``: of all clients; ``client_limit``: of each (0: only ``limit`` applies)."""

    limit: int
    client_limit: int
    count: int = 0
    by_client: Counter[str] = field(default_factory=Counter)

    @property
    def is_full(self) -> bool:
        """More connections are open than the server can have."""
        return self.count > self.limit

    def add(self, address: str) -> bool:
        """Counts a new connection; returns whether its client may have it."""
        client = client_of(address)
        self.count += 1
        self.by_client[client] += 1
        return not self.client_limit or self.by_client[client] <= self.client_limit

    def remove(self, address: str) -> None:
        """Counts the end of a connection that was added."""
        client = client_of(address)
        self.count -= 1
        self.by_client[client] -= 1
        if not self.by_client[client]:
            del self.by_client[client]
