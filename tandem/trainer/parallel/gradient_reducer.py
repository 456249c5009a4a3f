"""Data parallelism: sums gradients over the ranks that replicate the weights, overlapped with the backward pass.

Each layer is a bucket. Its reduce-scatter starts when the last of its gradients is ready; every rank receives the sum of its own part.
Buckets are reduced in the same order on all ranks, whatever order autograd completes them in.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from tandem.model.decoder import Decoder
from tandem.runtime.collectives.communicator import Pending
from tandem.trainer.offload.reserved_memory import ReservedMemory
from tandem.trainer.optimizers.adamw import Optimizer, OptimizerState, norm_of, values_of
from tandem.trainer.parallel.flat_buffer import ALIGNED, FlatBuffer, flat_buffers
from tandem.trainer.parallel.placement import is_tied_copy, placement
from tandem.trainer.parallel.ranks import Ranks

IN_FLIGHT = 2
"""Buckets whose reduce-scatter may be in flight at once; each needs its memory twice."""


class KeptSum(Protocol):
    """Stores this rank's part of a bucket's sum outside memory."""

    def clear(self) -> None:
        """Starts a step."""
        ...

    def add(self, gradient: Tensor) -> None:
        """Adds ``gradient[part]``, which the store owns from now on, to the step's sum."""
        ...

    def start_sum(self) -> None:
        """Starts to read the sum."""
        ...

    def sum(self) -> Tensor:
        """Returns the sum [part], in memory owned by the caller."""
        ...


