"""ZeRO (Rajbhandari et al., 2020): what data-parallel ranks cut between them instead of each holding all of it.

Every layer's parameters lie end to end in one flat tensor of n equal parts, one a rank (``parallel.flat``). Stage 1 cuts AdamW's
moments: a rank updates its part of the weights, and an all-gather brings the others'. Stage 2 cuts the gradients too: each backward
pass ends in a reduce-scatter of every layer, after which the whole gradients are dropped. Stage 3 cuts the weights too: a layer
is gathered before its forward and again before its backward, and dropped after each; embedding and head are held whole from the
start of a forward pass to the end of its backward. With P numbers of b bytes, what stays from one backward pass to the next is

    0: b (P + P + 2 P)    1: b (P + P + 2 P / n)    2: b (P + P / n + 2 P / n)    3: b (P / n + P / n + 2 P / n)

for weights, gradients and moments. The mechanism is the reduce-scatter and all-gather of torch's process groups, with sums in rank
order; updates are elementwise, so all stages have the bits of stage 0 where a step has one backward pass.
"""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from tandem.config.trainer import TrainerConfig
from tandem.model.layer_pass import LayerFunction
from tandem.runtime.communicator import Pending
from tandem.trainer.before_backward import BeforeBackward
from tandem.trainer.optimizer import OptimizerState, check_state
from tandem.trainer.optimizers import plain_adamw
from tandem.trainer.pages import MOMENTS
from tandem.trainer.parallel.data import GradientSums
from tandem.trainer.parallel.flat import Flat, layer_of

Stage = Literal[1, 2, 3]


class Part(NamedTuple):
    """``values``: the numbers of parameter ``name`` (flat) from ``first`` on; ``kind``: its ``weights`` or one of its moments."""

    kind: str
    name: str
    first: int
    values: Tensor


class Shard:
    """The weights of one bucket: all of them in ``whole[length]``, and this rank's part in ``own[part]``. ``is_cut``: ``whole`` has memory
    only between ``gather`` and ``free``, and ``own`` has its own."""

    def __init__(self, bucket: Flat, is_cut: bool) -> None:
        self.bucket, self.is_cut, self.is_whole = bucket, is_cut, True
        with torch.no_grad():
            self.whole = bucket.filled(lambda name: bucket.parameters[name]).view(-1)
        # The modules' parameters are views from now on; what reads a layer finds whatever the flat tensor holds.
        for name, view in bucket.views(self.whole).items():
            bucket.parameters[name].data = view
        self._bytes = self.whole.untyped_storage().nbytes()
        self._pending: Pending | None = None
        self.own = self._part.clone() if is_cut else self._part
        if is_cut:
            self.free()

    @property
    def _part(self) -> Tensor:
        return self.whole.view(self.bucket.ranks.size, -1)[self.bucket.ranks.rank]

    def start_gather(self) -> None:
        """Begin to bring every rank's part here, where it is not here."""
        if self.is_whole or self._pending is not None:
            return
        self.whole.untyped_storage().resize_(self._bytes)
        self._pending = self.bucket.ranks.start_all_gather(self.own, f"weights of {self.bucket.label}", out=self.whole)

    def gather(self) -> None:
        """Have every rank's part here."""
        self.start_gather()
        if self._pending is not None:
            self._pending.wait()
            self._pending, self.is_whole = None, True

    def free(self) -> None:
        """Hold this rank's part alone, where the weights are cut."""
        if self.is_cut and self.is_whole:
            self.whole.untyped_storage().resize_(0)
            self.is_whole = False

    def take_own(self) -> None:
        """This rank's part is what ``whole`` has there now."""
        if self.is_cut:
            self.own.copy_(self._part)

    def publish(self) -> Pending | None:
        """After an update of ``own``: begin to bring the others' to where all hold all."""
        if self.is_cut:
            return None
        return self.bucket.ranks.start_all_gather(self.own.clone(), f"updated weights of {self.bucket.label}", out=self.whole)


