"""The ring all-reduce as published (Patarasuk and Yuan, 2009), over the communicator's sends and receives, against its all-reduce."""

import pytest
import torch
from ranks import RankContext, Ranks
from torch import Tensor

from tandem.layout.mesh import MeshShape
from tandem.runtime.collectives.communicator import FEW_BYTES, Communicator


class Counted:
    """A ``Traffic`` that counts what this rank sends, and in how many messages."""

    def __init__(self) -> None:
        self.sent_bytes, self.messages = 0, 0

    def started(self, group: str, name: str, sent_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        self.messages += sent_bytes > 0

    def waits(self, group: str, name: str) -> None:
        pass

    def waited(self, seconds: float) -> None:
        pass


def pass_on(ring: Communicator, out: Tensor, step: int) -> Tensor:
    """Sends ``out`` to the right and receives as much from the left."""
    came = torch.empty_like(out)
    sent = ring.send(out, (ring.rank + 1) % ring.size, "to the right", tag=step)
    ring.receive(came, (ring.rank - 1) % ring.size, "from the left", tag=step).wait()
    sent.wait()
    return came


def ring_reduce_scatter(ring: Communicator, parts: Tensor) -> Tensor:
    """``parts[n, ...]`` -> the sum over ranks of part (rank + 1) mod n, after n - 1 steps; in step s rank r sends part r - s."""
    parts, n = parts.clone(), ring.size
    for step in range(n - 1):
        came = pass_on(ring, parts[(ring.rank - step) % n], step)
        parts[(ring.rank - step - 1) % n] += came
    return parts[(ring.rank + 1) % n]


def ring_all_gather(ring: Communicator, own: Tensor) -> Tensor:
    """``own``, the part (rank + 1) mod n of every rank -> all n parts, after n - 1 steps; in step s rank r sends part r + 1 - s."""
    n = ring.size
    parts = own.new_empty(n, *own.shape)
    parts[(ring.rank + 1) % n] = own
    for step in range(n - 1):
        parts[(ring.rank - step) % n] = pass_on(ring, parts[(ring.rank + 1 - step) % n], n + step)
    return parts


def counting(ring: Communicator) -> tuple[Communicator, Counted]:
    traffic = Counted()
    return Communicator(ring.group_name, ring.rank, ring.size, ring._group, ring.deadline_s, traffic), traffic


def both(here: RankContext, width: int) -> dict[str, Tensor | int]:
    """Whole numbers in float64, whose sums are exact in any order; the sums of both ways, in their parts, and what was sent for them."""
    ring, world = counting(here.groups["world"]), counting(here.groups["world"])
    generator = torch.Generator().manual_seed(here.mesh.rank)
    x = torch.randint(-(2**40), 2**40, (ring[0].size, width), generator=generator).double()
    scattered = ring_reduce_scatter(ring[0], x)
    half_sent = ring[1].sent_bytes
    gathered = ring_all_gather(ring[0], scattered)
    reduced = world[0].all_reduce(x, "all")
    return {
        "x": x, "ring scattered": scattered, "ring": gathered, "reduced": reduced, "half sent": half_sent, "ring sent": ring[1].sent_bytes,
        "ring messages": ring[1].messages, "sent": world[1].sent_bytes, "scattered": world[0].reduce_scatter(x, "parts"),
        "gathered": world[0].all_gather(x[0], "rows"), "bytes": x.nbytes,
    }  # fmt: skip


@pytest.mark.parametrize("n", [3, 4])
def test_ring_all_reduce_is_a_reduce_scatter_and_an_all_gather_and_ours_is_equal_to_it_for_as_many_bytes(n: int, ranks: Ranks) -> None:
    width = FEW_BYTES // 8 + 5
    found = ranks.run(MeshShape(data=n), both, width)
    total = torch.stack([answer["x"] for answer in found]).sum(0)
    for rank, answer in enumerate(found):
        assert torch.equal(answer["ring scattered"], total[(rank + 1) % n]) and torch.equal(answer["scattered"], total[rank])
        assert torch.equal(answer["ring scattered"], found[(rank + 1) % n]["scattered"])
        assert torch.equal(answer["ring"], total) and torch.equal(answer["reduced"], answer["ring"])
        assert torch.equal(answer["gathered"], torch.stack([other["x"][0] for other in found]))
        assert answer["ring messages"] == 2 * (n - 1)
        assert answer["half sent"] * n == answer["bytes"] * (n - 1)
        assert answer["sent"] == answer["ring sent"] == 2 * (n - 1) * answer["bytes"] // n
