"""The collectives: gloo between CPUs, NCCL between GPUs, one ``Communicator`` for each group of the mesh, and no global state but gloo's device.

Sums are taken in rank order: a reduce-scatter is an all-to-all of the parts and an ordered sum of the received parts, an all-reduce is a
reduce-scatter and an all-gather, so that a result depends neither on the order of arrival nor on a ring's direction. The traffic is
that of a ring: (n - 1) / n of the bytes out of each rank, twice for an all-reduce.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.layout.mesh import AXES, GroupName, Mesh
from tandem.runtime.records.tracing import NO_TRACE
from tandem.types import CollectiveError

FEW_BYTES = 1 << 16
"""An all-reduce of at most this many bytes gathers every rank's whole tensor: one exchange instead of two, for the same sum."""
EXCHANGE_TAG = 1 << 20
"""The first tag of the transfers of large gathers; the tags of ``send`` and ``receive`` are smaller."""
GROUPS: tuple[GroupName, ...] = (*AXES, "tokens", "expert", "expert_data", "world")
HOST_GROUPS: tuple[GroupName, ...] = ("data", "world")
"""Groups that exchange small values from host memory, over gloo on every device, so that reporting a loss does not wait for a GPU. Gradients
of data-parallel ranks go over ``tokens``."""


class Traffic(Protocol):
    """Receives the events of one rank's collectives."""

    def started(self, group: str, name: str, sent_bytes: int) -> None:
        """A collective has begun, in which this rank sends ``sent_bytes``."""
        ...

    def waits(self, group: str, name: str) -> None:
        """This rank begins to wait for the end of a collective."""
        ...

    def waited(self, seconds: float) -> None:
        """The wait has ended."""
        ...


class Pending:
    """A collective in progress. ``wait`` returns its result."""

    def __init__(self, communicator: "Communicator", name: str, work: Any, result: Callable[[], Tensor]) -> None:
        self._communicator, self._name, self._work, self._result = communicator, name, work, result

    def wait(self) -> Tensor:
        if self._work is not None:
            self._communicator._wait(self._name, self._work)
        return self._result()


