"""Element-wise deltas: what is encoded comes back bit for bit, another pod reads few bytes, and whatever is damaged, missing or of another version is read
whole."""

import itertools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from two_pods import TwoPods

from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.rpc.calls import PeerDied
from tandem.types import RunError, WeightVersion
from tandem.weight_transfer import elementwise
from tandem.weight_transfer.copying import digest_of
from tandem.weight_transfer.delta import KEY
from tandem.weight_transfer.publication import current
from tandem.weight_transfer.transport.pieces import Piece, VersionMoved
from tandem.weight_transfer.transport.tcp_source import TcpSource
from tandem.weight_transfer.update import WeightReader

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn]
BLOCK = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "BLOCK_ELEMENTS", BLOCK)


def version(step: int) -> WeightVersion:
    return WeightVersion(1, step)


def through(old: Tensor, new: Tensor, *, in_place: bool = False) -> int | None:
    """Encodes and applies; returns the bytes of the encoding after comparing what comes of it."""
    size, item = old.nbytes, old.element_size()
    encoded = elementwise.encode(old.data_ptr(), new.data_ptr(), size, item)
    if encoded is None:
        return None
    base = old.clone()
    made = base if in_place else torch.empty_like(old)
    digest = elementwise.apply(memoryview(encoded), base.data_ptr(), made.data_ptr(), size, item)
    assert digest == digest_of(new.data_ptr(), size)
    assert torch.equal(made.view(torch.uint8), new.view(torch.uint8))
    changed = (old.view(torch.uint8).view(-1, item) != new.view(torch.uint8).view(-1, item)).any(1).nonzero().flatten()
    found = elementwise.changed_positions(memoryview(encoded), size, item).tolist()
    assert set(changed.tolist()) <= set(found) and found == sorted(set(found)) and (len(found) == len(changed) or len(encoded) > len(found) * item)
    return len(encoded)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.2])
@pytest.mark.parametrize("in_place", [False, True])
def test_any_bits_of_the_changed_elements_come_back(dtype: torch.dtype, share: float, in_place: bool) -> None:
    """Random bits, NaN and infinities among them, on both sides, at lengths around that of a block."""
    draw, item = torch.Generator().manual_seed(7), torch.empty(0, dtype=dtype).element_size()
    for count in (1, 255, 256, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 300):
        old = torch.randint(0, 256, (count * item,), dtype=torch.uint8, generator=draw)
        where = torch.rand(count, generator=draw) < share
        new = old.clone().view(count, item)
        new[where] = torch.randint(0, 256, (int(where.sum()), item), dtype=torch.uint8, generator=draw)
        size = through(old.view(dtype), new.flatten().view(dtype), in_place=in_place)
        assert size is not None or share > 0.05 or item == 1


@pytest.mark.parametrize(
    "positions", [[0], [254], [255], [256], [510], [511], [0, 255, 511], [0, 256, 512], [BLOCK - 1], [BLOCK], [0, BLOCK - 1, BLOCK, 2 * BLOCK]]
)
def test_gaps_around_the_longest_of_a_byte_come_back(positions: list[int]) -> None:
    old = torch.zeros(2 * BLOCK + 1, dtype=torch.bfloat16)
    new = old.clone()
    new[positions] = torch.arange(1.0, len(positions) + 1, dtype=torch.bfloat16)
    assert through(old, new) is not None


def test_a_block_in_which_most_has_changed_is_there_as_it_is_and_the_others_are_not() -> None:
    old = torch.zeros(10 * BLOCK, dtype=torch.bfloat16)
    new = old.clone()
    new[3 * BLOCK : 4 * BLOCK] = torch.randn(BLOCK).bfloat16()
    new[7777] = 1.0
    size = through(old, new)
    assert size is not None and 2 * BLOCK < size < 2 * BLOCK + 500
    assert through(old, torch.randn(10 * BLOCK).bfloat16()) is None


