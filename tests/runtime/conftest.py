"""The stores that the contract tests of coordination run on: the embedded one and real etcd."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.config.coordination import CoordinationConfig
from tandem.runtime.coordination.open import open_store, store_address
from tandem.runtime.coordination.store import Store


@pytest.fixture(params=["embedded", "etcd"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty store of each kind. The folder of a test, and so its prefix in etcd, is its own."""
    (tmp_path / "pod").mkdir()
    is_etcd = request.param == "etcd"
    return store_address(request.getfixturevalue("etcd_server").config() if is_etcd else CoordinationConfig(), tmp_path)


@pytest.fixture
def store(address: str) -> Iterator[Store]:
    opened = open_store(address)
    yield opened
    opened.close()