class ShardedOptimizer:
    """AdamW of which every rank holds a part, and updates that part of the weights. ``parameters`` are the model's.

    ``state`` is of whole parameters, on the first of the ranks that hold the same numbers, and empty on the others; all of them must
    ask for it. ``load_state`` takes whole ones on every rank."""

    def __init__(self, sums: GradientSums, config: TrainerConfig, stage: Stage) -> None:
        self.sums, self.stage, self._config = sums, stage, config
        self.parameters = {name: p for bucket in sums.buckets for name, p in bucket.parameters.items()}
        self.shards = [Shard(bucket, stage == 3) for bucket in sums.buckets]
        pieces: dict[str, nn.Parameter] = {}
        for shard in self.shards:
            for segment in shard.bucket.segments():
                piece = shard.own[segment.at : segment.at + segment.last - segment.first]
                pieces[segment.name] = nn.Parameter(piece, requires_grad=True)
        self._inner = plain_adamw(list(pieces.items()), config, [name for name in pieces if self.parameters[name].ndim >= 2])
        if stage == 3:
            _Gathering(self)

    @property
    def updates(self) -> int:
        return self._inner.updates

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        self._inner.zero_grad()

    def clip(self, scale: float = 1.0) -> float:
        return self.sums.clip(self._config.max_grad_norm, scale)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One update of every parameter; afterwards all ranks hold it, where weights are not cut."""
        for shard, own in zip(self.shards, self.sums.own, strict=True):
            assert own is not None
            for segment in shard.bucket.segments():
                self._inner.parameters[segment.name].grad = own[segment.at : segment.at + segment.last - segment.first]
        self._inner.step(learning_rate)
        self._inner.zero_grad()
        self.sums.own = [None] * len(self.shards)
        for pending in [shard.publish() for shard in self.shards]:
            if pending is not None:
                pending.wait()

    def parts(self) -> Iterator[Part]:
        """The numbers that this rank updates, live: of every parameter a run of its weights and, after the first update, of its
        moments."""
        moments = self._inner.state().moments
        for shard in self.shards:
            for segment in shard.bucket.segments():
                yield Part("weights", segment.name, segment.first, shard.own[segment.at : segment.at + segment.last - segment.first])
                for kind in MOMENTS:
                    if f"{kind}/{segment.name}" in moments:
                        yield Part(kind, segment.name, segment.first, moments[f"{kind}/{segment.name}"])

    @torch.no_grad()
    def load_parts(self, parts: Iterable[Part], updates: int) -> None:
        """Take over what ``parts`` of an optimizer that is cut alike gave; weights that every rank holds are brought to all."""
        moments, weights = {}, {}
        for part in parts:
            if part.kind == "weights":
                weights[part.name] = part.values
            else:
                moments[f"{part.kind}/{part.name}"] = part.values
        self._inner.load_state(OptimizerState(moments, updates))
        for shard in self.shards:
            for segment in shard.bucket.segments():
                shard.own[segment.at : segment.at + segment.last - segment.first].copy_(weights[segment.name])
        for pending in [shard.publish() for shard in self.shards]:
            if pending is not None:
                pending.wait()

    @torch.no_grad()
    def state(self) -> OptimizerState:
        held, whole = self._inner.state(), {}
        if self.updates:
            for shard in self.shards:
                for kind in MOMENTS:
                    own = torch.zeros_like(shard.own)
                    for segment in shard.bucket.segments():
                        own[segment.at : segment.at + segment.last - segment.first] = held.moments[f"{kind}/{segment.name}"]
                    gathered = shard.bucket.ranks.all_gather(own, f"{kind} of {shard.bucket.label}")
                    if shard.bucket.ranks.rank == 0:
                        whole.update({f"{kind}/{name}": view.clone() for name, view in shard.bucket.views(gathered.view(-1)).items()})
        return OptimizerState(whole, self.updates)

    def load_state(self, state: OptimizerState) -> None:
        expected = {
            f"{kind}/{name}": torch.empty(bucket.shapes[name], dtype=parameter.dtype, device="meta")
            for bucket in self.sums.buckets
            for name, parameter in bucket.parameters.items()
            for kind in MOMENTS
        }
        check_state(state, expected)
        pieces = {}
        if state.moments:
            for shard in self.shards:
                for segment in shard.bucket.segments():
                    for kind in MOMENTS:
                        flat = state.moments[f"{kind}/{segment.name}"].reshape(-1)
                        pieces[f"{kind}/{segment.name}"] = flat[segment.first : segment.last]
        self._inner.load_state(OptimizerState(pieces, state.updates))

    def rest(self) -> None:
        """Give back the weights that a pass without a backward left whole, where weights are cut."""
        for shard in self.shards:
            shard.free()

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


class _Gathering:
    """Stage 3: when which weights are whole. Stands around the layers of a decoder, and before all of it."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._sums = optimizer.sums
        self._layers: dict[int, list[Shard]] = {}
        self._ends: list[Shard] = []
        for shard in optimizer.shards:
            layer = layer_of(shard.bucket)
            (self._ends if layer is None else self._layers.setdefault(layer, [])).append(shard)
        self._shard_of = {id(shard.bucket): shard for shard in optimizer.shards}
        self._in_backward: set[int] = set()
        optimizer.sums.after_sum = self._after_sum
        model = optimizer.sums.model
        model.around_layer = self._around
        model.register_forward_pre_hook(lambda *_: self._before_all())

    def _before_all(self) -> None:
        self._in_backward.clear()
        for shard in self._ends:
            shard.gather()
        self._start(min(self._layers, default=-1))

    def _start(self, index: int) -> None:
        for shard in self._layers.get(index, ()):
            shard.start_gather()

    def _around(self, index: int, layer: LayerFunction, x: Tensor | None, residual: Tensor) -> tuple[Tensor, Tensor]:
        is_again = index in self._in_backward
        self._gather(index, index - 1 if is_again else index + 1)
        x, residual = layer(x, residual)
        if is_again:
            return x, residual
        if torch.is_grad_enabled():
            x, residual = BeforeBackward.apply(self.before_backward, index, x, residual)
        for shard in self._layers[index]:
            shard.free()
        return x, residual

    def _gather(self, index: int, following: int) -> None:
        for shard in self._layers[index]:
            shard.gather()
        # The next one's travel while this one's are computed with.
        self._start(following)

    def before_backward(self, index: int) -> None:
        self._in_backward.add(index)
        self._gather(index, index - 1)

    def _after_sum(self, bucket: Flat) -> None:
        """All gradients of ``bucket`` are there: nothing reads its weights any more in this backward pass."""
        self._shard_of[id(bucket)].free()
