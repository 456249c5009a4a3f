"""The layers of each pipeline stage. Imports no torch."""

import itertools
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tandem.config.parallel import ParallelConfig
from tandem.layout.schedules import PipelineShape
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError


class Span(NamedTuple):
    """The layers ``start`` to ``stop`` of ``layers``. The first span has the embedding, the last the final norm and the heads."""

    start: int
    stop: int
    layers: int

    @property
    def is_first(self) -> bool:
        return self.start == 0

    @property
    def is_last(self) -> bool:
        return self.stop == self.layers

    def holds(self, name: str, tied: bool) -> bool:
        """Returns whether a stage has the parameter of this Hugging Face name. The last stage has a copy of a ``tied`` embedding."""
        layer = layer_of(name)
        if layer is not None:
            return self.start <= layer < self.stop
        if name.startswith("model.embed_tokens"):
            return self.is_first or (self.is_last and tied)
        return self.is_last


def layer_of(name: str) -> int | None:
    """Returns the layer of the parameter of this Hugging Face name; ``None`` if it is in none."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return None if layer is None else int(layer[1])


def whole(layers: int) -> Span:
    return Span(0, layers, layers)


def spans(counts: Sequence[int]) -> tuple[Span, ...]:
    """Returns the spans of stages with ``counts`` layers each."""
    ends = list(itertools.accumulate(counts))
    return tuple(Span(end - count, end, ends[-1]) for end, count in zip(ends, counts, strict=True))


def stage_spans(shapes: ModelShapes, stages: int, counts: Sequence[int] = ()) -> tuple[Span, ...]:
    """Returns the layer span of each stage: ``counts`` layers each, or a split by cost. Raises ``ValueError`` if there is no such split."""
    if counts:
        if len(counts) != stages or sum(counts) != shapes.num_hidden_layers or min(counts) < 1:
            raise ValueError(
                f"the layers {list(counts)} do not split the model's {shapes.num_hidden_layers} layers over {stages} stages"
            )
        return spans(counts)
    if shapes.num_hidden_layers < stages:
        raise ValueError(f"the model has {shapes.num_hidden_layers} layers, fewer than {stages} pipeline stages")
    layers, first, last = stage_costs(shapes)
    return spans(split_by_cost(layers, first, last, stages))


def spans_of(parallel: ParallelConfig, shapes: ModelShapes) -> tuple[Span, ...]:
    """Returns the layers of every stage. Raises ``UserError`` for a model that cannot be split this way."""
    try:
        return stage_spans(shapes, parallel.pipeline * parallel.virtual_stages, parallel.pipeline_layers)
    except ValueError as error:
        raise UserError(f"'parallel.pipeline' is {parallel.pipeline}: {error}; lower it, or change parallel.pipeline_layers") from None


def own_spans(parallel: ParallelConfig, spans: tuple[Span, ...], rank: int) -> list[Span]:
    """Returns the spans on ``rank`` of the pipeline."""
    return [spans[stage] for stage in PipelineShape(parallel.pipeline, 1, parallel.virtual_stages).stages_of(rank)]


def stage_costs(shapes: ModelShapes) -> tuple[tuple[float, ...], float, float]:
    """Returns the multiply-adds per token in the forward pass of each layer, of the embedding and of the head, without attention scores.
    The backward pass costs twice as much."""
    hidden = shapes.hidden_size
    layers = []
    for index in range(shapes.num_hidden_layers):
        experts = shapes.experts_of(index)
        if experts is None:
            mlp = float(shapes.mlp_matrices * shapes.intermediate_size)
        else:
            mlp = 3.0 * experts.visited_size + experts.num_experts
        layers.append(shapes.attention_weights(index) + hidden * mlp)
    return tuple(layers), float(hidden), float(hidden * shapes.head_rows)


def split_by_cost(layers: Sequence[float], first: float, last: float, stages: int) -> tuple[int, ...]:
    """Returns the number of layers of each stage, at least 1, that minimises the cost of the most expensive stage, with ``first`` added to
    the first stage and ``last`` to the last; ties go to the smallest sum of squares."""
    count = len(layers)
    sums = [0.0, *itertools.accumulate(layers)]

    def cost(stage: int, start: int, stop: int) -> float:
        return sums[stop] - sums[start] + first * (stage == 0) + last * (stage == stages - 1)

    # No stage of the result is dearer than this, so that dearer ones are not looked at: a few of each layer instead of all.
    most = _enough(count, stages, cost)
    # best[stop]: (maximum cost, sum of squares, counts) of the stages so far over layers [0, stop).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        reached: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (dearest, squares, counts) in best.items():
            for stop in range(start + 1, count - (stages - stage - 1) + 1):
                here = cost(stage, start, stop)
                if here > most:
                    break
                candidate = (max(dearest, here), squares + here * here, (*counts, stop - start))
                if stop not in reached or candidate < reached[stop]:
                    reached[stop] = candidate
        best = reached
    return best[count][2]


def _enough(count: int, stages: int, cost: Callable[[int, int, int], float]) -> float:
    """Returns a cost within which ``stages`` stages hold ``count`` layers, above the least such cost by a rounding error at most: bisection, with stages
    that are filled one after the other."""

    def holds(most: float) -> bool:
        start = 0
        for stage in range(stages):
            stop, limit = start + 1, count - (stages - stage - 1)
            if stage == stages - 1:
                stop = limit
            while stop < limit and cost(stage, start, stop + 1) <= most:
                stop += 1
            if cost(stage, start, stop) > most:
                return False
            start = stop
        return True

    low, high = 0.0, sum(cost(stage, 0, count) for stage in {0, stages - 1})
    while (middle := (low + high) / 2) not in (low, high) and high - low > 1e-9 * high:
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
