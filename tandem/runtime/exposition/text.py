"""Prometheus' text format, for every process of Tandem that has ``/metrics``: servers, gateways and runs. Needs ``prometheus_client``."""

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST


def exposition(registry: CollectorRegistry) -> bytes:
    """Returns all metrics of ``registry``, as the body of an answer of ``CONTENT_TYPE``."""
    return generate_latest(registry)