class Communicator:
    """One group of ranks, seen from ``rank`` of ``size``. Every method must be called by every rank of the group in the same
    order; ``name`` names the collective in errors and traces. ``tracer`` records the waits."""

    def __init__(
        self, group_name: str, rank: int, size: int, group: Any, deadline_s: float, traffic: Traffic | None = None, patience_s: float | None = None
    ) -> None:
        self.group_name, self.rank, self.size, self.deadline_s = group_name, rank, size, deadline_s
        self._patience = () if patience_s is None else (timedelta(seconds=patience_s),)
        self._group, self._traffic, self._exchanges = group, traffic, 0
        self.tracer = NO_TRACE

    def close(self) -> None:
        """Leaves the group; no other method may be called any more."""
        self._group = None

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        """Returns every rank's ``x``: [size, *x.shape]."""
        return self.start_all_gather(x, name).wait()

    def start_all_gather(self, x: Tensor, name: str, out: Tensor | None = None) -> Pending:
        """Starts an all-gather. ``out``: contiguous memory for the result, which must not overlap ``x``."""
        if self.size == 1:
            return Pending(self, name, None, lambda: x.unsqueeze(0) if out is None else out.view(1, *x.shape).copy_(x))
        x = x.contiguous()
        out = x.new_empty(self.size, x.numel()) if out is None else out
        # gloo's own all-gather allocates a buffer and copies from it.
        is_direct = x.is_cpu and x.nbytes > FEW_BYTES
        gather = self._exchange if is_direct else lambda x, out: self._group._allgather_base(out.view(-1), x.view(-1))
        work = self._call(name, lambda: gather(x, out), x.nbytes * (self.size - 1))
        return Pending(self, name, work, lambda: out.view(self.size, *x.shape))

    def _exchange(self, x: Tensor, out: Tensor) -> "_Works":
        """Receives every rank's ``x`` directly in its place in ``out``."""
        parts = out.view(self.size, x.numel())
        parts[self.rank].copy_(x.view(-1))
        tag, self._exchanges = EXCHANGE_TAG + self._exchanges, (self._exchanges + 1) % EXCHANGE_TAG
        works = _Works()
        for step in range(1, self.size):
            source, to = (self.rank - step) % self.size, (self.rank + step) % self.size
            works.append(self._group.recv([parts[source]], source, tag))
            works.append(self._group.send([x], to, tag))
        return works

    def gather(self, x: Tensor, to: int, name: str) -> list[Tensor]:
        """Returns every rank's ``x``, by rank, on rank ``to``; an empty list on other ranks."""
        if self.size == 1:
            return [x]
        x = x.contiguous()
        options = dist.GatherOptions()
        options.rootRank = to
        out = [torch.empty_like(x) for _ in range(self.size)] if self.rank == to else []
        self._wait(name, self._call(name, lambda: self._group.gather([out] if out else [], [x], options), 0 if out else x.nbytes))
        return out

    def reduce_scatter(self, x: Tensor, name: str) -> Tensor:
        """Returns the sum over ranks of this rank's part of ``x[size, ...]``."""
        return self.start_reduce_scatter(x, name).wait()

    def start_reduce_scatter(self, x: Tensor, name: str, out: Tensor | None = None) -> Pending:
        """Starts a reduce-scatter. ``out``: contiguous memory of the shape of ``x`` for the received parts; the sum is then its first part."""
        if self.size == 1:
            return Pending(self, name, None, lambda: x[0])
        x = x.contiguous()
        arrived = torch.empty_like(x) if out is None else out
        work = self._call(name, lambda: self._group.alltoall_base(arrived.view(-1), x.view(-1), [], []), x.nbytes // self.size * (self.size - 1))
        return Pending(self, name, work, lambda: _sum(arrived, in_place=out is not None))

    def all_reduce(self, x: Tensor, name: str) -> Tensor:
        """Returns the sum of ``x`` over ranks."""
        if self.size == 1:
            return x
        flat = x.reshape(-1)
        if flat.numel() * flat.element_size() <= FEW_BYTES:
            return _sum(self.all_gather(flat, name)).view(x.shape)
        part = -(-flat.numel() // self.size)
        if missing := part * self.size - flat.numel():
            flat = torch.nn.functional.pad(flat, (0, missing))
        own = self.reduce_scatter(flat.view(self.size, part), name)
        return self.all_gather(own, name).view(-1)[: x.numel()].view(x.shape)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
        """Sends the rows of ``x[sum(send), ...]``, ordered by destination rank. Returns the received rows [sum(receive), ...], ordered by
        source rank. Counts may be 0."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(sum(receive), *x.shape[1:])
        sent = (len(x) - send[self.rank]) * x[:1].nbytes
        self._wait(name, self._call(name, lambda: self._group.alltoall_base(out, x, list(receive), list(send)), sent))
        return out

    def broadcast(self, x: Tensor, source: int, name: str) -> None:
        """Fills contiguous ``x`` with that of rank ``source``."""
        if self.size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(name, self._call(name, lambda: self._group.broadcast([x], options), x.nbytes if self.rank == source else 0))

    def send(self, x: Tensor, to: int, name: str, tag: int = 0) -> Pending:
        x = x.contiguous()
        return Pending(self, name, self._call(name, lambda: self._group.send([x], to, tag), x.nbytes), lambda: x)

    def receive(self, x: Tensor, source: int, name: str, tag: int = 0) -> Pending:
        """Starts to fill contiguous ``x`` with what ``source`` sends under ``tag``."""
        return Pending(self, name, self._call(name, lambda: self._group.recv([x], source, tag)), lambda: x)

    def barrier(self, name: str) -> None:
        if self.size > 1:
            self._wait(name, self._call(name, self._group.barrier))

    def _call(self, name: str, call: Callable[[], Any], sent_bytes: int = 0) -> Any:
        if self._traffic is not None:
            self._traffic.started(self.group_name, name, sent_bytes)
        try:
            return call()
        except RuntimeError as error:
            raise self._failed(name, error) from None

    def _wait(self, name: str, work: Any) -> None:
        began = perf_counter()
        if self._traffic is not None:
            self._traffic.waits(self.group_name, name)
        try:
            with self.tracer.span(name, self.group_name):
                work.wait(*self._patience)
        except RuntimeError as error:
            raise self._failed(name, error) from None
        if self._traffic is not None:
            self._traffic.waited(perf_counter() - began)

    def _failed(self, name: str, error: RuntimeError) -> CollectiveError:
        reason = " ".join(str(error).split())
        return CollectiveError(f"rank {self.rank} of {self.size} ('{self.group_name}'): the collective '{name}' failed: {reason}")


def join(
    mesh: Mesh, store: Any, device: torch.device, deadline_s: float, traffic: Traffic | None = None, hostname: str = "",
    nccl_deadline_s: float | None = None,
) -> Mapping[GroupName, Communicator]:
    """Connects the ranks of ``mesh``. Returns one communicator for each group; a group of one rank has no process group.

    Args:
        store: a ``torch.distributed`` store that all ranks can reach.
        device: the device of the tensors of all groups but ``HOST_GROUPS``.
        hostname: the address that gloo listens on (empty: that of this host's name).
        nccl_deadline_s: the deadline of groups between GPUs (``None``: as of others).
    """
    communicators: dict[GroupName, Communicator] = {}
    for name in GROUPS:
        ranks = mesh.group(name)
        rank, group = ranks.index(mesh.rank), None
        if len(ranks) > 1:
            where = torch.device("cpu") if name in HOST_GROUPS else device
            limit_s = nccl_deadline_s if nccl_deadline_s is not None and where.type == "cuda" else deadline_s
            group = _process_group(dist.PrefixStore(f"{name}/{ranks[0]}/", store), rank, len(ranks), where, limit_s, hostname)
        communicators[name] = Communicator(name, rank, len(ranks), group, deadline_s, traffic)
    return communicators


def connect(
    name: str, rank: int, size: int, store: Any, device: torch.device, deadline_s: float, patience_s: float | None = None, hostname: str = "127.0.0.1"
) -> Communicator:
    """Connects the ranks of one group over ``store``, which no other group uses. ``patience_s``: the timeout of collectives over gloo (``None``:
    ``deadline_s``, which is also that of connecting). ``hostname``: the address that gloo listens on."""
    group = _process_group(store, rank, size, device, deadline_s, hostname)
    if device.type == "cuda" or patience_s is None:
        return Communicator(name, rank, size, group, deadline_s)
    group.set_timeout(timedelta(seconds=patience_s))
    return Communicator(name, rank, size, group, deadline_s, patience_s=patience_s)


def _process_group(store: Any, rank: int, size: int, device: torch.device, deadline_s: float, hostname: str) -> Any:
    limit = timedelta(seconds=deadline_s)
    if device.type == "cuda":
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, settings)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [_gloo_device(hostname)]
    return gloo(store, rank, size, options)


@lru_cache
def _gloo_device(hostname: str) -> Any:
    """Returns one gloo device for all groups of the process: each device has a thread that wakes 100 times a second and outlives its groups."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname=hostname) if hostname else gloo.create_default_device()


class _Works(list[Any]):
    """Transfers with one ``wait`` for all."""

    def wait(self, *timeout: timedelta) -> None:
        for work in self:
            work.wait(*timeout)


def _sum(parts: Tensor, in_place: bool = False) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part) if in_place else total + part
    return total
