"""Sizes a serving pool: how many engines, of how many GPUs each, serve a load within its latency targets. Imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.serving.engine_memory import EngineMemory, predict_engine_memory
from tandem.estimate.serving.latency import Latency, predict_latency
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.throughput import predict_saturated
from tandem.estimate.serving.weight_formats import FORMATS
from tandem.layout.shapes import ModelShapes
from tandem.planner.serving.demand import Demand, Target
from tandem.planner.serving.rules import Answer, quantization_rule
from tandem.types.errors import UserError

MOST_BUSY = 0.9
"""Of the rate that an engine completes when requests always wait, at which it may be loaded: at 1 its queue has no end."""
MOST_INSTANCES = 1_000_000
ALONE = 1e-3
"""Of that rate, at which a request is alone."""
RATE_STEPS = 6
"""Of the bisection for the largest rate of an engine within the targets."""


@dataclass(frozen=True, slots=True)
class PoolRequest:
    """``layout``: the options that are given, whose ``tensor`` and ``quantization`` are replaced unless ``tensor`` and ``quantization`` here say otherwise."""

    shapes: ModelShapes
    hardware: Hardware
    demand: Demand
    layout: ServingLayout
    tensor: int | None = None
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class Pool:
    """``instances`` engines of ``layout``, each of which receives ``requests_per_s`` and has ``latency``."""

    layout: ServingLayout
    instances: int
    requests_per_s: float
    latency: Latency
    memory: EngineMemory

    @property
    def gpus(self) -> int:
        return self.instances * self.layout.tensor

    def value(self, target: Target) -> float:
        """Returns the predicted seconds of the figure of ``target``."""
        share = target.percentile / 100
        return self.latency.first_token_s(share) if target.figure == "ttft" else self.latency.output_token_s(share)

    def meets(self, targets: tuple[Target, ...]) -> bool:
        return all(self.value(target) <= target.most_s for target in targets)


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """``chosen``: the answer, in the format of ``rule`` unless that serves the load in no layout or is beaten. ``formats``: the smallest pool of the rule's
    format, and of each other that has a smaller one. ``largest_rate``: requests per second of one engine at which the targets still hold. ``limit``: what
    limits it, in a sentence."""

    request: PoolRequest
    rule: Answer
    chosen: Pool
    formats: tuple[Pool, ...]
    reason: str
    largest_rate: float
    limit: str


def make_pool_plan(request: PoolRequest) -> PoolPlan:
    """Returns the smallest pool. Raises ``UserError`` if no layout serves the load, with the nearest one."""
    request.demand.check()
    shapes, hardware, targets = request.shapes, request.hardware, request.demand.targets
    rule = quantization_rule(shapes, hardware, bool(targets)) if request.quantization is None else Answer(request.quantization, "as --quantization says")
    names = [rule.name] if request.quantization is not None else [rule.name, *(name for name in FORMATS if name != rule.name)]
    pools, refusals = dict[str, Pool](), list[tuple[Pool | None, str]]()
    for name in names:
        # Of the other formats, only what takes fewer GPUs than the rule's is of interest.
        smallest = _smallest(request, name, refusals, pools[rule.name].gpus - 1 if rule.name in pools else None)
        if smallest is not None:
            pools[name] = smallest
    if not pools:
        raise UserError(_nothing(request, refusals))
    chosen = _best(rule, pools)
    rate, limit = _largest_rate(shapes, hardware, request.demand, chosen)
    return PoolPlan(request, rule, chosen, tuple(pools.values()), _reason(request, rule, chosen, pools), rate, limit)


def pool_of(request: PoolRequest, layout: ServingLayout, instances: int) -> Pool | None:
    """Returns ``instances`` engines of ``layout``, ``None`` if they are too few. Raises ``UserError`` for a layout that does not fit."""
    traffic = request.demand.traffic
    rate = traffic.requests_per_s / instances
    memory = predict_engine_memory(request.shapes, layout, request.hardware)
    latency = predict_latency(request.shapes, layout, request.hardware, replace(traffic, requests_per_s=rate))
    return None if latency is None else Pool(layout, instances, rate, latency, memory)


def _smallest(request: PoolRequest, quantization: str, refusals: list[tuple[Pool | None, str]], most_gpus: int | None) -> Pool | None:
    """Returns the pool of the fewest GPUs, at most ``most_gpus``, in a format; of equal ones that of the smallest engines, of which one that fails takes the
    least with it. Adds to ``refusals`` what came nearest where there is none."""
    smallest: Pool | None = None
    for layout in _layouts(request, quantization):
        most = most_gpus if smallest is None else smallest.gpus - 1
        if most is not None and most < layout.tensor:
            continue
        try:
            pool = _fewest(request, layout, most)
        except UserError as error:
            refusals.append((None, str(error)))
            continue
        if pool is not None and pool.meets(request.demand.targets):
            smallest = pool
        elif pool is not None:
            refusals.append((pool, ""))
    return smallest


def _layouts(request: PoolRequest, quantization: str) -> Iterator[ServingLayout]:
    sizes = [request.tensor] if request.tensor is not None else [2**power for power in range(11) if 2**power <= request.hardware.gpus_per_node]
    for tensor in sizes:
        linear = request.shapes.linear_attention
        heads = [request.shapes.num_attention_heads, *(() if linear is None else (linear.num_key_heads,))]
        is_divided = all(count % tensor == 0 for count in heads) and not (tensor > 1 and request.shapes.qk_norm_all_heads)
        if request.tensor is not None or is_divided:
            yield replace(request.layout, tensor=tensor, quantization=quantization)  # type: ignore[arg-type]


def _fewest(request: PoolRequest, layout: ServingLayout, most_gpus: int | None) -> Pool | None:
    """Returns the fewest engines of ``layout`` that serve the load within the targets, or, if a request that is alone misses them, as many as make it so.
    ``None`` if they have more than ``most_gpus`` GPUs."""
    traffic, targets = request.demand.traffic, request.demand.targets
    most = MOST_INSTANCES if most_gpus is None else most_gpus // layout.tensor
    full = predict_saturated(
        request.shapes, layout, request.hardware, traffic.prompts.mean, traffic.outputs.mean, shared_tokens=traffic.shared_tokens,
        variation=traffic.outputs.variation,
    )  # fmt: skip
    low = math.ceil(traffic.requests_per_s / (MOST_BUSY * full.requests_per_s))
    if low > most:
        if most_gpus is None:
            raise UserError(f"--requests-per-s {traffic.requests_per_s:,.0f} needs {low:,} engines; give the load of one pool (at most {most:,} engines)")
        return None
    alone = pool_of(request, layout, max(low, math.ceil(traffic.requests_per_s / (ALONE * full.requests_per_s))))
    if alone is None or not alone.meets(targets):
        return alone
    pool = pool_of(request, layout, low)
    assert pool is not None
    if pool.meets(targets):
        return pool
    enough, pool = alone.instances, alone
    while enough - low > max(1, low // 100):
        middle = min((low + enough) // 2, 2 * low)
        between = pool_of(request, layout, middle)
        assert between is not None
        if between.meets(targets):
            enough, pool = middle, between
        else:
            low = middle
    return pool if enough <= most else None


def _largest_rate(shapes: ModelShapes, hardware: Hardware, demand: Demand, pool: Pool) -> tuple[float, str]:
    """Returns the largest rate of one engine of ``pool`` within the targets and ``MOST_BUSY``, and what limits it."""
    traffic = demand.traffic
    full = predict_saturated(
        shapes, pool.layout, hardware, traffic.prompts.mean, traffic.outputs.mean, shared_tokens=traffic.shared_tokens, variation=traffic.outputs.variation
    )
    most = MOST_BUSY * full.requests_per_s
    # What is full when requests always wait.
    bound = "max_num_seqs" if full.running >= pool.layout.max_num_seqs else "the KV cache" if full.cache_share > 0.95 else "the token budget of a step"
    busy = f"{bound}: at {full.requests_per_s:,.3g} requests a second it has no room, and its queue no end ({MOST_BUSY:.0%} of that is used)"
    low, high, missed = pool.requests_per_s, most, ""
    for attempt in range(RATE_STEPS):
        rate = high if attempt == 0 else (low + high) / 2
        latency = predict_latency(shapes, pool.layout, hardware, replace(traffic, requests_per_s=rate))
        assert latency is not None
        there = replace(pool, latency=latency)
        late = [target for target in demand.targets if there.value(target) > target.most_s]
        if not late:
            if attempt == 0:
                return most, busy
            low = rate
        else:
            high, missed = rate, f"the target {late[0]}"
    return low, missed


def _best(rule: Answer, pools: dict[str, Pool]) -> Pool:
    """Returns the rule's pool, or a smaller one in a format that loses no more; where the rule has none, the smallest."""
    if rule.name not in pools:
        return min(pools.values(), key=lambda pool: (pool.gpus, FORMATS[pool.layout.quantization].loss))
    loss = FORMATS[rule.name].loss
    return min((pool for name, pool in pools.items() if FORMATS[name].loss <= loss), key=lambda pool: (pool.gpus, FORMATS[pool.layout.quantization].loss))


