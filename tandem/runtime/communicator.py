"""The collectives: gloo between CPUs, NCCL between GPUs, one ``Communicator`` a group of the mesh, and no global state.

Sums are taken in rank order: a reduce-scatter is an all-to-all of the parts and an ordered sum of what came, an all-reduce is a
reduce-scatter and an all-gather, so that a result depends neither on who arrives first nor on a ring's direction. The traffic is
that of a ring: (n - 1) / n of the bytes out of each rank, twice for an all-reduce.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.layout.mesh import AXES, GroupName, Mesh
from tandem.types import RunError

GROUPS: tuple[GroupName, ...] = (*AXES, "tokens", "expert", "expert_data", "world")


class Pending:
    """A collective under way. ``wait`` returns its result."""

    def __init__(self, communicator: "Communicator", name: str, work: Any, result: Callable[[], Tensor]) -> None:
        self._communicator, self._name, self._work, self._result = communicator, name, work, result

    def wait(self) -> Tensor:
        if self._work is not None:
            self._communicator._wait(self._name, self._work)
        return self._result()


class Communicator:
    """One group of ranks, seen from ``rank`` of ``size``. Every method must be called by every rank of the group in the same
    order; ``name`` says what for, and stands in the error where a collective fails or does not end."""

    def __init__(self, group_name: str, rank: int, size: int, group: Any, deadline_s: float) -> None:
        self.group_name, self.rank, self.size, self.deadline_s = group_name, rank, size, deadline_s
        self._group = group

    def all_gather(self, x: Tensor, name: str) -> Tensor:
        """Every rank's ``x``: [size, *x.shape]."""
        return self.start_all_gather(x, name).wait()

    def start_all_gather(self, x: Tensor, name: str) -> Pending:
        if self.size == 1:
            return Pending(self, name, None, lambda: x.unsqueeze(0))
        x = x.contiguous()
        out = x.new_empty(self.size, x.numel())
        work = self._call(name, lambda: self._group._allgather_base(out.view(-1), x.view(-1)))
        return Pending(self, name, work, lambda: out.view(self.size, *x.shape))

    def reduce_scatter(self, x: Tensor, name: str) -> Tensor:
        """``x[size, ...]``, a part for each rank -> the sum over ranks of this rank's part."""
        return self.start_reduce_scatter(x, name).wait()

    def start_reduce_scatter(self, x: Tensor, name: str) -> Pending:
        if self.size == 1:
            return Pending(self, name, None, lambda: x[0])
        x = x.contiguous()
        out = torch.empty_like(x)
        work = self._call(name, lambda: self._group.alltoall_base(out.view(-1), x.view(-1), [], []))
        return Pending(self, name, work, lambda: _sum(out))

    def all_reduce(self, x: Tensor, name: str) -> Tensor:
        """The sum over ranks."""
        if self.size == 1:
            return x
        flat = x.reshape(-1)
        part = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, part * self.size - flat.numel()))
        own = self.reduce_scatter(padded.view(self.size, part), name)
        return self.all_gather(own, name).view(-1)[: flat.numel()].view(x.shape)

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int], name: str) -> Tensor:
        """``x[sum(send), ...]``, rows in the order of the ranks they go to -> [sum(receive), ...] in the order of those they
        come from. Counts may be 0."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = x.new_empty(sum(receive), *x.shape[1:])
        self._wait(name, self._call(name, lambda: self._group.alltoall_base(out, x, list(receive), list(send))))
        return out

    def broadcast(self, x: Tensor, source: int, name: str) -> None:
        """Fill contiguous ``x`` with that of rank ``source``."""
        if self.size == 1:
            return
        options = dist.BroadcastOptions()
        options.rootRank = source
        self._wait(name, self._call(name, lambda: self._group.broadcast([x], options)))

    def send(self, x: Tensor, to: int, name: str, tag: int = 0) -> Pending:
        x = x.contiguous()
        return Pending(self, name, self._call(name, lambda: self._group.send([x], to, tag)), lambda: x)

    def receive(self, x: Tensor, source: int, name: str, tag: int = 0) -> Pending:
        """Fill contiguous ``x`` with what ``source`` sends under ``tag``."""
        return Pending(self, name, self._call(name, lambda: self._group.recv([x], source, tag)), lambda: x)

    def barrier(self, name: str) -> None:
        if self.size > 1:
            self._wait(name, self._call(name, self._group.barrier))

    def _call(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            raise self._failed(name, error) from None

    def _wait(self, name: str, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(name, error) from None

    def _failed(self, name: str, error: RuntimeError) -> RunError:
        reason = " ".join(str(error).split())
        return RunError(f"rank {self.rank} of {self.size} ('{self.group_name}'): the collective '{name}' failed: {reason}")


def join(mesh: Mesh, store: Any, device: torch.device, deadline_s: float) -> Mapping[GroupName, Communicator]:
    """Meet the other ranks of ``mesh`` over ``store`` (a ``torch.distributed`` store that all of them reach); one communicator a
    group, those of one rank without a process group."""
    found: dict[GroupName, Communicator] = {}
    for name in GROUPS:
        ranks = mesh.group(name)
        rank, group = ranks.index(mesh.rank), None
        if len(ranks) > 1:
            group = _process_group(dist.PrefixStore(f"{name}/{ranks[0]}/", store), rank, len(ranks), device, deadline_s)
        found[name] = Communicator(name, rank, len(ranks), group, deadline_s)
    return found


def join_world(rank: int, size: int, store: Any, device: torch.device, deadline_s: float) -> Communicator:
    """One more communicator of all ranks, over a ``store`` with a prefix of its own: for a thread whose collectives must not meet
    those of others."""
    group = _process_group(store, rank, size, device, deadline_s) if size > 1 else None
    return Communicator("world", rank, size, group, deadline_s)


def _process_group(store: Any, rank: int, size: int, device: torch.device, deadline_s: float) -> Any:
    limit = timedelta(seconds=deadline_s)
    if device.type == "cuda":
        settings = dist.ProcessGroupNCCL.Options()
        settings._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, size, settings)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = limit
    options._devices = [gloo.create_default_device()]
    return gloo(store, rank, size, options)


def _sum(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
