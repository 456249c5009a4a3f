"""Pipeline schedules as data: the computations, sends and receives of each rank, in order. Imports no torch.

A model is divided into ``stages`` runs of layers; stage s is on rank s mod p of p, so that with ``virtual_stages`` v each rank has v of
them. GPipe (Huang et al., 2019) runs all forwards, then all backwards; 1F1B (PipeDream-Flush: Narayanan et al., 2021a) holds at most p -
rank micro-batches; interleaved 1F1B (Narayanan et al., 2021b, section 2.2, in Megatron-LM's order) has a bubble v times smaller. Every
stage runs its backwards in the order of the micro-batches, so that gradients are summed in the same order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]
Kind = Literal["forward", "backward", "send_activation", "receive_activation", "send_gradient", "receive_gradient"]


class Operation(NamedTuple):
    """``stage``: the stage on this rank that computes, sends or receives. ``peer``: the other rank of a transfer, else -1."""

    kind: Kind
    stage: int
    micro_batch: int
    peer: int = -1


class Compute(NamedTuple):
    """A forward or backward that ``rank`` runs from ``start`` to ``end``."""

    rank: int
    operation: Operation
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline of ``ranks``, each with ``virtual_stages``, over ``micro_batches``."""

    ranks: int
    micro_batches: int
    virtual_stages: int = 1

    @property
    def stages(self) -> int:
        return self.ranks * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        return stage % self.ranks

    def stages_of(self, rank: int) -> range:
        """Returns the stages on ``rank``, ascending."""
        return range(rank, self.stages, self.ranks)

    def tag(self, operation: Operation) -> int:
        """Returns the tag of a transfer, the same on both sides and unique within a step."""
        is_gradient = operation.kind.endswith("gradient")
        boundary = operation.stage - (operation.kind in ("receive_activation", "send_gradient"))
        return 2 * (boundary * self.micro_batches + operation.micro_batch) + is_gradient


def schedule(name: ScheduleName, shape: PipelineShape) -> tuple[tuple[Operation, ...], ...]:
    """Returns the operations of every rank. Raises ``ValueError`` for a shape that ``name`` does not support."""
    if shape.ranks < 1 or shape.micro_batches < 0 or shape.virtual_stages < 1:
        raise ValueError(f"invalid pipeline shape {shape}")
    if (name == "interleaved") != (shape.virtual_stages > 1):
        raise ValueError(f"'{name}' with {shape.virtual_stages} virtual stages; 'interleaved' has 2 or more, the others 1")
    if shape.virtual_stages > 1 and shape.ranks == 1:
        raise ValueError("'interleaved' needs 2 ranks or more")
    orders = {"gpipe": _gpipe, "1f1b": _one_forward_one_backward, "interleaved": _interleaved}
    return with_transfers(shape, [orders[name](shape, rank) for rank in range(shape.ranks)])


def forward_schedule(shape: PipelineShape) -> tuple[tuple[Operation, ...], ...]:
    """Returns the operations of every rank for a pass without gradients."""
    p = shape.ranks
    groups = range(0, shape.micro_batches, p)
    orders = [
        [
            Operation("forward", stage, m)
            for first in groups
            for stage in shape.stages_of(rank)
            for m in range(first, min(first + p, shape.micro_batches))
        ]
        for rank in range(p)
    ]
    return with_transfers(shape, orders)


def computes_of(operations: Sequence[Operation]) -> list[Operation]:
    return [operation for operation in operations if operation.kind in ("forward", "backward")]


def _gpipe(shape: PipelineShape, rank: int) -> list[Operation]:
    every = range(shape.micro_batches)
    return [Operation("forward", rank, m) for m in every] + [Operation("backward", rank, m) for m in every]


def _one_forward_one_backward(shape: PipelineShape, rank: int) -> list[Operation]:
    every = range(shape.micro_batches)
    return _alternating(
        [Operation("forward", rank, m) for m in every], [Operation("backward", rank, m) for m in every], shape.ranks - rank - 1
    )


