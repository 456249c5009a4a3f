import os
import resource
import socket
import threading

import pytest

from tandem.runtime.process.deadline import Deadline
from tandem.runtime.rpc.calls import message_from, message_meta
from tandem.runtime.rpc.channel import BrokenFrame, Channel
from tandem.types.wire import MAGIC, PREFIX, Frame, decode, encode


@pytest.fixture
def pair():
    ends = socket.socketpair()
    yield Channel(ends[0]), Channel(ends[1]), *ends
    [end.close() for end in ends]


def soon() -> float:
    return Deadline(20)


def test_frames_of_every_size_come_back_as_they_were_sent_in_order(pair):
    a, b, *_ = pair
    sent = [
        Frame({"text": "h\N{SNOWMAN} \N{GRINNING FACE} \ud800 \x00", "n": [1, 0.1, None]}, {}, "event", "m\N{SNOWMAN}", 2**40),
        *(Frame({"i": n}, {"x": os.urandom(n), "": b"", "y": bytes([n % 256]) * n}, "call", "echo", n) for n in (0, 1, 65_400, 65_536, 2**20, 9 * 2**20)),
        Frame({str(i): i for i in range(20_000)}, {str(i): bytes([i]) for i in range(200)}, "result"),
    ]
    writer = threading.Thread(target=lambda: [a.send(f.meta, f.blobs, kind=f.kind, method=f.method, call=f.call) for f in sent])
    writer.start()
    for expected in sent:
        frame = b.receive(soon())
        assert frame == expected and dict(frame.blobs) == dict(expected.blobs)
    writer.join()


def test_frames_that_arrive_byte_by_byte_are_whole(pair):
    _, b, raw, _ = pair
    data = encode({"x": 1}, {"a": b"abc", "b": b"d" * 50}, "call", "m") * 2
    threading.Thread(target=lambda: [raw.sendall(data[i : i + 1]) for i in range(len(data))]).start()
    for _ in range(2):
        frame = b.receive(soon())
        assert (frame.meta, frame.method, dict(frame.blobs)) == ({"x": 1}, "m", {"a": b"abc", "b": b"d" * 50})


def test_senders_of_many_threads_do_not_mix_their_frames(pair):
    a, b, *_ = pair
    threads = [threading.Thread(target=lambda i=i: [a.send({"i": i}, {"b": bytes([i]) * 200_000}, kind="event") for _ in range(5)]) for i in range(4)]
    [thread.start() for thread in threads]
    frames = [b.receive(soon()) for _ in range(20)]
    [thread.join() for thread in threads]
    assert all(frame.blobs["b"] == bytes([frame.meta["i"]]) * 200_000 for frame in frames)
    assert sorted(frame.meta["i"] for frame in frames) == sorted(list(range(4)) * 5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 60, 100_070])
def test_a_peer_that_dies_in_the_middle_of_a_frame_is_one_clear_error(pair, length):
    _, b, raw, _ = pair
    raw.sendall(encode({"x": 1}, {"a": bytes(100_000)}, "call")[:length])
    raw.shutdown(socket.SHUT_WR)
    with pytest.raises(BrokenFrame, match="in the middle of a frame"):
        b.receive(soon())