def _reason(request: PoolRequest, rule: Answer, chosen: Pool, pools: dict[str, Pool]) -> str:
    """Returns why ``chosen`` is the answer, and what another format would take."""
    form = chosen.layout.quantization
    if form == rule.name:
        text = f"{form}: {rule.reason}"
    elif rule.name in pools:
        text = f"{form} beats the rule's {rule.name}: {chosen.gpus:,} GPUs instead of {pools[rule.name].gpus:,}, with no lower published quality"
    else:
        text = f"{form}, since the rule's {rule.name} serves this load in no layout of {request.hardware.name}"
    if request.tensor is None:
        smaller = chosen.layout.tensor > 1
        text += f"; engines of {chosen.layout.tensor} GPUs take the fewest" if smaller else "; engines of one GPU take the fewest"
    fewer = min(pools.values(), key=lambda pool: pool.gpus)
    if fewer.gpus < chosen.gpus:
        other = FORMATS[fewer.layout.quantization]
        text += f"; {other.name} would take {fewer.gpus:,} GPUs instead of {chosen.gpus:,} (quality: {other.quality})"
    return text


def _nothing(request: PoolRequest, refusals: list[tuple[Pool | None, str]]) -> str:
    """Returns the error where no layout serves the load: the one that comes nearest to the targets, or why none fits."""
    near = [pool for pool, _ in refusals if pool is not None]
    if not near:
        return refusals[-1][1]
    targets = request.demand.targets
    best = min(near, key=lambda pool: max(pool.value(target) / target.most_s for target in targets))
    missed = max(targets, key=lambda target: best.value(target) / target.most_s)
    return (
        f"no layout of {request.hardware.name} has {missed}: with {best.layout.quantization} on {best.layout.tensor} GPUs a request alone has "
        f"{1e3 * best.value(missed):,.4g} ms; raise --{missed.figure}, or choose a faster GPU or a smaller model"
    )
