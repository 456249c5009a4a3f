"""Weighted rendezvous hashing: an order of the backends for each key, in which one that comes or goes moves no other.

Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998), with the weights of Schindelhauer and Schomaker, "Weighted Distributed Hash
Tables" (2005): a backend is first for a share of the keys that is its share of the weights. It needs no ring and no virtual nodes, and several gateways
agree without a word.
"""

import math
from collections.abc import Sequence

import xxhash

from tandem.gateway.backend import Backend


def rank(key: str, backend: Backend) -> float:
    """Returns the rank of ``backend`` for ``key``; the highest is first."""
    uniform = (xxhash.xxh3_64_intdigest(f"{backend.name}\0{key}".encode("utf-8", "surrogatepass")) + 0.5) / 2**64
    return -backend.config.weight / math.log(uniform)


def home_of(key: str, backends: Sequence[Backend]) -> Backend:
    """Returns the first backend for ``key``."""
    return max(backends, key=lambda backend: rank(key, backend))
