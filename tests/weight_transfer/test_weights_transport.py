"""Weights go from one pod's shared memory to another's over TCP: every byte verified, whatever happens on the way."""

import json
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tcp_proxy import Alter, TcpProxy
from torch import Tensor
from two_pods import CREDENTIAL, TwoPods, pod_id
from whole_tensors import converted

from tandem.layout.shard_offsets import ShardOffsets
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import PeerDied
from tandem.runtime.rpc.channel import Channel
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import DamagedWeights, RunError, TensorEntry, UserError, WeightVersion
from tandem.types.weights import PartEntry
from tandem.weight_transfer.convert import place_shards
from tandem.weight_transfer.manifest import make_manifest
from tandem.weight_transfer.publication import current, publish
from tandem.weight_transfer.register import WeightWriter
from tandem.weight_transfer.shared_memory import Contents, WeightBuffers, decode_label, encode_label
from tandem.weight_transfer.transport.endpoints import Endpoint, Offer, check_protocols, choose, publish_endpoint
from tandem.weight_transfer.transport.handshake import introduce
from tandem.weight_transfer.transport.pieces import Piece, VersionMoved, buckets_of
from tandem.weight_transfer.transport.service import WeightService
from tandem.weight_transfer.transport.tcp_server import WeightServer
from tandem.weight_transfer.update import WeightReader

FIRST = WeightVersion(1, 1)


def weights(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("embed", torch.randn(1000, 300, generator=generator)),
        ("small", torch.randn(7, generator=generator, dtype=torch.float64)),
        ("half", torch.randn(33, 129, generator=generator).to(torch.bfloat16)),
        ("scalar", torch.tensor(3.5)),
        ("nothing", torch.empty(0, 5)),
        ("last", torch.randn(200, 300, generator=generator)),
    ]


def received(pods: TwoPods) -> list[tuple[str, Tensor]]:
    """Returns what an engine of the second pod reads, with every digest verified again."""
    reader = WeightReader(pods.own)
    tensors = [(name, tensor.clone()) for name, tensor in reader.read().tensors]
    reader.close()
    return tensors


def are_equal(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> bool:
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(one, other, strict=True))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., TwoPods]]:
    """Makes two pods; ``alter``: the faults of a proxy between them."""
    torch.set_num_threads(1)
    made: list[TwoPods | TcpProxy] = []

    def make(alter: Callable[[], Alter] | None = None, **settings: object) -> TwoPods:
        pods = TwoPods(tmp_path, **settings)  # type: ignore[arg-type]
        made.append(pods)
        if alter is not None:
            proxy = TcpProxy(pods.service.endpoint.offers[0].port, alter)
            made.append(proxy)
            pods.port = lambda port: proxy.port
        return pods

    yield make
    for each in made:
        each.close()


def test_every_version_arrives_bit_for_bit_and_the_engines_of_the_other_pod_read_it(make: Callable[..., TwoPods]) -> None:
    pods = make()
    for step in range(4):
        sent = pods.publish(weights(step), WeightVersion(1, step))
        got = pods.bring(WeightVersion(1, step))
        assert (got.protocol, got.fetched[:2]) == ("tcp", ((), 0)) and got.manifest.digest == sent.digest
        assert got.manifest.tensors[0].segment not in pods.buffers.names
        assert are_equal(received(pods), weights(step))
    assert pods.bring(WeightVersion(1, 3)).protocol == "", "what is here is not read again"
    with pytest.raises(RunError, match=r"of step 9 \(incarnation 1\) were requested, but of step 3"):
        pods.bring(WeightVersion(1, 9))


def test_an_engine_of_the_other_pod_reads_one_version_while_the_next_one_arrives(make: Callable[..., TwoPods]) -> None:
    pods = make()
    pods.publish(weights(1), FIRST)
    first = pods.bring().manifest.tensors[0].segment
    pods.publish(weights(2), WeightVersion(1, 2))
    second = pods.bring().manifest.tensors[0].segment
    assert first != second and pods.mirror.buffers is not None and {first, second} == set(pods.mirror.buffers.names)


def test_connections_that_are_cut_at_random_bytes_are_made_again_and_nothing_arrives_twice(make: Callable[..., TwoPods]) -> None:
    draw, passed = random.Random(7), [0]

    def cut() -> Alter:
        limit = draw.randrange(20_000, 200_000)

        def alter(sent: int, block: bytearray) -> bool:
            del block[max(0, limit - sent) :]
            passed[0] += len(block)
            return sent + len(block) < limit

        return alter

    pods = make(cut)
    sent = pods.publish(weights(1), FIRST)
    got = pods.bring()
    assert got.fetched.breaks > 3 and got.fetched.rereads == ()
    assert are_equal(received(pods), weights(1))
    # What a connection brought before it was cut is not asked for again, in the middle of a part too; the rest is handshakes.
    assert sent.size_bytes < passed[0] < sent.size_bytes + 10_000 + 800 * (got.fetched.breaks + 1)


