"""A pod that joins while others have the weights receives them from all of those at once, and not from the trainer's pod."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tcp_proxy import TcpProxy
from torch import Tensor
from two_pods import CREDENTIAL, TwoPods, pod_id

from tandem.pod.rollout_pods import RolloutPod, _waves
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.process.deadline import Deadline
from tandem.types import DamagedWeights, WeightVersion
from tandem.weight_transfer.shared_memory import WeightBuffers
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer
from tandem.weight_transfer.transport.mirror import WeightMirror
from tandem.weight_transfer.transport.mirrored import Mirrored
from tandem.weight_transfer.transport.pieces import Source
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_source import TcpSource
from tandem.weight_transfer.update import WeightReader

FIRST = WeightVersion(1, 1)


def weights(seed: int) -> list[tuple[str, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    return [(f"t{i}", torch.randn(64, 1024, generator=drawn)) for i in range(28)]


class Peer:
    """A further pod of the run of ``first``. ``ports``: how it reaches another pod's port, by that pod's name."""

    def __init__(self, first: TwoPods, name: str, ports: dict[str, int]) -> None:
        self.own = EmbeddedStore(first.folder / f"{name}.sqlite")
        self.name, self.ports, self.first = name, ports, first
        self.mirror = WeightMirror(
            first.shared, self.own, lambda size: WeightBuffers.create(pod_id(), size), self._open_source, patience_s=1.0, pod=name
        )
        self.service: WeightService | None = None

    def _open_source(self, endpoint: Endpoint, offer: Offer) -> Source:
        return TcpSource(f"pod {endpoint.pod}", offer.host, self.ports.get(endpoint.pod, offer.port), CREDENTIAL, silent_s=2.0)

    def bring(self) -> Mirrored:
        return self.mirror.bring(None, ("tcp",), Deadline(60.0))

    def serve(self) -> WeightService:
        """Receives what is published, and sends it on."""
        manifest = self.bring().manifest
        assert self.mirror.buffers is not None
        self.service = WeightService(self.name, self.mirror.buffers.segments, self.first.shared, CREDENTIAL, ("tcp",), lease_s=15.0)
        self.service.tell_holding(manifest)
        return self.service

    def tensors(self) -> list[tuple[str, Tensor]]:
        reader = WeightReader(self.own)
        try:
            return [(name, tensor.clone()) for name, tensor in reader.read().tensors]
        finally:
            reader.close()

    def close(self) -> None:
        if self.service is not None:
            self.service.close()
        self.mirror.close()
        self.own.close()


class Pods:
    """The trainer's pod, two that have its first version, and one that joins, behind proxies that count and alter what each sends it."""

    def __init__(self, folder: Path) -> None:
        self.first = TwoPods(folder, size_bytes=8 << 20)
        self.first.publish(weights(1), FIRST)
        self.peers = [Peer(self.first, name, {}) for name in ("a", "b")]
        self.sent, self.alter = dict.fromkeys(("a", "b", "first"), 0), dict[str, Callable[[bytearray], bool]]()
        self.proxies = {peer.name: self._proxy(peer.name, peer.serve().endpoint.offers[0].port) for peer in self.peers}
        self.proxies["first"] = self._proxy("first", self.first.service.endpoint.offers[0].port)
        self.joins = Peer(self.first, "c", {name: proxy.port for name, proxy in self.proxies.items()})

    def _proxy(self, name: str, port: int) -> TcpProxy:
        def fault() -> Callable[[int, bytearray], bool]:
            def pass_on(sent: int, block: bytearray) -> bool:
                self.sent[name] += len(block)
                return self.alter.get(name, lambda block: True)(block)

            return pass_on

        return TcpProxy(port, fault)

    def close(self) -> None:
        for each in (*self.proxies.values(), self.joins, *self.peers, self.first):
            each.close()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    torch.set_num_threads(1)
    made = Pods(tmp_path)
    yield made
    made.close()


def are_equal(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> bool:
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(one, other, strict=True))


WHOLE = 28 * 64 * 1024 * 4


def test_all_peers_send_and_the_trainer_s_pod_does_not(pods: Pods) -> None:
    def waits_for(other: str, own: str) -> Callable[[bytearray], bool]:
        """Stops half-way until the other one has sent a share: what is left in the queue must be enough for it."""

        def alter(block: bytearray) -> bool:
            while pods.sent[own] > WHOLE / 2 and pods.sent[other] < WHOLE / 8:
                time.sleep(0.002)
            return True

        return alter

    pods.alter |= {"a": waits_for("b", "a"), "b": waits_for("a", "b")}
    got = pods.joins.bring()
    assert sorted(got.peers) == ["a", "b"] and got.fetched == ((), 0, WHOLE)
    assert are_equal(pods.joins.tensors(), weights(1))
    assert pods.sent["first"] == 0 and min(pods.sent["a"], pods.sent["b"]) > WHOLE / 8
    assert WHOLE < pods.sent["a"] + pods.sent["b"] < WHOLE + 50_000, "every part once"