class GradientReducer:
    """Sums the gradients of a model's parameters over their replicas. ``buckets`` are in the order of the backward pass.

    ``each_backward``: reduces after every backward pass and drops the whole gradients; otherwise once a step, after the number of backward
    passes given to ``expect``. ``sum_tied`` adds the tied embedding's sum of another pipeline stage to a part. ``own``: this rank's part of
    each bucket's sum after ``finish``, except at places that have a ``kept``. Parts begin at multiples of ``aligned`` elements."""

    def __init__(
        self, model: Decoder, ranks: Ranks, *, each_backward: bool = False, sum_tied: Callable[[Tensor], Tensor] | None = None,
        aligned: int = ALIGNED,
    ) -> None:  # fmt: skip
        self.model, self.ranks, self.each_backward = model, ranks, each_backward
        where = {name: placement(model, name) for name, _ in model.named_parameters()}
        self.buckets = flat_buffers(model.named_parameters(), lambda name: where[name].replicas, lambda group: ranks.groups[group], aligned)
        self.own: list[Tensor | None] = [None] * len(self.buckets)
        self.kept: dict[int, KeptSum] = {}
        self.factors: list[float] = []
        """The factors that ``clip`` has applied to the sums in memory, and that are still to be applied to those in ``kept``."""
        tensor = ranks.groups["tensor"]
        self._partial = {name for name in where if where[name].tensor == "partial" and tensor.size > 1}
        self._counted = {name for name in where if (where[name].tensor == "shard" or tensor.rank == 0) and not is_tied_copy(model, name)}
        self._sum_tied, self._is_finished = sum_tied, False
        self._backwards, self._next = 1, 0
        self._seen: dict[str, int] = {}
        self._pending: list[tuple[int, Pending, tuple[ReservedMemory, ...]]] = []
        self._spare: dict[tuple[int, torch.dtype], list[ReservedMemory]] = {}
        self._in_place: dict[int, ReservedMemory] = {}
        self._sums: list[Tensor | None] = [None] * len(self.buckets)
        self.after_sum: Callable[[FlatBuffer], None] | None = None
        self.started: list[str] = []
        """Labels of the buckets whose reduction has started in this step."""
        for place, bucket in enumerate(self.buckets):
            for name, parameter in bucket.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._hook(place, name))

    def expect(self, backwards: int) -> None:
        """Starts a step in which ``backwards`` backward passes go through every parameter."""
        self.own, self.factors = [None] * len(self.buckets), []
        for kept in self.kept.values():
            kept.clear()
        self._is_finished = False
        self._backwards, self._next, self._pending = 1 if self.each_backward else backwards, 0, []
        self._seen = {}
        self.started = []

    def end_backward(self) -> None:
        """Ends a backward pass."""
        if self.each_backward:
            self._complete()
            self._next, self._seen = 0, {}

    def finish(self) -> None:
        """Waits for all sums. A parameter that no backward pass reached has a gradient of 0."""
        if self._is_finished:
            return
        self._is_finished = True
        if not self.each_backward:
            self._complete()
        if self._sum_tied is not None:
            # The tied embedding has a bucket of its own on both stages, so that both have the same part of it.
            place = next(i for i, bucket in enumerate(self.buckets) if "embed_tokens" in bucket.parameters)
            own = self.own[place]
            assert own is not None and len(self.buckets[place].parameters) == 1
            self.own[place] = self._sum_tied(own)

    def release(self) -> None:
        """Drops the sums between two steps and releases the memory reserved for those of the next step."""
        self.own = [None] * len(self.buckets)
        self._sums = [None] * len(self.buckets)
        for memory in (*itertools.chain.from_iterable(self._spare.values()), *self._in_place.values()):
            memory.release()

    def norm(self, scale: float = 1.0) -> float:
        """Returns the norm of the global gradient divided by ``scale``; NaN or infinity if an element is not finite. The same on every
        rank: each element is counted once, and the sum of squares is correctly rounded."""
        norms = []
        for bucket, own in zip(self.buckets, self.parts(), strict=True):
            for segment in bucket.segments():
                if segment.name in self._counted:
                    norms.append(norm_of(own[segment.at : segment.at + segment.last - segment.first]))
        scaled = [norm / scale for norm in values_of(norms)]
        squares = [norm * norm for norm in scaled]
        total = math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)
        totals = [row[0] for row in self.ranks.all_values([total], "the gradient norm")]
        return math.sqrt(math.fsum(totals)) if all(map(math.isfinite, totals)) else math.nan if any(map(math.isnan, totals)) else math.inf

    def parts(self) -> Iterator[Tensor]:
        """Yields this rank's part of every bucket's sum; a part in ``kept`` is prefetched while the previous one is processed."""
        for place, own in enumerate(self.own):
            if place + 1 in self.kept:
                self.kept[place + 1].start_sum()
            part = self.kept[place].sum() if place in self.kept else own
            assert part is not None
            yield part

    def clip(self, max_norm: float, scale: float = 1.0) -> float:
        """Divides the sums by ``scale`` and scales them so that their global norm is at most ``max_norm`` (0: off); returns the norm before
        clipping."""
        self.finish()
        norm = self.norm(scale)
        if math.isfinite(norm):
            self.factors = ([1.0 / scale] if scale != 1.0 else []) + ([max_norm / norm] if 0 < max_norm < norm else [])
            for own in [own for own in self.own if own is not None]:
                for factor in self.factors:
                    own.mul_(factor)
        return norm

    def _hook(self, place: int, name: str) -> Callable[[nn.Parameter], None]:
        def arrived(parameter: nn.Parameter) -> None:
            self._move_in_place(place, name)
            self._seen[name] = self._seen.get(name, 0) + 1
            while self._is_ready(self._next):
                self._start(self._next)

        return arrived

    def _is_in_place(self, place: int) -> bool:
        """Returns whether the gradients of a bucket add up in its own memory from the first backward pass on: on a CPU, where no other rank has the same."""
        bucket = self.buckets[place]
        return bucket.ranks.size == 1 and bucket.like.is_cpu and not self.each_backward and place not in self.kept

    def _move_in_place(self, place: int, name: str) -> None:
        """Moves the gradient of a parameter to its place in the bucket, to which later backward passes add. The memory that autograd allocated between
        activations is free again at once: kept for a step, it was measured to leave the heap in pieces that no activation fits in."""
        if not self._is_in_place(place):
            return
        bucket = self.buckets[place]
        if place not in self._in_place:
            self._in_place[place] = ReservedMemory(bucket.length, bucket.like.dtype)
        parameter, view = bucket.parameters[name], bucket.views(self._in_place[place].tensor)[name]
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(parameter.grad)

    def _is_ready(self, place: int) -> bool:
        return place < len(self.buckets) and all(self._seen.get(name, 0) >= self._backwards for name in self.buckets[place].parameters)

    def _complete(self) -> None:
        while self._next < len(self.buckets):
            self._start(self._next)
        while self._pending:
            self._take()

    def _start(self, place: int) -> None:
        """Starts the reduction of a bucket and drops its whole gradients."""
        bucket = self.buckets[place]
        while len(self._pending) >= IN_FLIGHT:
            self._take()
        # A GPU's caching allocator reuses the memory of the last bucket; the C library's would fragment it in between.
        memory = (self._take_spare(bucket), self._take_spare(bucket)) if bucket.ranks.size > 1 and bucket.like.is_cpu and place not in self.kept else ()
        held = memory[0] if memory else self._in_place.get(place) if self._is_in_place(place) else None
        with torch.no_grad():
            self._sum_partial(bucket)
            flat = bucket.filled(lambda name: bucket.parameters[name].grad, None if held is None else held.tensor)
        for parameter in bucket.parameters.values():
            parameter.grad = None
        if self.after_sum is not None:
            self.after_sum(bucket)
        out = memory[1].tensor.view_as(flat) if memory else None
        self._pending.append((place, bucket.ranks.start_reduce_scatter(flat, f"gradients of {bucket.label}", out), memory))
        self.started.append(bucket.label)
        self._next = place + 1

    def _sum_partial(self, bucket: FlatBuffer) -> None:
        """Sums the gradients of parameters that tensor-parallel ranks replicate and of whose gradient each has a part."""
        names = [name for name in bucket.parameters if name in self._partial]
        if not names:
            return
        zero = bucket.like.new_zeros(1)
        own = torch.cat([p.grad.reshape(-1) if (p := bucket.parameters[n]).grad is not None else zero.expand(p.numel()) for n in names])
        total = self.ranks.groups["tensor"].all_reduce(own, f"partial gradients of {bucket.label}")
        for name, part in zip(names, total.split([bucket.parameters[n].numel() for n in names]), strict=True):
            bucket.parameters[name].grad = part.view(bucket.shapes[name])

    def _take(self) -> None:
        place, pending, memory = self._pending.pop(0)
        part, held = pending.wait(), self.own[place]
        if place in self.kept:
            self.kept[place].add(part)
        elif held is not None:
            held.add_(part)
        else:
            self.own[place] = self._own_sum(place, part) if memory else part
        for used in memory:
            self._spare.setdefault((used.tensor.numel(), used.tensor.dtype), []).append(used)

    def _own_sum(self, place: int, part: Tensor) -> Tensor:
        """Returns ``part``, the first of a step, in memory of its own: with ``each_backward``, memory reused from step to step."""
        if not self.each_backward:
            return part.clone()
        kept = self._sums[place]
        if kept is None:
            kept = self._sums[place] = torch.empty_like(part)
        return kept.copy_(part)

    def _take_spare(self, bucket: FlatBuffer) -> ReservedMemory:
        """Returns memory for the gradients of ``bucket`` that no reduction in flight uses."""
        spare = self._spare.get((bucket.length, bucket.like.dtype))
        return spare.pop() if spare else ReservedMemory(bucket.length, bucket.like.dtype)