def flip_at(place: int, times: int) -> Callable[[], Alter]:
    """Flips the lowest bit of byte ``place`` of what the server sends, on each of the first ``times`` connections that come so far."""
    left = [times]

    def alter(sent: int, block: bytearray) -> bool:
        if left[0] and sent <= place < sent + len(block):
            block[place - sent] ^= 1
            left[0] -= 1
        return True

    return lambda: alter


@pytest.mark.parametrize(("place", "tensor"), [(2_000, "'embed'"), (1_100_000, "'embed'"), (1_250_000, "'last'")])
def test_a_bit_that_is_flipped_on_the_wire_is_caught_named_and_repaired(
    make: Callable[..., TwoPods], caplog: pytest.LogCaptureFixture, place: int, tensor: str
) -> None:
    pods = make(flip_at(place, 1), connections=1)
    pods.publish(weights(1), FIRST)
    assert pods.bring().fetched.rereads == (tensor,)
    assert are_equal(received(pods), weights(1))
    assert f"tensor {tensor} of weights of step 1 (incarnation 1) arrived without its digest; it is read again" in caplog.text


def test_the_altered_part_of_a_tensor_is_named_and_the_others_are_not_read_again(make: Callable[..., TwoPods]) -> None:
    pods = make(flip_at(90_000, 1), connections=1)
    whole = torch.randn(300, 200)
    halves = [ShardOffsets((0, 0), (150, 200)), ShardOffsets((150, 0), (300, 200))]
    shards = [WeightShard("q", (300, 200), half, whole.dtype, lambda half=half: whole[half.slices]) for half in halves]
    pods.writer.publish(place_shards(alone().world, shards), FIRST)
    # The part that is altered is the first one: 150 x 200 x 4 bytes.
    assert pods.bring().fetched.rereads == ("part 0 of 'q'",)
    assert are_equal(received(pods), [("q", whole)])


def test_a_bit_that_is_flipped_every_time_is_damage_and_the_engines_keep_their_version(make: Callable[..., TwoPods]) -> None:
    pods = make()
    pods.publish(weights(0), WeightVersion(1, 0))
    pods.bring()
    manifest = pods.publish(weights(1), FIRST)
    entry = manifest.tensors[-1]
    segment = next(segment for segment in pods.buffers.segments if segment.name == entry.segment)
    segment.memory[entry.offset_bytes + 5] ^= 1
    with pytest.raises(DamagedWeights, match=r"tensor 'last' of weights of step 1 \(incarnation 1\) was received twice and does not have its digest"):
        pods.bring()
    assert are_equal(received(pods), weights(0))
    segment.memory[entry.offset_bytes + 5] ^= 1
    pods.bring()
    assert are_equal(received(pods), weights(1))


def test_weights_that_are_replaced_while_they_are_sent_are_refused_and_never_mixed(make: Callable[..., TwoPods]) -> None:
    """The trainer publishes two more versions in the middle, so the second one overwrites the buffer that is being sent."""
    moved = threading.Event()

    def alter(sent: int, block: bytearray) -> bool:
        if sent > 500_000 and not moved.is_set():
            moved.set()
            pods.publish(weights(2), WeightVersion(1, 2))
            pods.publish(weights(3), WeightVersion(1, 3))
        return True

    pods = make(lambda: alter, connections=1)
    pods.publish(weights(0), WeightVersion(1, 0))
    pods.publish(weights(1), FIRST)
    with pytest.raises(VersionMoved, match=r"it holds the weights of step 3 \(incarnation 1\) in the place of the weights of step 1"):
        pods.bring(FIRST)
    assert moved.is_set() and current(pods.own) is None
    pods.bring()
    assert are_equal(received(pods), weights(3))


def test_a_segment_that_is_being_written_is_not_sent(make: Callable[..., TwoPods]) -> None:
    pods = make()
    pods.publish(weights(1), FIRST)
    held = next(segment for segment in pods.buffers.segments if segment.contents is not None)
    held.contents = None
    with pytest.raises(VersionMoved, match=r"it holds nothing in the place of the weights of step 1"):
        pods.bring()


def test_a_label_is_known_whole_or_not_at_all() -> None:
    one, other = Contents(FIRST, "0f" * 16), Contents(WeightVersion(2, 7), "a0" * 16)
    old, new = encode_label(one), encode_label(other)
    assert decode_label(old) == one and decode_label(new) == other and decode_label(bytes(len(old))) is None
    torn = [decode_label(new[:cut] + old[cut:]) for cut in range(len(old) + 1)]
    # A prefix that both labels share makes a cut in it no cut.
    assert set(torn) == {one, None, other}


