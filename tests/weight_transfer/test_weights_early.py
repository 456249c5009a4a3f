"""Another pod reads a version while it is registered: the same bits, whatever is changed, killed, cut or missing meanwhile."""

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from pod_process import tensors
from pod_processes import PodProcess
from tcp_proxy import Alter, TcpProxy
from torch import Tensor
from two_pods import CREDENTIAL, TwoPods

from tandem.layout.shard_offsets import whole_offsets
from tandem.runtime.process.deadline import Deadline
from tandem.trainer.checkpoint.replica_state import WeightShard
from tandem.trainer.parallel.ranks import alone
from tandem.types import RunError, WeightManifest, WeightVersion
from tandem.weight_transfer import register
from tandem.weight_transfer.announcement import Announcement, Board, Place, announced, board_bytes, new_attempt, read_note, write_note
from tandem.weight_transfer.convert import ConvertedWeights, place_shards
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.shared_memory import Contents, Segment
from tandem.weight_transfer.transport import mirror
from tandem.weight_transfer.transport.pieces import Piece, VersionMoved
from tandem.weight_transfer.transport.tcp_source import TcpSource
from tandem.weight_transfer.update import WeightReader

FIRST, SECOND = WeightVersion(1, 1), WeightVersion(1, 2)
ROWS, COLUMNS, COUNT = 100, 300, 6
PART = ROWS * COLUMNS * 4


def weights(seed: int) -> list[tuple[str, Tensor]]:
    drawn = torch.Generator().manual_seed(seed)
    made = [(f"t{i}", torch.randn(ROWS, COLUMNS, generator=drawn)) for i in range(COUNT)]
    return [*made[:3], ("nothing", torch.empty(0, 5)), *made[3:]]


def read_by(sent: Sequence[tuple[str, Tensor]], before: Callable[[str], object]) -> ConvertedWeights:
    """Returns ``sent`` as a trainer's rank writes it, which calls ``before`` with the name of each tensor before it reads it."""
    shards = [
        WeightShard(name, tuple(tensor.shape), whole_offsets(tuple(tensor.shape)), tensor.dtype, lambda name=name, tensor=tensor: (before(name), tensor)[1])
        for name, tensor in sent
    ]
    return place_shards(alone().world, shards)


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    ends = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends, "it did not come to that"
        time.sleep(0.002)


def received(pods: TwoPods) -> list[tuple[str, Tensor]]:
    reader = WeightReader(pods.own)
    found = [(name, tensor.clone()) for name, tensor in reader.read().tensors]
    reader.close()
    return found


def are_equal(one: Sequence[tuple[str, Tensor]], other: Sequence[tuple[str, Tensor]]) -> bool:
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(one, other, strict=True))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., TwoPods]]:
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


def begin(pods: TwoPods, version: WeightVersion) -> None:
    pods.mirror.begin_early(version, pods.protocols, Deadline(pods.deadline_s))


def come(pods: TwoPods) -> int:
    """Returns how many parts have come to the second pod before they are published."""
    early = pods.mirror._early
    assert early is not None
    return sum(piece.is_verified for piece in list(early._pieces))


def come_bytes(pods: TwoPods) -> int:
    """Returns how many bytes have come to the second pod before they are published."""
    early = pods.mirror._early
    assert early is not None
    return early._done_bytes()


def register_early(pods: TwoPods, sent: Sequence[tuple[str, Tensor]], version: WeightVersion, before: Callable[[str], object] = str) -> WeightManifest:
    return pods.writer.publish(read_by(sent, before), version, announces=True)


