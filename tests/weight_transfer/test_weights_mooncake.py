"""The same transfers through the Mooncake transfer engine over TCP: one-sided reads, verified as those over plain TCP are."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pod_process import tensors
from pod_processes import PodProcess
from two_pods import CREDENTIAL, TwoPods

from tandem.types import DamagedWeights, UserError, WeightVersion
from tandem.weight_transfer.transport import mooncake
from tandem.weight_transfer.transport.pieces import Piece, VersionMoved
from tandem.weight_transfer.transport.service import WeightService

needs_mooncake = pytest.mark.skipif(
    mooncake.module() is None, reason="Mooncake (the extra `mooncake`, and the system's libibverbs1) is not installed, so its transfers are not tested"
)
OK = {"protocol": "mooncake", "rereads": [], "breaks": 0, "equal": True}


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Callable[..., PodProcess]]:
    made: list[PodProcess] = []

    def start(role: str, protocols: str = "mooncake,tcp") -> PodProcess:
        made.append(PodProcess(role, tmp_path, protocols))
        return made[-1]

    yield start
    for each in made:
        each.kill()


def test_ranges_are_read_together_with_the_gaps_that_align_tensors_and_no_others() -> None:
    pieces = [Piece(str(at), at, size, "") for at, size in ((0, 100), (128, 64), (192, 0), (256, 10), (1024, 5))]
    assert mooncake.runs_of(pieces) == [(0, 192), (256, 10), (1024, 5)]
    assert mooncake.runs_of([pieces[3], pieces[0]]) == [(0, 100), (256, 10)]


@pytest.mark.skipif(mooncake.module() is not None, reason="Mooncake is installed here")
def test_a_pod_that_is_told_to_use_mooncake_and_has_none_says_what_to_install() -> None:
    assert mooncake.available() == ()
    with pytest.raises(UserError, match=r"the protocol 'mooncake' needs Mooncake: pip install 'tandem-rl\[mooncake\]', and the system's libibverbs1"):
        mooncake.transfer_engine("mooncake", "127.0.0.1")


@pytest.mark.full
@needs_mooncake
def test_every_version_arrives_bit_for_bit_over_mooncake_and_over_tcp_where_one_pod_has_none(pod: Callable[..., PodProcess]) -> None:
    server, receiver, plain = pod("serve"), pod("receive"), pod("receive", "tcp")
    for step in range(3):
        assert server.ask(1, step, 200)["ports"].keys() == {"mooncake", "tcp"}
        assert receiver.ask(1, step, 200) == OK
    assert plain.ask(1, 2, 200) == OK | {"protocol": "tcp"}


@pytest.mark.full
@needs_mooncake
def test_a_killed_sender_is_an_error_in_words_and_its_successor_is_read(pod: Callable[..., PodProcess]) -> None:
    server, receiver = pod("serve"), pod("receive")
    server.ask(1, 1, 2000)
    assert receiver.ask(1, 1, 2000) == OK
    server.ask(1, 2, 2000)
    os.kill(server.process.pid, signal.SIGKILL)
    lost = receiver.ask(1, 2, 2000)
    assert lost["error"] == "PeerDied" and "Mooncake's status is" in lost["text"] and "nothing came for 2 s" in lost["text"]
    successor = pod("serve")
    successor.ask(2, 2, 2000)
    assert receiver.ask(2, 2, 2000) == OK


@pytest.mark.full
@needs_mooncake
def test_a_killed_receiver_leaves_the_sender_serving(pod: Callable[..., PodProcess]) -> None:
    server, receiver = pod("serve"), pod("receive")
    server.ask(1, 1, 100_000)
    receiver.tell(1, 1, 100_000)
    receiver.kill()
    server.ask(1, 2, 100_000)
    assert pod("receive").ask(1, 2, 100_000) == OK


@needs_mooncake
def test_a_port_in_use_leaves_nothing_served_over_mooncake(tmp_path: Path) -> None:
    """Memory that were still registered could not be registered again."""
    pods = TwoPods(tmp_path)
    taken = pods.service.endpoint.offers[0].port
    for _ in range(2):
        with pytest.raises(UserError, match=f"port {taken} on 127.0.0.1 cannot be taken"):
            WeightService("second", pods.buffers.segments, pods.shared, CREDENTIAL, ("mooncake", "tcp"), port=taken)
    pods.close()


@needs_mooncake
def test_damage_and_newer_weights_are_told_apart_over_mooncake(tmp_path: Path) -> None:
    pods = TwoPods(tmp_path, protocols=("mooncake",))
    manifest = pods.publish(tensors(1, 20), WeightVersion(1, 1))
    segment, entry = pods.buffers.segments[0], manifest.tensors[3]
    segment.memory[entry.offset_bytes] ^= 1
    with pytest.raises(DamagedWeights, match=f"tensor '{entry.name}' of weights of step 1 .* was received twice"):
        pods.bring()
    segment.memory[entry.offset_bytes] ^= 1
    segment.contents = None
    with pytest.raises(VersionMoved, match="it holds nothing in the place of the weights of step 1"):
        pods.bring()
    pods.publish(tensors(2, 20), WeightVersion(1, 2))
    assert pods.bring().protocol == "mooncake"
    pods.close()
