"""Makes this folder's helpers importable, and starts what its modules share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from etcd_server import EtcdServer

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """One for all runs of a module, each with keys of its own."""
    server = EtcdServer(tmp_path_factory.mktemp("etcd"), options=("--unsafe-no-fsync",)).start()
    yield server
    server.kill()