def test_parts_come_while_others_are_registered_and_the_bits_are_those_without_it(make: Callable[..., TwoPods], tmp_path: Path) -> None:
    pods = make()
    other = mirror.WeightMirror(pods.shared, pods.own.__class__(tmp_path / "off.sqlite"), pods.mirror._create, pods.open_source)
    for step in range(4):
        seen = list[object]()

        def last(name: str, seen: list[object] = seen, step: int = step) -> None:
            if name == "t5":
                until(lambda: come(pods) == COUNT - 1)
                into = pods.mirror._early._begun.into  # type: ignore[union-attr]
                seen[:] = [into.contents, *(None if found is None else found[0].version.step for found in map(current, (pods.own, pods.shared)))]

        begin(pods, WeightVersion(1, step))
        sent = register_early(pods, weights(step), WeightVersion(1, step), last)
        before = step - 1 if step else None
        assert seen == [None, before, before], "nothing is published, and no label says that it is there"
        got, serial = pods.bring(WeightVersion(1, step)), other.bring(None, ("tcp",), Deadline(60.0))
        assert got.early_bytes >= (COUNT - 1) * PART and got.fetched == ((), 0, COUNT * PART) == serial.fetched and serial.early_bytes == 0
        assert got.manifest.digest == serial.manifest.digest == sent.digest and are_equal(received(pods), weights(step))
        held = [next(each for each in of.buffers.segments if each.contents is not None and each.contents.version.step == step) for of in (pods.mirror, other)]
        assert held[0].memory[: sent.size_bytes] == held[1].memory[: sent.size_bytes]
    other.close()


def test_what_is_here_already_does_not_come_early_either(make: Callable[..., TwoPods]) -> None:
    pods, sent = make(), weights(1)
    pods.publish(sent, FIRST)
    pods.bring()
    fresh = [(name, tensor + 1 if name == "t2" else tensor) for name, tensor in sent]
    begin(pods, SECOND)
    register_early(pods, fresh, SECOND, lambda name: name == "t5" and until(lambda: come(pods) == 1))
    got = pods.bring(SECOND)
    assert got.early_bytes == got.fetched.size_bytes == PART and are_equal(received(pods), fresh)


def test_a_part_that_is_registered_with_other_bytes_after_it_was_read_is_read_again_and_is_no_damage(make: Callable[..., TwoPods]) -> None:
    pods, sent = make(), weights(1)

    def fail(name: str) -> None:
        if name == "t5":
            until(lambda: come(pods) == COUNT - 1)
            raise OSError(5, "Input/output error")

    begin(pods, FIRST)
    with pytest.raises(OSError, match="Input/output error"):
        register_early(pods, sent, FIRST, fail)
    assert current(pods.shared) is None and all(read_note(segment) is None for segment in pods.buffers.segments), "nothing is announced any more"
    changed = [(name, tensor + 1 if name in ("t1", "t3") else tensor) for name, tensor in sent]
    register_early(pods, changed, FIRST)
    got = pods.bring(FIRST)
    assert got.early_bytes == (COUNT - 3) * PART and got.fetched == ((), 0, COUNT * PART) and are_equal(received(pods), changed)


def test_a_part_of_which_the_beginning_came_is_read_on(make: Callable[..., TwoPods]) -> None:
    passed, goes_on = [0], threading.Event()

    def stall(sent: int, block: bytearray) -> bool:
        passed[0] += len(block)
        if passed[0] > 4.2 * PART and not goes_on.is_set():
            goes_on.wait(30)
            return False
        return True

    pods = make(lambda: stall, connections=1)
    begin(pods, FIRST)
    register_early(pods, weights(1), FIRST)
    until(lambda: passed[0] > 4.2 * PART and come_bytes(pods) >= 3 * PART)
    pods.mirror._early._patience_s = 0.0  # type: ignore[union-attr]
    threading.Timer(0.2, goes_on.set).start()
    got = pods.bring(FIRST)
    assert 3 * PART <= got.early_bytes < COUNT * PART and got.fetched.rereads == () and are_equal(received(pods), weights(1))
    assert passed[0] < COUNT * PART + 200_000, "what had come did not come again"


def test_what_has_not_come_when_it_is_published_comes_over_the_connections_that_are_there(make: Callable[..., TwoPods]) -> None:
    passed, goes_on, opened = [0], threading.Event(), [0]

    def hold() -> Alter:
        opened[0] += 1

        def alter(sent: int, block: bytearray) -> bool:
            passed[0] += len(block)
            return passed[0] < 3.2 * PART or goes_on.wait(30)

        return alter

    pods = make(hold, connections=1)
    begin(pods, FIRST)
    register_early(pods, weights(1), FIRST)
    until(lambda: passed[0] > 3.2 * PART and come_bytes(pods) >= 2 * PART)
    told = list[int]()
    threading.Timer(0.3, goes_on.set).start()
    got = pods.mirror.bring(FIRST, ("tcp",), Deadline(60.0), lambda done, total: told.append(done))
    assert opened[0] == 2, "one that tells of parts, and one that brings them"
    assert 2 * PART <= got.early_bytes < COUNT * PART and told[-1] == COUNT * PART and are_equal(received(pods), weights(1))