def test_a_peer_that_leaves_between_two_frames_is_no_broken_frame(pair):
    _, b, raw, _ = pair
    raw.sendall(encode({"x": 1}))
    raw.close()
    assert b.receive(soon()).meta == {"x": 1}
    with pytest.raises(EOFError):
        b.receive(soon())


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (PREFIX.pack(MAGIC, 10, 2**31), "10 \\+ 2147483648 bytes; at most 2147483648 are allowed"),
        (PREFIX.pack(MAGIC, 2**32 - 1, 2**64 - 1), "are allowed"),
        (b"HTTP/1.1 200 OK\r\n\r\n", "not a frame: it starts with b'HTTP'"),
        (PREFIX.pack(MAGIC, 4, 0) + b"\xff" * 4, "not JSON"),
        (PREFIX.pack(MAGIC, 100_000, 0) + b"[" * 100_000, "not JSON"),
        (PREFIX.pack(MAGIC, 2, 0) + b"{}", "lacks kind, meta or blobs"),
        (PREFIX.pack(MAGIC, 50, 0) + b'{"kind":"","meta":{},"blobs":[],"call":true}      ', "its call True"),
        (PREFIX.pack(MAGIC, 48, 2) + b'{"kind":"","meta":{},"blobs":[["a",1],["a",1]]} ' + b"xx", "blob 'a' of 1 bytes does not fit"),
        (PREFIX.pack(MAGIC, 40, 2) + b'{"kind":"","meta":{},"blobs":[["a",-1]]}' + b"xx", "blob 'a' of -1 bytes"),
        (PREFIX.pack(MAGIC, 32, 2) + b'{"kind":"","meta":{},"blobs":[]}' + b"xx", "2 bytes too many"),
    ],
)  # fmt: skip
def test_what_is_no_frame_is_one_clear_error(pair, data, problem):
    _, b, raw, _ = pair
    raw.sendall(data)
    with pytest.raises(BrokenFrame, match=problem) as caught:
        b.receive(soon())
    assert "\n" not in str(caught.value)


def test_a_size_of_2_gib_from_a_broken_peer_takes_no_memory(pair):
    _, b, raw, _ = pair
    raw.sendall(PREFIX.pack(MAGIC, 10, 2**31 - 10) + bytes(100))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    raw.close()
    with pytest.raises(BrokenFrame, match="after 100 of 2147483648 bytes"):
        b.receive(soon())
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 * 1024, "kilobytes"


def test_a_deadline_holds_for_a_frame_that_stops_and_for_one_that_is_not_taken(pair):
    a, b, raw, _ = pair
    raw.sendall(encode({"x": 1}, {"a": bytes(1000)})[:-1])
    with pytest.raises(TimeoutError):
        b.receive(Deadline(0.1))
    with pytest.raises(TimeoutError):
        a.send({}, {"a": bytes(2**23)}, kind="call", deadline=Deadline(0.1))


def test_what_is_not_json_is_not_sent_and_the_channel_goes_on(pair):
    a, b, *_ = pair
    with pytest.raises(ValueError, match="not JSON"):
        a.send({"x": object()}, kind="call")
    a.send({"x": 1}, kind="call")
    assert b.receive(soon()).meta == {"x": 1}


def test_a_received_blob_is_a_writable_aligned_view_of_the_frame(pair):
    a, b, *_ = pair
    a.send({"odd": "x" * 3}, {"a": bytes(8), "b": bytes(4)}, kind="call")
    frame = b.receive(soon())
    frame.blobs["a"][:] = b"12345678"
    assert len(encode({"odd": "x" * 3}, kind="call")) % 16 == 0
    assert frame.blobs["a"] == b"12345678" and frame.blobs["a"].obj is frame.blobs["b"].obj


def test_a_frame_of_the_journals_of_older_runs_is_read():
    header = b'{"kind":"samples","meta":{"count":0},"blobs":[["a",2]]}'
    assert decode(PREFIX.pack(b"TDM1", len(header), 2) + header + b"xy") == Frame({"count": 0}, {"a": b"xy"}, "samples")


def test_a_message_with_a_missing_or_an_unknown_field_is_refused():
    from tandem.serving.engines.messages import Abort

    assert message_from(Abort, message_meta(Abort(["a"]))) == Abort(["a"])
    with pytest.raises(ValueError, match=r"not a valid Abort: .*'ids'"):
        message_from(Abort, {})
    with pytest.raises(ValueError, match=r"not a valid Abort: .*unexpected keyword argument 'x'"):
        message_from(Abort, {"ids": [], "x": 1})
