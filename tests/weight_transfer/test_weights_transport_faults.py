"""Pods are killed and stopped, connections cut and bits flipped at random places of transfers between processes: what is published arrived whole."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from pod_process import tensors
from pod_processes import PodProcess
from tcp_proxy import Alter, TcpProxy
from two_pods import TwoPods

from tandem.types import WeightVersion
from tandem.weight_transfer.transport.pieces import VersionMoved
from tandem.weight_transfer.update import WeightReader

pytestmark = pytest.mark.full
ROWS = 4000
SIZE = 12 * (ROWS * 64 + 64) * 4
OK = {"protocol": "tcp", "rereads": [], "breaks": 0, "equal": True}


class Processes:
    """A sender and a receiver in ``folder``, with a proxy between them whose connections call ``alter`` with what has passed of all of them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made = folder, list[PodProcess]()
        self.passed, self.at, self.fault = 0, -1, (lambda: None)
        self.ends = self.is_over = False

    def serve(self, incarnation: int, step: int, rows: int = ROWS) -> PodProcess:
        self.made.append(PodProcess("serve", self.folder))
        self.port = self.made[-1].ask(incarnation, step, rows)["ports"]["tcp"]
        return self.made[-1]

    def receive(self, at: int, fault: Callable[[], None], *, ends: bool = False) -> PodProcess:
        """Starts a receiver; ``fault`` is called once, when ``at`` bytes have passed. With ``ends`` what the system has buffered then is lost."""
        self.passed, self.at, self.fault, self.ends, self.is_over = 0, at, fault, ends, False
        self.made.append(PodProcess("receive", self.folder, port=TcpProxy(self.port, lambda: self.alter).port))
        return self.made[-1]

    def alter(self, sent: int, block: bytearray) -> bool:
        self.passed += len(block)
        if 0 <= self.at < self.passed:
            self.at = -1
            self.fault()
            self.is_over = self.ends
        return not self.is_over


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    for each in made.made:
        each.kill()


@pytest.mark.parametrize("share", [0.01, 0.5, 0.98])
def test_a_sender_that_is_killed_in_the_middle_is_named_and_its_successor_s_weights_arrive(processes: Processes, share: float) -> None:
    sender = processes.serve(1, 1)
    receiver = processes.receive(int(share * SIZE), lambda: os.kill(sender.process.pid, signal.SIGKILL), ends=True)
    lost = receiver.ask(1, 1, ROWS)
    assert lost["error"] == "PeerDied" and "nothing came for 2 s" in lost["text"] and "\n" not in lost["text"]
    processes.serve(2, 1)
    again = processes.receive(-1, lambda: None)
    assert again.ask(2, 1, ROWS) == OK


@pytest.mark.parametrize("share", [0.01, 0.5, 0.98])
def test_a_receiver_that_is_killed_in_the_middle_leaves_no_memory_and_the_sender_serving(processes: Processes, share: float) -> None:
    sender = processes.serve(1, 1)
    killed = threading.Event()
    receiver = processes.receive(int(share * SIZE), lambda: (os.kill(receiver.process.pid, signal.SIGKILL), killed.set()))  # type: ignore[func-returns-value]
    receiver.tell(1, 1, ROWS)
    assert killed.wait(60) and receiver.process.wait() == -signal.SIGKILL
    sender.ask(1, 2, ROWS)
    assert processes.receive(-1, lambda: None).ask(1, 2, ROWS) == OK


def test_a_sender_that_is_stopped_is_named_and_serves_again_when_it_is_continued(processes: Processes) -> None:
    # More than the system buffers on the way.
    rows = 10 * ROWS
    sender = processes.serve(1, 1, rows)
    receiver = processes.receive(SIZE // 10, lambda: os.kill(sender.process.pid, signal.SIGSTOP))
    lost = receiver.ask(1, 1, rows)
    assert lost["error"] == "PeerDied" and "silent for too long" in lost["text"]
    os.kill(sender.process.pid, signal.SIGCONT)
    assert receiver.ask(1, 1, rows)["equal"]


def bring_through(pods: TwoPods, alter: Callable[[], Alter], step: int) -> bool:
    """Brings a new version through a proxy with ``alter``; returns whether all of it is equal, as an engine reads it."""
    proxy = TcpProxy(pods.service.endpoint.offers[0].port, alter)
    pods.port = lambda port: proxy.port
    pods.mirror._close_source()
    sent = tensors(step, 400)
    pods.publish(sent, WeightVersion(1, step))
    pods.bring()
    proxy.close()
    reader = WeightReader(pods.own)
    is_equal = all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(sent, reader.read().tensors, strict=True))
    reader.close()
    return is_equal


def test_a_hundred_transfers_with_connections_cut_at_random_bytes_arrive_whole(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    draw, pods = random.Random(1), TwoPods(tmp_path)
    for step in range(100):
        most = draw.choice([20_000, 100_000, 500_000])

        def cut(most: int = most) -> Alter:
            limit = draw.randrange(2_000, most)

            def alter(sent: int, block: bytearray) -> bool:
                del block[max(0, limit - sent) :]
                return sent + len(block) < limit

            return alter

        assert bring_through(pods, cut, step), f"transfer {step}"
    pods.close()


def test_a_hundred_transfers_with_a_bit_flipped_at_a_random_place_arrive_whole(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    draw, pods, flips = random.Random(2), TwoPods(tmp_path, connections=1, silent_s=1.0), [0]
    for step in range(100):
        # After the handshake, a flipped bit of which is another credential.
        place, bit, left = draw.randrange(1_000, 12 * 400 * 64 * 4), 1 << draw.randrange(8), [1]

        def flip(sent: int, block: bytearray, place: int = place, bit: int = bit, left: list[int] = left) -> bool:
            if left[0] and sent <= place < sent + len(block):
                block[place - sent] ^= bit
                left[0] -= 1
                flips[0] += 1
            return True

        assert bring_through(pods, lambda flip=flip: flip, step), f"transfer {step}, bit {bit} of byte {place}"
    assert flips[0] == 100
    pods.close()


def test_a_receiver_beside_a_trainer_that_never_waits_has_whole_versions_only(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    pods, ended, published = TwoPods(tmp_path), threading.Event(), [0]

    def train() -> None:
        while not ended.is_set():
            published[0] += 1
            pods.publish([(f"t{i}", torch.full((64, 500 + i), float(published[0]))) for i in range(8)], WeightVersion(1, published[0]))

    trainer = threading.Thread(target=train)
    trainer.start()
    reader, whole, moved, ends = WeightReader(pods.own), 0, 0, time.monotonic() + 60
    while (whole < 30 or moved < 1) and time.monotonic() < ends:
        try:
            got = pods.bring()
        except VersionMoved:
            moved += 1
            continue
        except Exception as error:
            assert "no weights are published" in str(error), error
            continue
        read = reader.read(got.manifest.version)
        assert {float(value) for _, tensor in read.tensors for value in (tensor.min(), tensor.max())} == {float(got.manifest.version.step)}
        whole += 1
    ended.set()
    trainer.join()
    reader.close()
    pods.close()
    assert whole >= 1 and published[0] > 1