def test_a_peer_that_is_cut_off_leaves_its_parts_to_the_other(pods: Pods) -> None:
    pods.alter["a"] = lambda block: pods.sent["a"] < 500_000
    assert pods.joins.bring().fetched.breaks == 0 and are_equal(pods.joins.tensors(), weights(1))
    assert pods.sent["first"] == 0 and pods.sent["b"] > WHOLE / 2


def test_a_peer_that_hardly_sends_is_left_out_when_the_other_has_nothing_left_to_send(pods: Pods, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.weight_transfer.transport.several_senders._LONG_S", 0.1)
    stuck, ends = threading.Event(), threading.Event()

    def stall(block: bytearray) -> bool:
        if pods.sent["a"] > 100_000:
            stuck.set()
            ends.wait(30.0)
        return True

    def after_a(block: bytearray) -> bool:
        # What belongs to the handshake passes.
        return pods.sent["b"] < 5_000 or stuck.wait(30.0)

    pods.alter |= {"a": stall, "b": after_a}
    try:
        assert pods.joins.bring().fetched.breaks == 0 and are_equal(pods.joins.tensors(), weights(1))
    finally:
        ends.set()
    assert pods.sent["first"] == 0 and pods.sent["b"] > WHOLE / 2


def test_a_peer_that_died_and_left_its_key_behind_is_passed_over(pods: Pods) -> None:
    service = pods.peers[0].service
    assert service is not None
    service._end()
    assert sorted(pods.joins.bring().peers) == ["a", "b"] and are_equal(pods.joins.tensors(), weights(1))
    assert pods.sent["first"] == pods.sent["a"] == 0


def test_a_peer_that_sends_a_flipped_bit_sends_no_more(pods: Pods) -> None:
    def flip(block: bytearray) -> bool:
        if pods.sent["a"] > 200_000:
            block[len(block) // 2] ^= 8
        return True

    pods.alter["a"] = flip
    got = pods.joins.bring()
    assert got.fetched.rereads and are_equal(pods.joins.tensors(), weights(1)) and pods.sent["first"] == 0


def test_peers_with_damaged_memory_are_found_and_the_undamaged_part_comes_from_the_trainer_s_pod(pods: Pods) -> None:
    for peer in pods.peers:
        assert peer.mirror.buffers is not None
        for segment in peer.mirror.buffers.segments:
            segment.memory[5 * 64 * 1024 * 4 + 77] ^= 1
    got = pods.joins.bring()
    # Both peers hold it damaged.
    assert got.fetched.rereads == ("'t5'", "'t5'") and are_equal(pods.joins.tensors(), weights(1)) and pods.sent["first"] > 0


def test_peers_that_have_moved_on_are_left_out_and_the_trainer_s_pod_sends(pods: Pods) -> None:
    pods.first.publish(weights(2), WeightVersion(1, 2))
    got = pods.joins.bring()
    assert got.peers == () and are_equal(pods.joins.tensors(), weights(2)), "the peers hold the version before"
    pods.peers[0].bring()
    service = pods.peers[0].service
    assert service is not None
    # It says that it holds the version, and its segment does not any more.
    service.tell_holding(got.manifest.__class__(WeightVersion(1, 2), pods.peers[0].bring().manifest.tensors, got.manifest.digest))
    assert pods.peers[0].mirror.buffers is not None
    for segment in pods.peers[0].mirror.buffers.segments:
        segment.contents = None
    other = Peer(pods.first, "d", {"a": pods.proxies["a"].port})
    got = other.bring()
    assert got.peers == ("a",) and are_equal(other.tensors(), weights(2))
    other.close()


def test_pods_receive_in_waves_of_as_many_as_can_send() -> None:
    made = [RolloutPod(number, None, 1, "own" if number else "") for number in range(9)]  # type: ignore[arg-type]
    assert [[pod.number for pod in wave] for wave in _waves(made)] == [[0], [1], [2, 3], [4, 5, 6, 7], [8]]
    assert [[pod.number for pod in wave] for wave in _waves(made[1:2])] == [[], [1]], "the trainer's pod may have no rollout"


def test_the_trainer_s_own_damage_is_named_when_no_peer_has_the_weights(pods: Pods) -> None:
    pods.first.publish(weights(3), WeightVersion(1, 3))
    pods.first.buffers.segments[1].memory[10] ^= 1
    with pytest.raises(DamagedWeights, match="'t0'"):
        pods.joins.bring()
