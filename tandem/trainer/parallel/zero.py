"""ZeRO (Rajbhandari et al., 2020): what data-parallel ranks cut between them instead of each holding all of it.

Every layer's parameters lie end to end in one flat tensor of n equal parts, one a rank (``parallel.flat``). Stage 1 cuts the
optimizer's moments: a rank updates its part of the weights, and an all-gather brings the others'. Stage 2 cuts the gradients too: each backward
pass ends in a reduce-scatter of every layer, after which the whole gradients are dropped. Stage 3 cuts the weights too: a layer
is gathered before its forward and again before its backward, and dropped after each; embedding and head are held whole from the
start of a forward pass to the end of its backward, in a pipeline of all that wait. With P numbers of b bytes, what stays from one backward pass to the next is

    0: b (P + P + 2 P)    1: b (P + P + 2 P / n)    2: b (P + P / n + 2 P / n)    3: b (P / n + P / n + 2 P / n)

for weights, gradients and moments (of AdamW; other optimizers' states are cut alike). The mechanism is the reduce-scatter and all-gather of
torch's process groups, with sums in rank order; updates are elementwise, or of matrices that are put together first (``matrices``), so all
stages have the bits of stage 0 where a step has one backward pass.

What a rank has of the moments may lie in a file, and under stage 3 what it has of the layers' weights and gradients too (``PagedAdamW``,
``PagedPart``; Rajbhandari et al., 2021, "ZeRO-Infinity"): the bits stay.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from tandem.trainer.offload.pages import WEIGHTS
from tandem.trainer.offload.reserved_memory import PagePool
from tandem.trainer.offload.zero_part import PagedPart, WritesBehind
from tandem.trainer.optimizers.adamw import OptimizerState, PieceOptimizer
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.trainer.optimizers.blockwise import numbers_each
from tandem.trainer.parallel.flat_buffer import FlatBuffer, layer_of
from tandem.trainer.parallel.gradient_reducer import GradientReducer
from tandem.trainer.parallel.zero_shard import Shard
from tandem.trainer.parallel.zero_unshard import ZeroUnshard

Stage = Literal[1, 2, 3]
MakeInner = Callable[[Mapping[str, nn.Parameter], Sequence[Sequence[str]]], PieceOptimizer]


class Part(NamedTuple):
    """``values``: the numbers of parameter ``name`` (flat) from ``first`` on; ``kind``: its ``weights`` or what the state has of it."""

    kind: str
    name: str
    first: int
    values: Tensor


class ShardedOptimizer:
    """An optimizer of which every rank holds a part, and updates that part of the weights. ``parameters`` are the model's; ``make_inner``
    makes the optimizer of this rank's pieces of them, flat and by name, some of them paged in groups.

    ``state`` and ``load_state`` are of this rank's pieces; ``parts`` says which these are. ``pages_weights``: this rank's part of the layers'
    weights and gradients lies in a file, which the inner optimizer has. ``is_filled``: the model has its weights; else ``fill`` is to be given
    them."""

    def __init__(
        self, sums: GradientReducer, max_norm: float, stage: Stage, make_inner: MakeInner, pages_weights: bool = False, is_filled: bool = True
    ) -> None:
        self.sums, self.stage, self._max_norm = sums, stage, max_norm
        self.parameters = {name: p for bucket in sums.buckets for name, p in bucket.parameters.items()}
        # Their own parts must have their place in the file before the shards put them there.
        paged = [bucket for bucket in sums.buckets if pages_weights and layer_of(bucket) is not None]
        pool = PagePool()
        held = {id(bucket): Shard(bucket, stage == 3, None, is_filled, pool) for bucket in sums.buckets if bucket not in paged}
        pieces = {name: piece for bucket in sums.buckets for name, piece in _pieces(bucket, held.get(id(bucket)))}
        self._inner = make_inner(pieces, [[segment.name for segment in bucket.segments()] for bucket in paged])
        self.kinds = self._inner.kinds
        if paged:
            assert stage == 3 and self.paged is not None
            writes = WritesBehind()
            for bucket, pages in zip(paged, self.paged.groups, strict=True):
                part = PagedPart(pages, self.paged.pager, bucket.part, bucket.like.dtype, writes)
                held[id(bucket)] = Shard(bucket, True, part, is_filled)
                sums.kept[sums.buckets.index(bucket)] = part
        self.shards = [held[id(bucket)] for bucket in sums.buckets]
        if stage == 3:
            ZeroUnshard(self.shards, sums)

    @property
    def paged(self) -> PagedAdamW | None:
        """What updates this rank's part, where its state lies in a file."""
        return self._inner if isinstance(self._inner, PagedAdamW) else None

    @property
    def updates(self) -> int:
        return self._inner.updates

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._inner.zero_grad()

    def clip(self, scale: float = 1.0) -> float:
        return self.sums.clip(self._max_norm, scale)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter; afterwards all ranks hold it, where weights are not cut."""
        for shard, own in zip(self.shards, self.sums.own, strict=True):
            if shard.paged is not None:
                shard.paged.drop()
                continue
            assert own is not None
            for segment in shard.bucket.segments():
                self._inner.parameters[segment.name].grad = own[segment.at : segment.at + segment.last - segment.first]
        if self.paged is not None:
            self.paged.factors = self.sums.factors
        self._inner.step(learning_rate)
        self._inner.zero_grad()
        self.sums.own = [None] * len(self.shards)
        self._publish()

    def weight(self, name: str) -> Tensor:
        """This rank's run of parameter ``name``, live."""
        return self.paged.weight(name) if self.paged is not None else self._inner.parameters[name].detach()

    def parts(self, form: bool = False) -> Iterator[Part]:
        """The numbers that this rank updates, live: of every parameter a run of its weights and, after the first update, of its state.
        ``form``: as they are after an update, without their numbers (``values`` are on the device ``meta``)."""
        state: dict[str, list[tuple[str, Tensor]]] = {}
        for label, tensor in (self._inner.form() if form else self._inner.state().moments).items():
            kind, _, name = label.partition("/")
            state.setdefault(name, []).append((kind, tensor))
        weights: Mapping[str, Tensor] = self.paged.weights() if self.paged is not None and not form else self._inner.parameters
        for shard in self.shards:
            for segment in shard.bucket.segments():
                own = weights[segment.name].detach()
                yield Part(WEIGHTS, segment.name, segment.first, own.to("meta") if form else own)
                for kind, tensor in state.get(segment.name, ()):
                    yield Part(kind, segment.name, segment.first // numbers_each(kind), tensor)

    @torch.no_grad()
    def load_parts(self, parts: Iterable[Part], updates: int) -> None:
        """Take over what ``parts`` of an optimizer that is cut alike gave; weights that every rank holds are brought to all. Where the state
        lies in a file, one part is in memory at a time."""
        paged = self.paged
        if paged is not None:
            paged.load_state(OptimizerState({}, 0))
            for part in parts:
                paged.put(part.kind, part.name, part.values)
            paged.updates = updates
        else:
            moments, weights = {}, {}
            for part in parts:
                if part.kind == WEIGHTS:
                    weights[part.name] = part.values
                else:
                    moments[f"{part.kind}/{part.name}"] = part.values
            self._inner.load_state(OptimizerState(moments, updates))
            for name, values in weights.items():
                self._inner.parameters[name].copy_(values)
        self._publish()

    @torch.no_grad()
    def fill(self, name: str, first: int, values: Tensor) -> None:
        """Takes from ``values``, the weights of parameter ``name`` from number ``first`` on, those of this rank's part. Stage 3 only."""
        assert self.stage == 3
        for shard in self.shards:
            for segment in shard.bucket.segments():
                begin, end = max(first, segment.first), min(first + values.numel(), segment.last)
                if segment.name != name or begin >= end:
                    continue
                own, at = values[begin - first : end - first], begin - segment.first
                if self.paged is not None:
                    self.paged.put(WEIGHTS, name, own, at)
                else:
                    self._inner.parameters[name][at : at + end - begin] = own

    def _publish(self) -> None:
        for pending in [shard.publish() for shard in self.shards]:
            if pending is not None:
                pending.wait()

    def state(self) -> OptimizerState:
        return self._inner.state()

    def load_state(self, state: OptimizerState) -> None:
        self._inner.load_state(state)

    def rest(self) -> None:
        """Give back the weights that a pass without a backward left whole, where weights are cut."""
        for shard in self.shards:
            shard.free()

    @contextlib.contextmanager
    def addresses(self) -> Iterator[None]:
        """Every parameter has memory of its own inside, without its numbers where weights are cut."""
        for shard in self.shards:
            shard.reserve()
        try:
            yield
        finally:
            self.rest()

    @contextlib.contextmanager
    def whole(self, changes: bool = False) -> Iterator[None]:
        """Every rank holds all weights inside; ``changes``: they are written there, alike on all ranks."""
        for shard in self.shards:
            shard.gather()
        try:
            yield
        finally:
            for shard in self.shards:
                if changes:
                    with torch.no_grad():
                        shard.take_own()
                shard.free()


def _pieces(bucket: FlatBuffer, shard: Shard | None) -> Iterator[tuple[str, nn.Parameter]]:
    """This rank's run of every parameter: views of what the shard holds; without a shard, of nothing."""
    for segment in bucket.segments():
        size = segment.last - segment.first
        if shard is None:
            yield segment.name, nn.Parameter(torch.empty(size, dtype=bucket.like.dtype, device="meta"))
        else:
            yield segment.name, nn.Parameter(shard.own[segment.at : segment.at + size])
