"""Data parallelism: sums of gradients over the ranks that hold the same weights, begun while the backward pass still runs.

Each layer is a bucket. When the last of its gradients is there, its reduce-scatter begins; every rank gets the sum of its own
part. The order of buckets is the same on all ranks, whatever order autograd has them ready in.
"""

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
"""Buckets whose sums may be under way at once: their memory is held twice."""


class KeptSum(Protocol):
    """Where this rank's part of a bucket's sum is kept instead of in memory."""

    def clear(self) -> None:
        """A step begins."""
        ...

    def add(self, gradient: Tensor) -> None:
        """Add ``gradient[part]``, which is its own from now on, to what the step has."""
        ...

    def start_sum(self) -> None:
        """Begin to bring the sum to memory."""
        ...

    def sum(self) -> Tensor:
        """The sum [part], in memory of its own."""
        ...


class GradientReducer:
    """The gradients of a model's parameters, summed over their replicas. ``buckets`` in the order of the backward pass.

    ``each_backward``: sums are taken after every backward pass, and the whole gradients dropped; else once a step, when
    ``expect``'s number of backward passes has gone through. ``sum_tied`` adds to a part of the embedding's sum that of another
    pipeline stage. ``own``: this rank's part of each bucket's sum, after ``finish``, but for those places that have a ``kept``. Parts are cut at
    multiples of ``aligned`` numbers."""

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
        """What ``clip`` has multiplied the sums in memory by, and those that are kept elsewhere are still to be."""
        tensor = ranks.groups["tensor"]
        self._partial = {name for name in where if where[name].tensor == "partial" and tensor.size > 1}
        self._counted = {name for name in where if (where[name].tensor == "cut" or tensor.rank == 0) and not is_tied_copy(model, name)}
        self._sum_tied, self._is_finished = sum_tied, False
        self._backwards, self._next = 1, 0
        self._seen: dict[str, int] = {}
        self._pending: list[tuple[int, Pending, tuple[ReservedMemory, ...]]] = []
        self._spare: dict[tuple[int, torch.dtype], list[ReservedMemory]] = {}
        self._sums: list[Tensor | None] = [None] * len(self.buckets)
        self.after_sum: Callable[[FlatBuffer], None] | None = None
        self.started: list[str] = []
        """Labels of the buckets whose sums have begun in this step."""
        for bucket in self.buckets:
            for name, parameter in bucket.parameters.items():
                parameter.register_post_accumulate_grad_hook(self._hook(name))

    def expect(self, backwards: int) -> None:
        """A step begins, in which ``backwards`` backward passes go through every parameter."""
        self.own, self.factors = [None] * len(self.buckets), []
        for kept in self.kept.values():
            kept.clear()
        self._is_finished = False
        self._backwards, self._next, self._pending = 1 if self.each_backward else backwards, 0, []
        self._seen = {}
        self.started = []

    def end_backward(self) -> None:
        """A backward pass is through."""
        if self.each_backward:
            self._complete()
            self._next, self._seen = 0, {}

    def finish(self) -> None:
        """Wait until all sums are there. A parameter that no backward pass went through here has a gradient of 0."""
        if self._is_finished:
            return
        self._is_finished = True
        if not self.each_backward:
            self._complete()
        if self._sum_tied is not None:
            # A bucket of its own on both stages, so that both have the same part of it.
            place = next(i for i, bucket in enumerate(self.buckets) if "embed_tokens" in bucket.parameters)
            own = self.own[place]
            assert own is not None and len(self.buckets[place].parameters) == 1
            self.own[place] = self._sum_tied(own)

    def release(self) -> None:
        """Between two steps: drops the sums, and gives back the memory that is kept for those of the next step."""
        self.own = [None] * len(self.buckets)
        self._sums = [None] * len(self.buckets)
        for spare in self._spare.values():
            for memory in spare:
                memory.release()

    def norm(self, scale: float = 1.0) -> float:
        """The norm of the global gradient divided by ``scale``: NaN or infinity where a number is not finite. The same on every rank:
        each number is counted once, squares are summed exactly."""
        norms = []
        for bucket, own in zip(self.buckets, self.parts(), strict=True):
            for segment in bucket.segments():
                if segment.name in self._counted:
                    norms.append(norm_of(own[segment.at : segment.at + segment.last - segment.first]))
        scaled = [norm / scale for norm in values_of(norms)]
        squares = [norm * norm for norm in scaled]
        total = math.fsum(squares) if all(map(math.isfinite, squares)) else sum(squares)
        found = [row[0] for row in self.ranks.all_values([total], "the gradient norm")]
        return math.sqrt(math.fsum(found)) if all(map(math.isfinite, found)) else math.nan if any(map(math.isnan, found)) else math.inf

    def parts(self) -> Iterator[Tensor]:
        """This rank's part of every bucket's sum; those that are kept elsewhere come while the one before is looked at."""
        for place, own in enumerate(self.own):
            if place + 1 in self.kept:
                self.kept[place + 1].start_sum()
            found = self.kept[place].sum() if place in self.kept else own
            assert found is not None
            yield found

    def clip(self, max_norm: float, scale: float = 1.0) -> float:
        """Divide the sums by ``scale``, and scale them so that their global norm is at most ``max_norm`` (0: off); returns the norm
        before that."""
        self.finish()
        norm = self.norm(scale)
        if math.isfinite(norm):
            self.factors = ([1.0 / scale] if scale != 1.0 else []) + ([max_norm / norm] if 0 < max_norm < norm else [])
            for own in [own for own in self.own if own is not None]:
                for factor in self.factors:
                    own.mul_(factor)
        return norm

    def _hook(self, name: str) -> Callable[[nn.Parameter], None]:
        def arrived(parameter: nn.Parameter) -> None:
            self._seen[name] = self._seen.get(name, 0) + 1
            while self._is_ready(self._next):
                self._start(self._next)

        return arrived

    def _is_ready(self, place: int) -> bool:
        return place < len(self.buckets) and all(self._seen.get(name, 0) >= self._backwards for name in self.buckets[place].parameters)

    def _complete(self) -> None:
        while self._next < len(self.buckets):
            self._start(self._next)
        while self._pending:
            self._take()

    def _start(self, place: int) -> None:
        """Begin the sum of a bucket; its whole gradients are dropped."""
        bucket = self.buckets[place]
        while len(self._pending) >= IN_FLIGHT:
            self._take()
        # A GPU's allocator uses the memory of the last bucket again by itself; the C library's cuts it up for what comes between.
        memory = (self._take_spare(bucket), self._take_spare(bucket)) if bucket.ranks.size > 1 and bucket.like.is_cpu and place not in self.kept else ()
        with torch.no_grad():
            self._sum_partial(bucket)
            flat = bucket.filled(lambda name: bucket.parameters[name].grad, memory[0].tensor if memory else None)
        for parameter in bucket.parameters.values():
            parameter.grad = None
        if self.after_sum is not None:
            self.after_sum(bucket)
        out = memory[1].tensor.view_as(flat) if memory else None
        self._pending.append((place, bucket.ranks.start_reduce_scatter(flat, f"gradients of {bucket.label}", out), memory))
        self.started.append(bucket.label)
        self._next = place + 1

    def _sum_partial(self, bucket: FlatBuffer) -> None:
        """Tensor-parallel ranks that each hold a whole parameter have a part of its gradient."""
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
        """``part``, the first of a step, in memory of its own: where sums are taken after every backward pass, that of the step before."""
        if not self.each_backward:
            return part.clone()
        kept = self._sums[place]
        if kept is None:
            kept = self._sums[place] = torch.empty_like(part)
        return kept.copy_(part)

    def _take_spare(self, bucket: FlatBuffer) -> ReservedMemory:
        """Memory for the gradients of ``bucket`` that no sum under way uses."""
        spare = self._spare.get((bucket.length, bucket.like.dtype))
        return spare.pop() if spare else ReservedMemory(bucket.length, bucket.like.dtype)


class ReplicatedOptimizer:
    """``inner`` on every rank, over whole parameters, with gradients summed over the replicas: ZeRO stage 0."""

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
        """Makes every rank's part of the clipped sums the gradient of the whole parameters. The parts are dropped as they are gathered, so that
        gradients are not held one and a half times."""
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
