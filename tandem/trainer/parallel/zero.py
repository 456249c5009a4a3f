"""ZeRO (Rajbhandari et al., 2020): shards optimizer state, gradients and weights over data-parallel ranks.

Every layer's parameters are in one flat buffer of n equal parts, one a rank (``parallel.flat_buffer``). Stage 1 shards the optimizer's
moments: a rank updates its part of the weights, and an all-gather distributes the parts. Stage 2 also shards the gradients: each backward
pass ends in a reduce-scatter of every layer, after which the whole gradients are dropped. Stage 3 also shards the weights: a layer is
gathered (unsharded) before its forward and again before its backward, and resharded after each; embedding and head are whole from the start
of a forward pass to the end of its backward, in a pipeline until the last pending backward. With P parameters of b bytes, the memory
between two backward passes is

0: b (P + P + 2 P)    1: b (P + P + 2 P / n)    2: b (P + P / n + 2 P / n)    3: b (P / n + P / n + 2 P / n)

for weights, gradients and moments (of AdamW; other optimizers' states are sharded alike). The collectives are the reduce-scatter and
all-gather of torch's process groups, with sums in rank order; updates are elementwise, or of matrices that are assembled first
(``matrices``), so all stages give the bits of stage 0 if a step has one backward pass.

A rank's moments, and under stage 3 its part of the layers' weights and gradients, may be in a file (``PagedAdamW``, ``PagedPart``;
Rajbhandari et al., 2021, "ZeRO-Infinity") with the same bits.
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
    """``values``: the elements of the flat parameter ``name`` from ``first`` on; ``kind``: ``weights`` or a tensor kind of the optimizer
    state."""

    kind: str
    name: str
    first: int
    values: Tensor


class ShardedOptimizer:
    """An optimizer of which every rank holds and updates a part. ``parameters`` are the model's; ``make_inner`` makes the optimizer of this
    rank's pieces of them, flat and by name, some of them paged in groups.

    ``state`` and ``load_state`` are of this rank's pieces, which ``parts`` lists. ``pages_weights``: this rank's part of the layers'
    weights and gradients is in the inner optimizer's file. ``is_filled``: the model has its weights; otherwise ``fill`` must be called."""

    def __init__(
        self, sums: GradientReducer, max_norm: float, stage: Stage, make_inner: MakeInner, pages_weights: bool = False, is_filled: bool = True
    ) -> None:
        self.sums, self.stage, self._max_norm = sums, stage, max_norm
        self.parameters = {name: p for bucket in sums.buckets for name, p in bucket.parameters.items()}
        # The parts must have their place in the file before the shards write to it.
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
            ZeroUnshard(self.shards, sums.model, sums)

    @property
    def paged(self) -> PagedAdamW | None:
        """The inner optimizer, if its state is in a file."""
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
        """Updates every parameter; weights that are not sharded are then gathered on all ranks."""
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
        """Returns this rank's live part of parameter ``name``."""
        return self.paged.weight(name) if self.paged is not None else self._inner.parameters[name].detach()

    def parts(self, form: bool = False) -> Iterator[Part]:
        """Yields the live elements that this rank updates: of every parameter a run of its weights and, after the first update, of its
        state. ``form``: as after an update, with ``values`` on the ``meta`` device."""
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
        """Loads the ``parts`` of an identically sharded optimizer; weights that are not sharded are then gathered on all ranks. If the
        state is in a file, one part is in memory at a time."""
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
        """Takes this rank's part of ``values``, the weights of parameter ``name`` from element ``first`` on. Stage 3 only."""
        assert self.stage == 3
        for shard in self.shards:
            for run in shard.bucket.own_runs(name, first, first + values.numel()):
                own = values[run.first - first : run.last - first]
                at = run.first - next(segment.first for segment in shard.bucket.segments() if segment.name == name)
                if self.paged is not None:
                    self.paged.put(WEIGHTS, name, own, at)
                else:
                    self._inner.parameters[name][at : at + own.numel()] = own

    def _publish(self) -> None:
        for pending in [shard.publish() for shard in self.shards]:
            if pending is not None:
                pending.wait()

    def state(self) -> OptimizerState:
        return self._inner.state()

    def load_state(self, state: OptimizerState) -> None:
        self._inner.load_state(state)

    def reshard(self) -> None:
        """Reshards weights that a pass without a backward pass left gathered."""
        for shard in self.shards:
            shard.free()

    @contextlib.contextmanager
    def addresses(self) -> Iterator[None]:
        """Is a context in which every parameter has memory of its own, without values if weights are sharded."""
        for shard in self.shards:
            shard.reserve()
        try:
            yield
        finally:
            self.reshard()

    @contextlib.contextmanager
    def whole(self, changes: bool = False) -> Iterator[None]:
        """Is a context in which every rank holds all weights. ``changes``: the caller changes them, alike on all ranks."""
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
    """Yields this rank's run of every parameter: views of what the shard holds, or ``meta`` tensors without a shard."""
    for segment in bucket.segments():
        size = segment.last - segment.first
        if shard is None:
            yield segment.name, nn.Parameter(torch.empty(size, dtype=bucket.like.dtype, device="meta"))
        else:
            yield segment.name, nn.Parameter(shard.own[segment.at : segment.at + size])
