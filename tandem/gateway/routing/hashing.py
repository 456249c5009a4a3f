"""Weighted rendezvous hashing: an order of backends or models for each key, in which one that comes or goes moves no other.

Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates" (1998), with the weights of Schindelhauer and Schomaker, "Weighted Distributed Hash
Tables" (2005): a backend is first for a share of the keys that is its share of the weights. It needs no ring and no virtual nodes, and several gateways
agree without a word.
"""

import math
from collections.abc import Sequence

import xxhash

from tandem.gateway.backend import Backend


def fraction(key: str) -> float:
    """Returns a number above 0 and below 1 that looks drawn at random and is the same for the same ``key``, in any process."""
    return (xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogatepass")) + 0.5) / 2**64


def rank(key: str, name: str, weight: float) -> float:
    """Returns the rank of ``name`` for ``key``; the highest is first."""
    return -weight / math.log(fraction(f"{name}\0{key}"))


def home_of(key: str, backends: Sequence[Backend]) -> Backend:
    """Returns the first backend for ``key``."""
    return max(backends, key=lambda backend: rank(key, backend.name, backend.config.weight))