def test_a_bit_that_flips_on_the_way_of_an_early_part_is_named_and_the_part_is_read_again(make: Callable[..., TwoPods]) -> None:
    passed, flips = [0], [1]

    def flip(sent: int, block: bytearray) -> bool:
        passed[0] += len(block)
        if flips[0] and passed[0] > 2.5 * PART:
            flips[0] -= 1
            block[len(block) // 2] ^= 4
        return True

    pods = make(lambda: flip, connections=1)
    begin(pods, FIRST)
    register_early(pods, weights(1), FIRST, lambda name: name == "t5" and until(lambda: passed[0] > (COUNT - 1) * PART))
    got = pods.bring(FIRST)
    assert got.fetched.rereads == ("'t2'",) and are_equal(received(pods), weights(1))


def test_a_server_sends_no_part_that_is_not_ready_or_of_another_registration(make: Callable[..., TwoPods]) -> None:
    pods, answers = make(), dict[str, object]()

    def ask(contents: Contents, part: int, segment: str, bytes_more: int = 0) -> object:
        source, into = pods.open_source(pods.service.endpoint, pods.service.endpoint.offers[0]), memoryview(bytearray(pods.size_bytes))
        try:
            source.read(segment, contents, [Piece("it", aligned(part), PART + bytes_more, "")], into, Deadline(5))
        except VersionMoved:
            return "refused"
        return bytes(into[aligned(part) : aligned(part) + PART])

    def aligned(part: int) -> int:
        return part * -(-PART // 64) * 64

    def look(name: str) -> None:
        if name == "t2":
            announcement, _ = announced(pods.shared)
            assert announcement is not None and announcement.version == SECOND and announcement.board == ""
            where, contents = announcement.segment, announcement.contents
            answers.update(
                ready=ask(contents, 1, where), not_yet=ask(contents, 2, where), across=ask(contents, 1, where, 128),
                other_attempt=ask(Contents(SECOND, new_attempt()), 1, where), other_version=ask(Contents(FIRST, contents.digest), 1, where),
                other_segment=ask(contents, 1, next(each for each in pods.buffers.names if each != where)), contents=contents, where=where,
            )  # fmt: skip

    pods.publish(weights(1), FIRST)
    register_early(pods, weights(2), SECOND, look)
    assert answers.pop("ready") == weights(2)[1][1].numpy().tobytes()
    contents, where = answers.pop("contents"), answers.pop("where")
    assert isinstance(contents, Contents) and isinstance(where, str)
    assert answers == dict.fromkeys(("not_yet", "across", "other_attempt", "other_version", "other_segment"), "refused")
    # What was read early is read on when it is published, until the segment is taken by another version.
    assert ask(contents, 1, where) == weights(2)[1][1].numpy().tobytes()
    pods.publish(weights(3), WeightVersion(1, 3))
    pods.publish(weights(4), WeightVersion(1, 4))
    assert ask(contents, 1, where) == "refused"


@pytest.mark.parametrize("short", ["second pod", "first pod"])
def test_where_memory_is_short_the_weights_are_read_when_they_are_published(
    make: Callable[..., TwoPods], monkeypatch: pytest.MonkeyPatch, short: str
) -> None:  # fmt: skip
    pods, asked = make(), list[int]()
    if short == "second pod":
        own = mirror.check_free

        def check_free(size_bytes: int) -> None:
            asked.append(size_bytes)
            if len(asked) == 1:
                raise RunError("this run needs 4.0 MiB of shared memory for its weights and /dev/shm has 1.0 MiB free")
            own(size_bytes)

        monkeypatch.setattr(mirror, "check_free", check_free)
    else:

        def create(*_: object, **__: object) -> Segment:
            asked.append(0)
            raise RunError("shared memory /dev/shm is full")

        monkeypatch.setattr(register.Segment, "create", create)
    begin(pods, FIRST)
    register_early(pods, weights(1), FIRST, lambda name: name == "t5" and until(lambda: bool(asked)))
    monkeypatch.undo()
    got = pods.bring(FIRST)
    assert asked and got.early_bytes == 0 and got.fetched == ((), 0, COUNT * PART) and are_equal(received(pods), weights(1))


def test_a_version_that_is_never_announced_or_published_under_another_number_is_read_as_ever(make: Callable[..., TwoPods]) -> None:
    pods = make()
    begin(pods, SECOND)
    pods.publish(weights(1), FIRST)
    assert pods.bring(FIRST).early_bytes == 0
    begin(pods, FIRST)
    assert pods.mirror._early is None, "what is here is not read again"
    begin(pods, WeightVersion(1, 3))
    register_early(pods, weights(2), SECOND)
    assert pods.bring(SECOND).early_bytes == 0 and are_equal(received(pods), weights(2))


def test_the_weights_of_a_trainer_that_is_killed_while_it_registers_are_no_version_and_its_successor_s_arrive(
    make: Callable[..., TwoPods], tmp_path: Path
) -> None:  # fmt: skip
    pods = make()
    pods.publish(weights(1), FIRST)
    pods.bring()
    helper = [sys.executable, str(Path(__file__).parent / "helpers_weights.py"), "announce_and_wait", str(tmp_path / "shared.sqlite"), *pods.buffers.names]
    begin(pods, SECOND)
    with subprocess.Popen(helper, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "waits\n"
        until(lambda: come(pods) == 2)
        announcement, _ = announced(pods.shared)
        assert announcement is not None and announcement.version == SECOND
        note = next(note for segment in pods.buffers.segments if (note := read_note(segment)) is not None)
        trainer.kill()
    with pytest.raises(FileNotFoundError):
        Segment.open(note.board)
    published, held = current(pods.shared), current(pods.own)
    assert published is not None and held is not None and published[0].version == held[0].version == FIRST
    with pytest.raises(RunError, match=r"of step 2 \(incarnation 1\) were requested, but of step 1"):
        pods.bring(SECOND)
    assert are_equal(received(pods), weights(1))
    pods.writer.close()
    pods.writer = register.WeightWriter(register.WeightBuffers.open(pods.buffers.names), pods.shared, 1)
    after = WeightVersion(2, 2)
    begin(pods, after)
    register_early(pods, weights(3), after, lambda name: name == "t5" and until(lambda: come(pods) == COUNT - 1))
    got = pods.bring(after)
    assert got.early_bytes >= (COUNT - 1) * PART and got.fetched.rereads == () and are_equal(received(pods), weights(3))


@pytest.mark.full
def test_a_pod_that_is_killed_while_it_reads_early_leaves_the_trainer_and_its_successor_undisturbed(make: Callable[..., TwoPods], tmp_path: Path) -> None:
    passed = [0]

    def count(sent: int, block: bytearray) -> bool:
        passed[0] += len(block)
        return True

    pods, rows = make(), 200
    proxy = TcpProxy(pods.service.endpoint.offers[0].port, lambda: count)
    receiver = PodProcess("receive", tmp_path, port=proxy.port)
    assert receiver.ask_early(1, 1) == {"begun": True}

    def kill(name: str) -> None:
        if name == "layer6.matrix":
            until(lambda: passed[0] > 5 * rows * 64 * 4)
            os.kill(receiver.process.pid, signal.SIGKILL)

    register_early(pods, tensors(1, rows), FIRST, kill)
    assert receiver.process.wait() == -signal.SIGKILL
    got = pods.bring(FIRST)
    assert got.early_bytes == 0 and are_equal(received(pods), tensors(1, rows))
    proxy.close()


@pytest.mark.full
def test_sixty_versions_that_are_cut_altered_or_registered_twice_while_they_are_read_arrive_whole(make: Callable[..., TwoPods]) -> None:
    draw, faults, flipped = random.Random(3), {"cut": 0, "flip": 0, "fail": 0}, set[int]()

    def fault() -> Alter:
        kind, at = draw.choice(["", "", "cut", "flip"]), draw.randrange(3_000, COUNT * PART)

        def alter(sent: int, block: bytearray) -> bool:
            # A part that arrives altered twice counts as damaged where it comes from.
            if kind and sent <= at < sent + len(block) and not (kind == "flip" and step in flipped):
                faults[kind] += 1
                if kind == "cut":
                    del block[at - sent :]
                    return False
                flipped.add(step)
                block[at - sent] ^= 1 << draw.randrange(8)
            return True

        return alter

    pods, early_bytes, step = make(fault, silent_s=1.0), 0, 0
    for step in range(60):
        version, sent, fails = WeightVersion(1, step), weights(step), draw.choice([None, None, "t2", "t5"])
        begin(pods, version)

        def before(name: str, fails: str | None = fails) -> None:
            time.sleep(draw.choice([0.0, 0.002, 0.01]))
            if name == fails:
                raise OSError(5, "Input/output error")

        if fails:
            faults["fail"] += 1
            with pytest.raises(OSError, match="Input/output error"):
                register_early(pods, sent, version, before)
            sent = [(name, tensor + 1 if name in ("t0", "t4") else tensor) for name, tensor in sent]
        register_early(pods, sent, version, lambda name: before(name, None))
        got = pods.bring(version)
        early_bytes += got.early_bytes
        assert are_equal(received(pods), sent), f"version {step}"
    assert min(faults.values()) >= 5 and early_bytes > 20 * PART, (faults, early_bytes)


def test_a_mark_is_known_whole_and_of_its_own_registration_alone() -> None:
    memory, attempt = memoryview(bytearray(board_bytes(3))), new_attempt()
    board, places = Board(memory, attempt), [Place(0, 64), Place(64, 4), Place(128, 64)]
    assert Board(memory, attempt).places() == []
    board.begin(places)
    whole = bytes(memory)
    board.mark(1, "0f" * 16)
    assert Board(memory, attempt).ready() == {1: "0f" * 16} and Board(memory, attempt).places() == places
    marked = bytes(memory)
    changed = [i for i, (old, new) in enumerate(zip(whole, marked, strict=True)) if old != new]
    for cut in range(changed[0] + 1, changed[-1] + 1):
        assert Board(memoryview(bytearray(marked[:cut] + whole[cut:])), attempt).ready() == {}, cut
    # A mark of the registration before, at the same place.
    again = new_attempt()
    Board(memory, again).begin(places)
    assert Board(memory, again).ready() == {} and Board(memory, attempt).places() == []


def test_a_note_is_known_whole_or_not_at_all() -> None:
    with Segment.create("test", "note", 4096) as segment:
        one = Announcement(FIRST, segment.name, 1, new_attempt(), "board-1")
        other = Announcement(WeightVersion(2, 7), segment.name, 22, new_attempt(), "board-22")
        assert read_note(segment) is None
        write_note(segment, one)
        old = bytes(segment.note)
        assert read_note(segment) == one and segment.contents is None
        write_note(segment, other)
        new = bytes(segment.note)
        for cut in range(struct.calcsize("<4sHQ") + 120):
            segment.note[:] = new[:cut] + old[cut:]
            assert read_note(segment) in (one, None, other)
        write_note(segment, None)
        assert read_note(segment) is None


def test_a_reader_without_the_credential_is_told_of_no_part(make: Callable[..., TwoPods]) -> None:
    pods = make()
    register_early(pods, weights(1), FIRST)
    announcement, _ = announced(pods.shared)
    assert announcement is not None
    port = pods.service.endpoint.offers[0].port
    told = list(TcpSource("it", "127.0.0.1", port, CREDENTIAL).follow(announcement.segment, announcement.contents, Deadline(5)))
    assert told[-1].meta["is_all"]
    with pytest.raises(RunError, match="does not have this pod's credential"):
        list(TcpSource("it", "127.0.0.1", port, "another").follow(announcement.segment, announcement.contents, Deadline(5)))