class ReplicatedOptimizer:
    """ZeRO stage 0: ``inner`` on every rank, over whole parameters, with gradients summed over the replicas."""

    def __init__(self, inner: Optimizer, sums: GradientReducer, max_norm: float) -> None:
        self.inner, self.sums, self.max_norm = inner, sums, max_norm
        self.parameters = inner.parameters

    @property
    def updates(self) -> int:
        return self.inner.updates

    def zero_grad(self) -> None:
        self.inner.zero_grad()

    def clip(self, scale: float = 1.0) -> float:
        norm = self.sums.clip(self.max_norm, scale)
        if math.isfinite(norm):
            self._gather()
        return norm

    def _gather(self) -> None:
        """Gathers the clipped sums as the gradients of the whole parameters. Parts are dropped as they are gathered, so that memory never
        holds one and a half times the gradients."""
        sums, pending = self.sums, list[tuple[FlatBuffer, Pending]]()

        def take() -> None:
            bucket, gathered = pending.pop(0)
            for name, view in bucket.views(gathered.wait().view(-1)).items():
                bucket.parameters[name].grad = view

        for place, bucket in enumerate(sums.buckets):
            own, sums.own[place] = sums.own[place], None
            assert own is not None
            if len(pending) >= IN_FLIGHT:
                take()
            pending.append((bucket, bucket.ranks.start_all_gather(own, f"summed gradients of {bucket.label}")))
        while pending:
            take()

    def step(self, learning_rate: float) -> None:
        self.inner.step(learning_rate)

    def state(self) -> OptimizerState:
        return self.inner.state()

    def load_state(self, state: OptimizerState) -> None:
        self.inner.load_state(state)
