"""Weights that go through object storage: a far pod reads anchors and deltas there and nowhere else, and what is damaged, missing or not to be reached is
named, read from the trainer's pod where there is one, and written whole the next time."""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from two_pods import TwoPods, delta_memory, pod_id

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.storage.files import open_storage
from tandem.types import RunError, WeightVersion
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.stored import storage_writer
from tandem.weight_transfer.stored.storage_source import StoredWeights
from tandem.weight_transfer.stored.stored_file import WANTED, StoredDamage
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.update import WeightReader

SHAPE = (400, 300)
SIZE = 2 * 400 * 300
NAMES = 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "BLOCK_ELEMENTS", 1000)
    torch.set_num_threads(1)


@pytest.fixture(params=["folder", pytest.param("S3", marks=pytest.mark.full)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "stored") if request.param == "folder" else f"{request.getfixturevalue('s3_url')}/{tmp_path.name}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "stored"


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], TwoPods]]:
    made = list[TwoPods]()

    def make_pods(url: str) -> TwoPods:
        made.append(TwoPods(tmp_path, full_update_every=3, patience_s=0.3, weights_url=url))
        return made[-1]

    yield make_pods
    for pods in made:
        pods.close()


def steps(share: float = 0.01) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the weights of one step after another, of which ``share`` changes each time; the last tensor never does."""
    draw = torch.Generator().manual_seed(5)
    values = [torch.randn(SHAPE, generator=draw).bfloat16() for _ in range(NAMES)]
    while True:
        yield [(f"t{i}", value.clone()) for i, value in enumerate(values)]
        for value in values[:-1]:
            where = torch.rand(SHAPE, generator=draw) < share
            value[where] = torch.randn(SHAPE, generator=draw).bfloat16()[where]


class Far:
    """A pod, or a server, that has nothing of the run but the storage."""

    def __init__(self, folder: Path, url: str) -> None:
        folder.mkdir()
        self.own = EmbeddedStore(folder / "own.sqlite")
        self.mirror = WeightMirror(
            None, self.own, lambda size: WeightBuffers.create(pod_id(), size), None, patience_s=0.3, delta_memory=delta_memory(),
            stored=StoredWeights(open_storage(url)),
        )  # fmt: skip

    def bring(self) -> WeightVersion:
        return self.mirror.bring(None, (), Deadline(60.0)).manifest.version

    def close(self) -> None:
        self.mirror.close()
        self.own.close()


def are_here(store: EmbeddedStore, sent: Sequence[tuple[str, Tensor]]) -> bool:
    reader = WeightReader(store)
    try:
        return all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(reader.read().tensors, sent, strict=True))
    finally:
        reader.close()


def names(url: str) -> list[str]:
    return [file.name for file in open_storage(url).files()]


def step_names(*kinds: tuple[int, str]) -> list[str]:
    return [f"weights-000001-{step:010d}.{kind}" for step, kind in kinds]


def test_two_pods_one_by_storage_have_the_same_weights_version_after_version_and_the_chain_is_pruned(
    make: Callable[[str], TwoPods], url: str, tmp_path: Path
) -> None:
    pods, weights, whole = make(url), steps(), NAMES * SIZE
    pods.service.close()  # Nothing but the storage is to be had.
    for step in range(1, 9):
        sent = next(weights)
        pods.publish(sent, WeightVersion(1, step))
        got = pods.bring()
        assert are_here(pods.own, sent) and got.protocol == "storage" and got.whole == ()
        if step in (1, 3, 6):  # The first, and multiples of full_update_every.
            assert pods.stored_bytes > whole and got.delta_bytes == 0
            assert got.fetched.size_bytes == (whole if step == 1 else whole - SIZE), "what has not changed is here"
        else:
            assert pods.stored_bytes < 0.05 * whole and got.fetched.size_bytes == 0 and 0 < got.delta_bytes < 0.05 * whole
        if step == 4:
            late = Far(tmp_path / "late", url)
            assert late.bring() == WeightVersion(1, 4) and are_here(late.own, sent), "who joins reads the anchor and the chain after it"
    assert names(url) == step_names((3, "anchor"), (4, "delta"), (5, "delta"), (6, "anchor"), (7, "delta"), (8, "delta"))
    assert late.bring() == WeightVersion(1, 8) and are_here(late.own, sent), "it missed three versions, one of them an anchor"
    late.close()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "at", "says"),
    [
        (step_names((5, "delta"))[0], 60, "the header of the file 'weights-000001-0000000005.delta' does not have its digest"),
        (step_names((5, "delta"))[0], -5, "the delta of this part is damaged"),
        (step_names((5, "delta"))[0], 2, "does not begin as weights in a storage do"),
    ],
    ids=["header", "payload", "magic"],
)
def test_a_bit_flipped_in_a_delta_is_named_and_the_next_version_is_whole(
    make: Callable[[str], TwoPods], folder: Path, caplog: pytest.LogCaptureFixture, name: str, at: int, says: str
) -> None:
    pods, weights = make(str(folder)), steps()
    for step in (3, 4):
        pods.publish(next(weights), WeightVersion(1, step))
        pods.bring()
    sent = next(weights)
    pods.publish(sent, WeightVersion(1, 5))
    flip(folder / name, at)
    with caplog.at_level(logging.WARNING):
        got = pods.bring()
    assert are_here(pods.own, sent) and says in caplog.text and got.protocol == "tcp"
    assert (folder / WANTED).exists() and f"'{name}'" in (folder / WANTED).read_text()
    for step, protocol in ((6, "storage"), (7, "storage"), (8, "storage")):
        sent = next(weights)
        pods.publish(sent, WeightVersion(1, step))
        assert pods.bring().protocol == protocol and are_here(pods.own, sent)
    assert not (folder / WANTED).exists() and step_names((7, "anchor"))[0] in names(str(folder))


@pytest.mark.parametrize("harm", ["flipped", "missing", "cut"])
def test_a_far_reader_of_a_chain_with_a_damaged_anchor_names_it_and_follows_from_the_next(
    make: Callable[[str], TwoPods], folder: Path, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    pods, weights, anchor = make(str(folder)), steps(), folder / step_names((1, "anchor"))[0]
    for step in (1, 2):
        pods.publish(next(weights), WeightVersion(1, step))
    if harm == "flipped":
        flip(anchor, -SIZE - 100)
    elif harm == "missing":
        anchor.unlink()
    else:
        anchor.write_bytes(anchor.read_bytes()[: -SIZE // 2])
    far = Far(tmp_path / "far", str(folder))
    says = "has not the weights of step 1 (incarnation 1), which 'weights-000001-0000000002.delta' begins with" if harm == "missing" else f"'{anchor.name}'"
    with pytest.raises(StoredDamage) as caught:
        far.bring()
    assert says in str(caught.value) and says in (folder / WANTED).read_text()
    # It is seen when the next version is written, and the one after that is whole.
    for step in (3, 4, 5):
        sent = next(weights)
        pods.publish(sent, WeightVersion(1, step))
    assert far.bring() == WeightVersion(1, 5) and are_here(far.own, sent)
    far.close()


def test_storage_that_is_away_for_a_while_costs_neither_the_run_nor_the_pod_a_version(
    make: Callable[[str], TwoPods], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pods, weights, away = make(str(folder)), steps(), folder.with_name("away")
    for step in range(1, 7):
        if step == 3:
            folder.rename(away)
            folder.write_text("a file where the folder was\n")
        if step == 5:
            folder.unlink()
            away.rename(folder)
        sent = next(weights)
        pods.publish(sent, WeightVersion(1, step))
        got = pods.bring()
        assert are_here(pods.own, sent) and got.protocol == ("tcp" if step in (3, 4) else "storage")
    assert "Training goes on; the next version that can be written is whole" in caplog.text
    assert "are read from other pods" in caplog.text
    assert names(str(folder)) == step_names((5, "anchor"), (6, "anchor")), "the first that could be written was whole"


@pytest.mark.full
def test_an_s3_server_that_dies_and_comes_back_empty_is_written_to_again(make: Callable[[str], TwoPods], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moto")
    s3fs = pytest.importorskip("s3fs")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start() -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/moto-api/", timeout=1).read()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < ends
                time.sleep(0.05)
        s3fs.S3FileSystem(skip_instance_cache=True).makedirs("far", exist_ok=True)
        return process

    for key, value in {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1", "AWS_MAX_ATTEMPTS": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    s3fs.S3FileSystem.clear_instance_cache()
    server = start()
    pods, weights = make("s3://far/run"), steps()
    try:
        for step in range(1, 7):
            if step == 3:
                os.kill(server.pid, signal.SIGKILL)
                server.wait()
            if step == 4:
                server = start()
            sent = next(weights)
            pods.publish(sent, WeightVersion(1, step))
            got = pods.bring()
            assert are_here(pods.own, sent) and got.protocol == ("tcp" if step == 3 else "storage")
        assert names("s3://far/run") == step_names((4, "anchor"), (5, "delta"), (6, "anchor"))
    finally:
        server.kill()
        server.wait()
        s3fs.S3FileSystem.clear_instance_cache()


def test_a_half_written_file_and_other_files_are_not_versions_and_another_runs_are_not_mixed_with(
    make: Callable[[str], TwoPods], folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pods, weights = make(str(folder)), steps()
    (folder / ".weights-000001-0000000009.delta.tmp").write_bytes(b"TDMSTORE and no more")
    (folder / "notes.txt").write_text("of the user\n")
    far = Far(tmp_path / "far", str(folder))
    with pytest.raises(RunError, match="no weights are published"):
        far.bring()
    sent = next(weights)
    pods.publish(sent, WeightVersion(1, 1))
    assert far.bring() == WeightVersion(1, 1) and are_here(far.own, sent)
    shutil.copy(folder / step_names((1, "anchor"))[0], folder / "weights-000007-0000000001.anchor")
    with pytest.raises(StoredDamage, match=r"'weights-000007-0000000001.anchor' is of other weights than its name says"):
        far.bring()
    later = TwoPods(tmp_path / "later" if (tmp_path / "later").mkdir() is None else tmp_path, full_update_every=3, weights_url=str(folder))
    later.publish(sent, WeightVersion(1, 1))
    assert "has the weights of another run ('weights-000007-0000000001.anchor' is newer than those of step 1" in caplog.text
    later.close()
    far.close()


def test_a_full_disk_is_one_line_and_the_next_version_is_whole(make: Callable[[str], TwoPods], folder: Path) -> None:
    pods, weights = make(str(folder)), steps()
    pods.publish(next(weights), WeightVersion(1, 1))
    assert pods.stored is not None
    moved = pods.stored._folder.rename(pods.stored._folder.with_name(pods.stored._folder.name + "-away"))
    with pytest.raises(RunError, match=r"weights of step 2 \(incarnation 1\) cannot be written to '.*' for the storage: No such file"):
        pods.publish(next(weights), WeightVersion(1, 2))
    moved.rename(pods.stored._folder)
    sent = next(weights)
    pods.publish(sent, WeightVersion(1, 4))
    assert pods.bring().protocol == "storage" and are_here(pods.own, sent)
    assert names(str(folder)) == step_names((1, "anchor"), (4, "anchor"))


def test_storage_that_is_slower_than_the_run_gets_an_anchor_later(
    make: Callable[[str], TwoPods], folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pods, weights, may_send = make(str(folder)), steps(), threading.Event()
    assert pods.stored is not None
    stored, send = pods.stored, storage_writer.StorageWriter._send
    monkeypatch.setattr(storage_writer.StorageWriter, "_send", lambda self, file: (may_send.wait(60), send(self, file)))
    monkeypatch.setattr(stored, "wait", lambda seconds: True)
    for step in (1, 2, 4, 5):
        pods.publish(next(weights), WeightVersion(1, step))
    assert "is slower than the run" in caplog.text
    may_send.set()
    monkeypatch.undo()
    assert stored.wait(60)
    sent = next(weights)
    pods.publish(sent, WeightVersion(1, 7))
    assert names(str(folder)) == step_names((1, "anchor"), (7, "anchor")) and pods.bring().protocol == "storage" and are_here(pods.own, sent)