def test_a_pod_without_the_credential_gets_no_byte_and_one_line(make: Callable[..., TwoPods]) -> None:
    pods = make(credential="another credential")
    pods.publish(weights(1), FIRST)
    with pytest.raises(RunError, match=r"pod first at 127.0.0.1:\d+ does not have this pod's credential; give both pods the same credential file") as caught:
        pods.bring()
    assert "\n" not in str(caught.value)


def test_a_client_that_skips_the_proof_is_refused(make: Callable[..., TwoPods]) -> None:
    pods = make()
    pods.publish(weights(1), FIRST)
    with socket.create_connection(("127.0.0.1", pods.service.endpoint.offers[0].port)) as connection:
        channel = Channel(connection)
        channel.send({"number": "1"}, kind="hello")
        challenge = channel.receive(Deadline(5))
        # Its own proof, sent back, is that of a server.
        channel.send({"proof": challenge.meta["proof"]}, kind="proof")
        assert (refused := channel.receive(Deadline(5))).kind == "refused" and refused.meta["message"] == "wrong credential"
        with pytest.raises(EOFError):
            channel.receive(Deadline(5))


@pytest.mark.parametrize(
    "meta",
    [
        {},
        {"segment": "x", "version": [1, 1], "digest": "0" * 32, "ranges": [[0, -1]]},
        {"segment": "x", "version": "ab", "digest": 1, "ranges": 3},
        {"segment": None, "version": [1], "digest": "", "ranges": [[]]},
    ],
)
def test_a_request_that_is_none_ends_its_connection_only(make: Callable[..., TwoPods], meta: dict[str, object]) -> None:
    pods = make()
    pods.publish(weights(1), FIRST)
    with socket.create_connection(("127.0.0.1", pods.service.endpoint.offers[0].port)) as connection:
        channel = Channel(connection)
        introduce(channel, CREDENTIAL, "the server", Deadline(5))
        channel.send(meta, kind="read")
        with pytest.raises((EOFError, AssertionError)):
            assert channel.receive(Deadline(5)).kind == "bytes"
    pods.bring()


def test_ranges_outside_the_segment_are_refused(make: Callable[..., TwoPods]) -> None:
    pods = make()
    manifest = pods.publish(weights(1), FIRST)
    source = pods.open_source(pods.service.endpoint, pods.service.endpoint.offers[0])
    piece = Piece("'label'", pods.buffers.segments[0].size_bytes - 8, 16, "")
    with pytest.raises(RunError, match="a range lies outside the"):
        source.read(manifest.tensors[0].segment, Contents(FIRST, manifest.digest), [piece], memoryview(bytearray(4 << 20)), Deadline(5))


def test_a_server_that_falls_silent_is_asked_again(make: Callable[..., TwoPods]) -> None:
    stalled, release = [0], threading.Event()

    def stall_once(sent: int, block: bytearray) -> bool:
        if sent > 300_000 and not stalled[0]:
            stalled[0] = 1
            release.wait(60)
            return False
        return True

    pods = make(lambda: stall_once, silent_s=0.2, connections=1)
    pods.publish(weights(1), FIRST)
    got = pods.bring()
    release.set()
    assert got.fetched.breaks >= 1 and are_equal(received(pods), weights(1))


def test_a_transfer_ends_at_its_deadline(make: Callable[..., TwoPods]) -> None:
    release = threading.Event()

    def stall(sent: int, block: bytearray) -> bool:
        return sent < 300_000 or release.wait(60)

    pods = make(lambda: stall, silent_s=30.0, deadline_s=0.3, connections=1)
    pods.publish(weights(1), FIRST)
    with pytest.raises(TimeoutError, match=r"pod first at 127.0.0.1:\d+ did not send the weights within 0.3 s"):
        pods.bring()
    release.set()
    assert current(pods.own) is None


def test_a_pod_that_is_gone_is_named_when_patience_ends(make: Callable[..., TwoPods]) -> None:
    pods = make(patience_s=0.2)
    pods.publish(weights(1), FIRST)
    endpoint = pods.service.endpoint
    pods.service.close()
    with pytest.raises(RunError, match=r"no pod serves the shared memory tandem-.* of the published weights; its pod has ended"):
        pods.bring()
    publish_endpoint(pods.shared, endpoint, 60)  # As a pod that was killed leaves it.
    with pytest.raises(PeerDied, match=r"the connection to pod first at 127.0.0.1:\d+ broke: .*, and nothing came for 0.2 s") as caught:
        pods.bring()
    assert caught.value.peer == "first"