def _interleaved(shape: PipelineShape, rank: int) -> list[Operation]:
    p, v = shape.ranks, shape.virtual_stages
    # The order is defined for a multiple of p micro-batches. The operations of surplus ones are left out; nothing depends on them.
    groups = -(-shape.micro_batches // p)
    forwards, backwards = [], []
    for group in range(groups):
        for chunk in range(v):
            for micro_batch in range(group * p, (group + 1) * p):
                forwards.append(Operation("forward", chunk * p + rank, micro_batch))
                backwards.append(Operation("backward", (v - 1 - chunk) * p + rank, micro_batch))
    ordered = _alternating(forwards, backwards, 2 * (p - rank - 1) + (v - 1) * p)
    return [operation for operation in ordered if operation.micro_batch < shape.micro_batches]


def _alternating(forwards: list[Operation], backwards: list[Operation], num_warmup: int) -> list[Operation]:
    """Returns ``num_warmup`` forwards, then one forward and one backward alternately, then the remaining backwards."""
    num_warmup = min(num_warmup, len(forwards))
    pairs = zip(forwards[num_warmup:], backwards, strict=False)
    return forwards[:num_warmup] + [operation for pair in pairs for operation in pair] + backwards[len(forwards) - num_warmup :]


def simulate(
    shape: PipelineShape, orders: Sequence[Sequence[Operation]], forward: Sequence[float] = (), backward: Sequence[float] = ()
) -> list[Compute]:
    """Returns when each forward and backward of ``orders`` runs, sorted by end, if every rank runs as early as it can and transfers take
    no time. ``forward`` and ``backward``: the seconds of each stage (default: 1 and 2). Raises ``ValueError`` if the ranks deadlock."""
    forward, backward = forward or [1.0] * shape.stages, backward or [2.0] * shape.stages
    orders = [computes_of(order) for order in orders]
    done: dict[Operation, float] = {}
    place, free, computes = [0] * shape.ranks, [0.0] * shape.ranks, []
    left = sum(map(len, orders))
    while left:
        before = left
        for rank, order in enumerate(orders):
            while place[rank] < len(order):
                operation = order[place[rank]]
                needed = _needs(shape, operation)
                if any(other not in done for other in needed):
                    break
                start = max([free[rank], *(done[other] for other in needed)])
                seconds = (forward if operation.kind == "forward" else backward)[operation.stage]
                done[operation] = free[rank] = start + seconds
                computes.append(Compute(rank, operation, start, start + seconds))
                place[rank] += 1
                left -= 1
        if left == before:
            stuck = [f"rank {rank} at {order[at].kind} {order[at][1:3]}" for rank, (order, at) in enumerate(zip(orders, place, strict=True)) if at < len(order)]
            raise ValueError(f"the schedule deadlocks: {', '.join(stuck)}")
    return sorted(computes, key=lambda c: (c.end, c.rank))


def _needs(shape: PipelineShape, operation: Operation) -> list[Operation]:
    kind, stage, micro_batch, _ = operation
    if kind == "forward":
        return [Operation("forward", stage - 1, micro_batch)] if stage > 0 else []
    own = Operation("forward", stage, micro_batch)
    return [own, Operation("backward", stage + 1, micro_batch)] if stage < shape.stages - 1 else [own]


def with_transfers(shape: PipelineShape, orders: Sequence[Sequence[Operation]]) -> tuple[tuple[Operation, ...], ...]:
    """Returns ``orders`` with a send after each computation whose result another rank needs, and its receive on that rank.

    Computations and transfers are put in one global order, by their end in a simulation, and each rank's list is its part of it. The
    transfers therefore cannot deadlock even with blocking sends, and each receive is posted as early as its data can arrive, so that
    transfers overlap with computation."""
    lists: list[list[Operation]] = [[] for _ in range(shape.ranks)]
    waiting: list[Compute] = []
    timeline = simulate(shape, orders)
    for at, compute in enumerate(timeline):
        lists[compute.rank].append(compute.operation)
        waiting.append(compute)
        if at + 1 == len(timeline) or timeline[at + 1].end > compute.end:
            for ended in waiting:
                _transfer(shape, ended, lists)
            waiting = []
    return tuple(map(tuple, lists))


def _transfer(shape: PipelineShape, compute: Compute, lists: list[list[Operation]]) -> None:
    kind, stage, micro_batch, _ = compute.operation
    to = stage + 1 if kind == "forward" else stage - 1
    if 0 <= to < shape.stages:
        peer = shape.rank_of(to)
        send: Kind = "send_activation" if kind == "forward" else "send_gradient"
        receive: Kind = "receive_activation" if kind == "forward" else "receive_gradient"
        lists[compute.rank].append(Operation(send, stage, micro_batch, peer))
        lists[peer].append(Operation(receive, to, micro_batch, compute.rank))


def max_in_flight_micro_batches(operations: Sequence[Operation]) -> int:
    """Returns the largest number of forwards whose backward is still pending, over all stages of a rank: the micro-batches whose
    activations it holds."""
    held = most = 0
    for operation in operations:
        held += {"forward": 1, "backward": -1}.get(operation.kind, 0)
        most = max(most, held)
    return most


def bubble_share(timeline: Sequence[Compute]) -> float:
    """Returns the idle share of all ranks' time, from the first start to the last end."""
    if not timeline:
        return 0.0
    ranks = len({compute.rank for compute in timeline})
    span = max(c.end for c in timeline) - min(c.start for c in timeline)
    return 1.0 - sum(c.end - c.start for c in timeline) / (ranks * span)


def published_bubble_share(shape: PipelineShape) -> float:
    """Returns (p - 1) / (v m + p - 1): equation 1 of Narayanan et al. (2021b) as a share of the whole step, for stages of equal cost and,
    if v > 1, m a multiple of p."""
    return (shape.ranks - 1) / (shape.virtual_stages * shape.micro_batches + shape.ranks - 1)
