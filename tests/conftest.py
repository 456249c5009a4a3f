"""Fixtures and settings for all tests. Triton decides at its first import in a process whether its programs run on a device or in its
interpreter, so the environment is set here."""

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

import torch
from etcd_server import WHY_SKIPPED, EtcdServer, program
from hub_server import Hub, hub_server
from slurm_cluster import WHY_SKIPPED as WHY_NO_SLURM
from slurm_cluster import SlurmCluster, is_installed

# Collecting thousands of tests makes a million objects that live as long as the process. The garbage collector need not visit them, neither
# now nor in each full collection of a test.
gc.disable()

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # A shell starts background jobs so, and the commands that tests interrupt would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    # Triton's libraries report objects that still exist at the end.
    gc.unfreeze()


@pytest.fixture(autouse=True)
def import_path() -> Iterator[None]:
    """Loading a function of the user adds its folder to the import path. The processes that later tests start must not find its modules there."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def empty_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A server with the API of the Hugging Face Hub and no models, with an empty cache and without a token, for this process and its children."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="huggingface_hub is not installed, so models of the Hub are not tested")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with hub_server() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf" / "token"))
        yield running


@pytest.fixture(scope="session")
def etcd_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServer]:
    """A real etcd for the session. Tests take prefixes of their own and leave it running."""
    if program() is None:
        pytest.skip(WHY_SKIPPED)
    server = EtcdServer(tmp_path_factory.mktemp("etcd")).start()
    yield server
    server.kill()


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A real Slurm of two nodes for the session. Tests leave no job behind."""
    if not is_installed():
        pytest.skip(WHY_NO_SLURM)
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    try:
        yield cluster.start()
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The address of an S3 server in a process of its own, one for the session because s3fs keeps its connections."""
    for module in ("moto", "s3fs"):
        pytest.importorskip(module, reason=f"{module} is not installed, so S3 is not tested")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        ends = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1).read()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < ends, "the S3 server did not start"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


@pytest.fixture(scope="module")
def s3_url(s3_server: str) -> Iterator[str]:
    """The address of a bucket on that server, with the AWS settings to reach it."""
    before = dict(os.environ)
    os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_ENDPOINT_URL=s3_server, AWS_DEFAULT_REGION="us-east-1")
    try:
        import s3fs

        s3fs.S3FileSystem().makedirs("tandem-test", exist_ok=True)
        yield "s3://tandem-test/data"
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """``small_disk(size)`` returns a folder on a file system of ``size``, in the units of mount (``128k``). Skips the test if it cannot be mounted."""
    folder = tmp_path / "disk"

    def mount(size: str) -> Path:
        folder.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True).returncode:
            pytest.skip("no file system can be mounted here (it needs root), so a full disk is NOT tested")
        return folder

    yield mount
    if folder.is_mount():
        subprocess.run(["umount", folder], check=True)


@pytest.fixture
def unmeasured_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run in this process does not measure the machine, which takes seconds, and so predicts no time."""
    from tandem.jobs.checks import predicted_time
    from tandem.types import UserError

    def refuse(*arguments: object, **options: object) -> None:
        raise UserError("the machine is not measured")

    monkeypatch.setattr(predicted_time, "measure", refuse)


@pytest.fixture
def quiet_root() -> Iterator[None]:
    """Closes the log files that a run in this process has opened."""
    root, before = logging.getLogger(), (logging.getLogger().handlers[:], logging.getLogger().level)
    yield
    for handler in set(root.handlers) - set(before[0]):
        handler.close()
    root.handlers[:], root.level = before
    logging.captureWarnings(False)