@pytest.mark.full
def test_a_host_that_does_not_answer_a_connection_is_named_when_patience_ends(make: Callable[..., TwoPods]) -> None:
    """A second without a look at the clock would count as a pause of this process, after which patience begins anew."""
    pods = make(patience_s=1.2, silent_s=1.1)
    pods.publish(weights(1), FIRST)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        pods.port = lambda port: full.getsockname()[1]
        with pytest.raises(PeerDied, match=r"broke: it was silent for too long, and nothing came for 1.2 s"):
            pods.bring()
        [each.close() for each in waiting]


def test_shared_memory_that_is_too_small_is_one_line_with_the_size_that_is_needed(make: Callable[..., TwoPods]) -> None:
    pods = make()
    name = pods.buffers.names[0]
    part = PartEntry(0, (0,), (2**46,), "0" * 32)
    publish(pods.shared, make_manifest(FIRST, [TensorEntry("huge", "float32", (2**46,), name, 0, 2**48, (part,))]))
    says = r"needs 536,870,912.0 MiB of shared memory for its weights and /dev/shm has .* MiB free; make /dev/shm larger"
    with pytest.raises(RunError, match=says) as caught:
        pods.bring()
    assert "\n" not in str(caught.value) and pods.mirror.buffers is None and current(pods.own) is None


def test_a_port_in_use_is_one_line_and_no_endpoint_is_published(make: Callable[..., TwoPods]) -> None:
    pods = make()
    taken = pods.service.endpoint.offers[0].port
    with pytest.raises(UserError, match=rf"the weights of pod second: port {taken} on 127.0.0.1 cannot be taken .*; choose a free port"):
        WeightService("second", pods.buffers.segments, pods.shared, CREDENTIAL, ("tcp",), port=taken)
    assert [entry.key for entry in pods.shared.list("weights/endpoints/")] == ["weights/endpoints/first"]
    with pytest.raises(UserError, match="say which one other pods connect to"):
        WeightService("second", pods.buffers.segments, pods.shared, CREDENTIAL, ("tcp",), host="0.0.0.0")


def test_the_fastest_protocol_that_both_pods_have_is_chosen() -> None:
    offers = (Offer("tcp", "a", 1), Offer("rdma", "a", 2, (5, 6)), Offer("mooncake", "a", 3, (5, 6)))
    endpoint = Endpoint("first", ("s",), 9, offers)
    chosen = [choose(endpoint, have).protocol for have in (("tcp",), ("tcp", "mooncake"), ("tcp", "mooncake", "rdma"))]
    assert chosen == ["tcp", "mooncake", "rdma"]
    with pytest.raises(RunError, match="pod first serves weights over tcp and this pod reads over rdma; give both a common protocol"):
        choose(Endpoint("first", ("s",), 9, offers[:1]), ("rdma",))
    assert check_protocols(["tcp", "rdma"]) == ("rdma", "tcp")
    for wrong in ([], ["udp"]):
        with pytest.raises(UserError, match=r"use .*rdma, mooncake, tcp"):
            check_protocols(wrong)


def test_an_endpoint_that_is_none_is_named(make: Callable[..., TwoPods]) -> None:
    pods = make()
    pods.publish(weights(1), FIRST)
    pods.shared.put("weights/endpoints/first", json.dumps({"segments": 3}).encode())
    with pytest.raises(RunError, match="the entry 'weights/endpoints/first' of the coordination store is not the endpoint of a pod"):
        pods.bring()


def test_buckets_keep_the_order_and_every_piece_once() -> None:
    pieces = [Piece(str(i), 0, size, "") for i, size in enumerate([3, 0, 9, 10, 25, 1])]
    assert [[piece.name for piece in bucket] for bucket in buckets_of(pieces, 10)] == [["0", "1", "2"], ["3"], ["4"], ["5"]]


def test_a_replaced_trainer_s_weights_follow_those_of_the_one_before(make: Callable[..., TwoPods]) -> None:
    pods = make()
    pods.publish(weights(1), WeightVersion(1, 9))
    pods.bring()
    fresh = WeightBuffers.create(pod_id(), 2 << 20)
    writer = WeightWriter(fresh, pods.shared, 1)
    service = WeightService("again", fresh.segments, pods.shared, CREDENTIAL, ("tcp",))
    writer.publish(converted(weights(2)), WeightVersion(2, 3))
    pods.bring(WeightVersion(2, 3))
    assert are_equal(received(pods), weights(2))
    service.close()
    writer.close()


def test_a_server_without_segments_has_moved_on(make: Callable[..., TwoPods]) -> None:
    pods = make()
    pods.publish(weights(1), FIRST)
    empty = WeightServer([], CREDENTIAL, name="nothing")
    empty.start()
    pods.port = lambda port: empty.port
    with pytest.raises(VersionMoved, match="it holds nothing in the place of"):
        pods.bring()
    empty.close()
