"""A real Ray Serve of one application, on a real Ray of one node."""

import importlib.util
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from http_processes import until
from ray_cluster import SERVE_PACKAGES, RayCluster
from tiny_model import make_model, make_tokenizer

has_ray = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in SERVE_PACKAGES), reason="'ray[serve]' is not installed, so Ray Serve is NOT tested"
)
REQUEST = {"model": "tiny", "prompt": "one two", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
IMPORT = "tandem.cluster.ray_serve.application:application"


class Serve:
    """A Serve of one application, whose model is in ``models``, on a real Ray."""

    def __init__(self, cluster: RayCluster, folder: Path, models: Path) -> None:
        self._cluster, self._folder, self._models = cluster, folder, models
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def deploy(self, **section: Any) -> None:
        """Returns when the application runs with ``section``."""
        file = self._folder / "serve.yaml"
        options = {"host": "127.0.0.1", "port": int(self.url.rpartition(":")[2])}
        file.write_text(yaml.safe_dump({
            "proxy_location": "HeadOnly", "http_options": options,
            "applications": [{"name": "tiny", "route_prefix": "/", "import_path": IMPORT, "args": section}],
        }))  # fmt: skip
        command = [str(Path(sys.executable).with_name("serve")), "run", str(file), f"--address={self._cluster.address}", "--non-blocking"]
        environment = {**os.environ, **self._cluster.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    def ask(self, **more: Any) -> httpx.Response:
        return self.client.post("/v1/completions", json={**REQUEST, **more})

    def engines(self) -> list[int]:
        """Returns the processes of the servers."""
        engines = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"serve" in words and any(str(self._models).encode() in word for word in words) and b"--served-model-name" in words:
                engines.append(int(entry.name))
        return engines


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    tokenizer = make_tokenizer(folder / "tokenizer")
    return make_model(folder / "first", tokenizer, seed=1), make_model(folder / "second", tokenizer, seed=2)


@pytest.fixture
def served(models: tuple[Path, Path], tmp_path: Path) -> Iterator[Serve]:
    """A Serve that has no application yet, on a Ray with a node of four cores."""
    cluster = RayCluster("127.0.0.1").start()
    try:
        cluster.add("node", "--num-cpus=4")
        cluster.wait_for("node")
        serve = Serve(cluster, tmp_path, models[0].parent)
        yield serve
        serve.client.close()
    finally:
        cluster.stop()
    until(lambda: not serve.engines(), "the engines to end with Ray", 30)
