"""The weight store in front of S3, served by moto."""

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.model.weight_store import WeightStore
from tandem.types import UserError

s3fs = pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def options() -> Iterator[dict[str, Any]]:
    server = shutil.which("moto_server", path=str(Path(sys.executable).parent))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([server or "moto_server", "-H", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/moto-api/", timeout=5).close()
                break
            except OSError:
                assert time.monotonic() < deadline, "moto's server did not start"
                time.sleep(0.1)
        yield {"key": "k", "secret": "s", "client_kwargs": {"endpoint_url": address, "region_name": "eu-west-1"}}
    finally:
        process.kill()
        process.wait()


def test_a_model_comes_from_s3_and_anew_after_it_changed(tmp_path: Path, options: dict[str, Any]) -> None:
    storage = s3fs.S3FileSystem(**options, use_listings_cache=False)
    storage.mkdir("bucket")
    weights = bytes(range(256)) * (100 << 10)
    storage.pipe({"bucket/models/tiny/config.json": b"{}", "bucket/models/tiny/model.safetensors": weights})
    store = WeightStore(tmp_path, options=options)
    with store.hold("s3://bucket/models/tiny") as held:
        assert (held.path / "model.safetensors").read_bytes() == weights
        storage.pipe("bucket/models/tiny/model.safetensors", weights[::-1])
        with store.hold("s3://bucket/models/tiny") as new:
            assert new.path != held.path and (new.path / "model.safetensors").read_bytes() == weights[::-1]


def test_what_is_not_there_is_one_line(tmp_path: Path, options: dict[str, Any]) -> None:
    for url in ("s3://no-such-bucket/model", "s3://bucket/no/such/model"):
        with pytest.raises(UserError, match="does not exist") as caught:
            WeightStore(tmp_path, options=options).hold(url)
        assert "\n" not in str(caught.value)