def test_the_first_step_of_adam_is_a_fiftieth_of_the_bytes_in_bf16_and_is_not_encoded_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kingma and Ba: the first update of every element is the learning rate, up or down. At 3e-6, and weights as a model begins with, 3 to 4 of 100 change in
    bf16."""
    monkeypatch.setattr(elementwise, "BLOCK_ELEMENTS", 2**18)
    draw = torch.Generator().manual_seed(1)
    weights, signs = torch.randn(300_000, generator=draw) * 0.02, torch.randn(300_000, generator=draw).sign()
    for dtype in (torch.bfloat16, torch.float32):
        before = weights.to(dtype)
        after = (before.float() - 3e-6 * signs).to(dtype)
        size = through(before, after)
        if dtype is torch.float32:
            assert size is None
        else:
            assert size is not None and 0.03 < float((before != after).float().mean()) < 0.06 and size < 0.03 * before.nbytes, size / before.nbytes


def test_damaged_encodings_are_refused_or_come_to_another_digest() -> None:
    old = torch.zeros(3000, dtype=torch.bfloat16)
    new = old.clone()
    new[::7] = 1.0
    encoded = elementwise.encode(old.data_ptr(), new.data_ptr(), old.nbytes, 2)
    assert encoded is not None
    draw, wanted, refused = random.Random(0), digest_of(new.data_ptr(), new.nbytes), 0
    for bit in draw.sample(range(8 * len(encoded)), 200):
        damaged = bytearray(encoded)
        damaged[bit // 8] ^= 1 << bit % 8
        made = torch.empty_like(old)
        try:
            digest = elementwise.apply(memoryview(damaged), old.data_ptr(), made.data_ptr(), old.nbytes, 2)
        except ValueError:
            refused += 1
        else:
            assert digest != wanted or torch.equal(made, new)
    assert refused > 0
    into = old.clone()
    for end in (0, 7, 20, len(encoded) - 1):
        with pytest.raises(ValueError, match=r"it ends too early|header|end where"):
            elementwise.apply(memoryview(encoded)[:end], old.data_ptr(), into.data_ptr(), old.nbytes, 2)
    with pytest.raises(ValueError, match="follows its last block"):
        elementwise.apply(memoryview(encoded + b"x"), old.data_ptr(), into.data_ptr(), old.nbytes, 2)


# -- between two pods ---------------------------------------------------------------------------------------------------

SHAPE = (400, 300)
SIZE = 2 * 400 * 300


def steps(count: int, names: int = 3, share: float = 0.01) -> Iterator[list[tuple[str, Tensor]]]:
    """Yields the weights of one step after another, of which ``share`` changes each time."""
    draw = torch.Generator().manual_seed(5)
    values = [torch.randn(SHAPE, generator=draw).bfloat16() for _ in range(names)]
    for _ in range(count):
        yield [(f"t{i}", value.clone()) for i, value in enumerate(values)]
        for value in values:
            where = torch.rand(SHAPE, generator=draw) < share
            value[where] = torch.randn(SHAPE, generator=draw).bfloat16()[where]


def are_here(store: EmbeddedStore, sent: Sequence[tuple[str, Tensor]]) -> bool:
    reader = WeightReader(store)
    try:
        return all(a == b and torch.equal(x, y) for (a, x), (b, y) in zip(reader.read().tensors, sent, strict=True))
    finally:
        reader.close()


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[TwoPods]:
    torch.set_num_threads(1)
    made = TwoPods(tmp_path, full_update_every=100, patience_s=1.0)
    yield made
    made.close()


def go_on(pods: TwoPods, weights: Iterator[list[tuple[str, Tensor]]], step: int) -> list[tuple[str, Tensor]]:
    """Publishes the next weights; the first of them are brought too."""
    sent = next(weights)
    pods.publish(sent, version(step))
    return sent


def test_another_pod_reads_positions_and_values_instead_of_parts(pods: TwoPods) -> None:
    weights = steps(6)
    for step in range(1, 7):
        sent = go_on(pods, weights, step)
        got = pods.bring()
        assert are_here(pods.own, sent) and got.whole == ()
        if step == 1:
            assert (got.fetched.size_bytes, got.delta_bytes) == (3 * SIZE, 0)
        else:
            assert got.fetched == ((), 0, 0) and 0 < got.delta_bytes < 0.05 * 3 * SIZE


def test_versions_are_sent_whole_every_so_many_steps(tmp_path: Path) -> None:
    pods, weights = TwoPods(tmp_path, full_update_every=3), steps(7)
    try:
        whole = []
        for step in range(1, 8):
            sent = go_on(pods, weights, step)
            whole.append(pods.bring().fetched.size_bytes == 3 * SIZE)
            assert are_here(pods.own, sent)
        assert whole == [True, False, True, False, False, True, False]
    finally:
        pods.close()


def test_a_pod_whose_base_is_another_version_reads_whole_parts_and_one_that_has_them_anyhow_does_not(pods: TwoPods) -> None:
    weights = steps(4)
    go_on(pods, weights, 1)
    pods.bring()
    go_on(pods, weights, 2)
    sent = go_on(pods, weights, 3)
    got = pods.bring()
    assert got.fetched.size_bytes == 3 * SIZE and len(got.whole) == 3 and "'t0': this pod has not the elements before the update" in got.whole[0]
    assert are_here(pods.own, sent)
    # A tensor that was the same in the version that it missed has the base all the same.
    fourth = next(weights)
    skipped = [*fourth[:2], (sent[2][0], sent[2][1])]
    pods.publish(skipped, version(4))
    changed = skipped[2][1].clone()
    changed[0, 0] += 1.0
    last = [*((name, torch.where(torch.rand(SHAPE) < 0.01, 1.0, value)) for name, value in skipped[:2]), ("t2", changed)]
    pods.publish(last, version(5))
    got = pods.bring()
    assert got.fetched.size_bytes == 2 * SIZE and are_here(pods.own, last)


def flip(memory: memoryview, at: int) -> None:
    memory[at] ^= 4


def test_a_bit_flipped_in_the_base_is_named_and_the_part_is_read_whole(pods: TwoPods) -> None:
    weights = steps(2)
    go_on(pods, weights, 1)
    pods.bring()
    sent = go_on(pods, weights, 2)
    held = current(pods.own)
    assert held is not None and pods.mirror.buffers is not None
    entry = held[0].tensors[1]
    flip(next(each for each in pods.mirror.buffers.segments if each.name == entry.segment).memory, entry.offset_bytes + 1000)
    got = pods.bring()
    assert got.whole == ("'t1': the elements before the update are not those that the delta begins with",)
    assert got.fetched.size_bytes == SIZE and are_here(pods.own, sent)


def test_a_bit_flipped_on_the_way_is_read_again_and_the_delta_is_used(pods: TwoPods, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = steps(2)
    go_on(pods, weights, 1)
    pods.bring()
    sent = go_on(pods, weights, 2)
    flips, arrived = itertools.count(), Piece.arrived

    def altered(piece: Piece, memory: memoryview, count: int) -> None:
        if piece.name.startswith("part 1 of the delta") and next(flips) == 0:
            flip(memory, piece.offset_bytes + 9)
        arrived(piece, memory, count)

    monkeypatch.setattr(Piece, "arrived", altered)
    got = pods.bring()
    assert next(flips) > 1 and got.fetched.size_bytes == 0 and got.whole == () and are_here(pods.own, sent)


@pytest.mark.parametrize(
    ("at", "bytes_read", "named"),
    [(-5, SIZE, "'t2': the delta of this part is damaged"), (3, 3 * SIZE, "was received twice and does not have its digest|the index of the delta")],
    ids=["a part", "the index"],
)
def test_a_bit_flipped_in_the_senders_delta_is_named_and_what_it_covers_is_read_whole(pods: TwoPods, at: int, bytes_read: int, named: str) -> None:
    weights = steps(2)
    go_on(pods, weights, 1)
    pods.bring()
    sent = go_on(pods, weights, 2)
    assert pods.delta is not None
    reference = pods.shared.get(KEY)
    assert reference is not None

    size = json.loads(reference.value)["size_bytes"]
    flip(pods.delta.memory, size + at if at < 0 else at)
    got = pods.bring()
    assert got.fetched.size_bytes == bytes_read and len(got.whole) == 1 and re.search(named, got.whole[0])
    assert are_here(pods.own, sent)


def takes_away(pods: TwoPods) -> None:
    assert pods.delta is not None
    pods.delta.contents = None


def damages_key(pods: TwoPods) -> None:
    pods.shared.put(KEY, b'{"segment": 3}')


def names_another_segment(pods: TwoPods) -> None:
    entry = pods.shared.get(KEY)
    assert entry is not None
    pods.shared.put(KEY, entry.value.replace(b"-delta-", b"-delta-9"))


@pytest.mark.parametrize("harm", [takes_away, damages_key, names_another_segment])
def test_a_delta_that_is_not_to_be_had_costs_the_whole_parts(pods: TwoPods, harm: Callable[[TwoPods], None]) -> None:
    weights = steps(3)
    go_on(pods, weights, 1)
    pods.bring()
    sent = go_on(pods, weights, 2)
    harm(pods)
    got = pods.bring()
    assert got.fetched.size_bytes == 3 * SIZE and got.delta_bytes == 0 and are_here(pods.own, sent)
    sent = go_on(pods, weights, 3)
    assert pods.bring().fetched.size_bytes == 0 and are_here(pods.own, sent), "the next one is used again"


def test_a_sender_that_dies_while_it_sends_a_delta_leaves_the_pod_with_the_version_that_it_had(pods: TwoPods, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, pods.mirror._patience_s = steps(2), 0.2
    first = go_on(pods, weights, 1)
    pods.bring()
    go_on(pods, weights, 2)
    arrived = Piece.arrived

    def dies(piece: Piece, memory: memoryview, count: int) -> None:
        arrived(piece, memory, count)
        if piece.name.startswith("part 1 of the delta"):
            pods.service.close()
            piece.restart()
            raise EOFError

    monkeypatch.setattr(Piece, "arrived", dies)
    with pytest.raises((PeerDied, RunError)):
        pods.bring()
    assert are_here(pods.own, first)


def test_a_version_that_is_registered_again_is_compared_and_repaired_without_a_delta(pods: TwoPods) -> None:
    weights = steps(2)
    go_on(pods, weights, 1)
    pods.bring()
    sent = go_on(pods, weights, 2)
    pods.bring()
    held = current(pods.own)
    assert held is not None and pods.mirror.buffers is not None
    entry = held[0].tensors[0]
    flip(next(each for each in pods.mirror.buffers.segments if each.name == entry.segment).memory, entry.offset_bytes)
    pods.publish(sent, version(2))
    assert pods.shared.get(KEY) is None
    got = pods.bring()
    assert got.fetched.size_bytes == SIZE and got.delta_bytes == 0 and are_here(pods.own, sent)


def test_weights_that_change_everywhere_have_no_delta_and_those_that_change_here_and_there_one_of_these_parts(pods: TwoPods) -> None:
    weights = steps(3)
    first = go_on(pods, weights, 1)
    pods.bring()
    second = next(weights)
    mixed = [(first[0][0], torch.randn(SHAPE).bfloat16()), first[1], second[2]]
    pods.publish(mixed, version(2))
    got = pods.bring()
    assert got.fetched.size_bytes == SIZE and 0 < got.delta_bytes < 0.05 * SIZE and are_here(pods.own, mixed)
    everywhere = [(name, torch.randn(SHAPE).bfloat16()) for name, _ in mixed]
    pods.publish(everywhere, version(3))
    assert pods.shared.get(KEY) is None
    got = pods.bring()
    assert (got.fetched.size_bytes, got.delta_bytes) == (3 * SIZE, 0) and are_here(pods.own, everywhere)


def test_a_delta_of_weights_that_have_moved_on_is_not_sent(pods: TwoPods, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = steps(3)
    go_on(pods, weights, 1)
    pods.bring()
    go_on(pods, weights, 2)
    read, published = TcpSource.read, []

    def late(source: TcpSource, segment: str, *rest: object) -> None:
        if "-delta-" in segment and not published:
            published.append(go_on(pods, weights, 3))
        read(source, segment, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(TcpSource, "read", late)
    # The weights of step 2 are in their buffer still, so they arrive whole.
    got = pods.bring()
    assert got.manifest.version == version(2) and got.delta_bytes == 0 and "refused to send weights" in got.whole[0]
    assert pods.bring().manifest.version == version(3) and are_here(pods.own, published[0])
    assert issubclass(VersionMoved, RunError)
