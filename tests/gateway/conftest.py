"""Backends that fail on command and a gateway before them, which most tests share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.append(str(Path(__file__).parents[1] / "serving"))

from gateway_process import FaultBackend, Gateway, fault_backend, gateway
from redis_server import Redis


@pytest.fixture(scope="session")
def backends() -> Iterator[tuple[FaultBackend, FaultBackend]]:
    with fault_backend("first") as first, fault_backend("second", "m,other") as second:
        yield first, second


@pytest.fixture(scope="session")
def shared(backends: tuple[FaultBackend, FaultBackend], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """One gateway before both, for all tests that leave it as it was."""
    with gateway(tmp_path_factory.mktemp("gateway"), backends) as running:
        yield running


@pytest.fixture
def pair(shared: Gateway, backends: tuple[FaultBackend, FaultBackend]) -> Iterator[tuple[Gateway, FaultBackend, FaultBackend]]:
    """The shared gateway and its backends, which are well before and after the test."""
    yield shared, *backends
    for backend in backends:
        backend.mode("ok")
    shared.wait_idle()
    shared.wait_ready(*backends)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    one = Redis(tmp_path)
    one.start()
    yield one
    one.kill()
