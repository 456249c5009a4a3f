"""Pipeline schedules: the published orders, no deadlock, the published number of micro-batches in flight and bubble; splits of layers by
cost."""

import itertools
from collections import Counter

import pytest

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import parameters
from tandem.layout.pipeline_stages import Span, split_by_cost, stage_costs, stage_spans
from tandem.layout.schedules import (
    Operation,
    PipelineShape,
    bubble_share,
    computes_of,
    max_in_flight_micro_batches,
    published_bubble_share,
    schedule,
    simulate,
)
from tandem.layout.shapes import ModelShapes

SHAPES = [PipelineShape(p, m, v) for p in (1, 2, 3, 4, 6) for m in (0, 1, 2, 3, 5, 8, 12) for v in (1, 2, 3) if p > 1 or v == 1]
EVERY = [(name, shape) for shape in SHAPES for name in (("gpipe", "1f1b") if shape.virtual_stages == 1 else ("interleaved",))]

# Figure 4 of Narayanan et al. (2021b): four devices, eight micro-batches. b: a backward; ': the second chunk of layers.
ONE_FORWARD_ONE_BACKWARD = """
1 2 3 4 1b 5 2b 6 3b 7 4b 8 5b 6b 7b 8b
1 2 3 1b 4 2b 5 3b 6 4b 7 5b 8 6b 7b 8b
1 2 1b 3 2b 4 3b 5 4b 6 5b 7 6b 8 7b 8b
1 1b 2 2b 3 3b 4 4b 5 5b 6 6b 7 7b 8 8b
"""
INTERLEAVED = """
1 2 3 4 1' 2' 3' 4' 5 6 7 1'b 8 2'b 5' 3'b 6' 4'b 7' 1b 8' 2b 3b 4b 5'b 6'b 7'b 8'b 5b 6b 7b 8b
1 2 3 4 1' 2' 3' 4' 5 1'b 6 2'b 7 3'b 8 4'b 5' 1b 6' 2b 7' 3b 8' 4b 5'b 6'b 7'b 8'b 5b 6b 7b 8b
1 2 3 4 1' 2' 3' 1'b 4' 2'b 5 3'b 6 4'b 7 1b 8 2b 5' 3b 6' 4b 7' 5'b 8' 6'b 7'b 8'b 5b 6b 7b 8b
1 2 3 4 1' 1'b 2' 2'b 3' 3'b 4' 4'b 5 1b 6 2b 7 3b 8 4b 5' 5'b 6' 6'b 7' 7'b 8' 8'b 5b 6b 7b 8b
"""
# Figure 3 of the same: GPipe.
GPIPE = "1 2 3 4 5 6 7 8 1b 2b 3b 4b 5b 6b 7b 8b\n" * 4


def written(operations: tuple[Operation, ...], ranks: int) -> str:
    return " ".join(
        f"{o.micro_batch + 1}{chr(39) * (o.stage // ranks)}{'b' * (o.kind == 'backward')}" for o in computes_of(operations)
    )


@pytest.mark.parametrize(("name", "virtual", "figure"), [("gpipe", 1, GPIPE), ("1f1b", 1, ONE_FORWARD_ONE_BACKWARD), ("interleaved", 2, INTERLEAVED)])
def test_the_order_of_operations_is_the_published_one(name: str, virtual: int, figure: str) -> None:
    found = schedule(name, PipelineShape(4, 8, virtual))  # type: ignore[arg-type]
    assert [written(operations, 4) for operations in found] == figure.strip().splitlines()


@pytest.mark.parametrize(("name", "shape"), EVERY)
def test_every_operation_stands_once_on_its_rank_and_behind_what_it_needs(name: str, shape: PipelineShape) -> None:
    lists = schedule(name, shape)  # type: ignore[arg-type]
    wanted: Counter[Operation] = Counter()
    for rank, stage, m in itertools.product(range(shape.ranks), range(shape.stages), range(shape.micro_batches)):
        if shape.rank_of(stage) == rank:
            wanted[Operation("forward", stage, m)] += 1
            wanted[Operation("backward", stage, m)] += 1
            for kind, to in (("send_activation", stage + 1), ("receive_gradient", stage + 1), ("receive_activation", stage - 1), ("send_gradient", stage - 1)):
                if 0 <= to < shape.stages:
                    wanted[Operation(kind, stage, m, shape.rank_of(to))] += 1  # type: ignore[arg-type]
    assert Counter(itertools.chain(*lists)) == wanted
    assert all(shape.rank_of(o.stage) == rank for rank, operations in enumerate(lists) for o in operations)
    for operations in lists:
        at = {o[:3]: place for place, o in enumerate(operations)}
        for kind, stage, m, _ in operations:
            if kind == "forward" and stage > 0:
                assert at["receive_activation", stage, m] < at[kind, stage, m]
            if kind == "backward":
                assert at["forward", stage, m] < at[kind, stage, m]
                assert stage == shape.stages - 1 or at["receive_gradient", stage, m] < at[kind, stage, m]
            if kind.startswith("send"):
                made = "forward" if kind == "send_activation" else "backward"
                assert at[made, stage, m] < at[kind, stage, m]
        # Gradients are therefore summed in the order of the micro-batches.
        for stage in {o.stage for o in operations}:
            assert [o.micro_batch for o in operations if o.kind == "backward" and o.stage == stage] == list(range(shape.micro_batches))


@pytest.mark.parametrize(("name", "shape"), EVERY)
def test_sends_that_wait_for_their_receive_do_not_deadlock(name: str, shape: PipelineShape) -> None:
    """Simulates ranks in which a transfer happens when both ranks have reached it, and nothing after it happens before."""
    lists = [list(operations) for operations in schedule(name, shape)]  # type: ignore[arg-type]
    tags = {(shape.tag(o), o.kind) for operations in lists for o in operations if o.peer >= 0}
    assert len(tags) == sum(o.peer >= 0 for operations in lists for o in operations)
    moved = True
    while moved:
        moved = False
        for rank, operations in enumerate(lists):
            while operations and operations[0].peer < 0:
                operations.pop(0)
                moved = True
            if not operations or not lists[operations[0].peer]:
                continue
            mine, theirs = operations[0], lists[operations[0].peer][0]
            if theirs.peer == rank and shape.tag(theirs) == shape.tag(mine) and {mine.kind[:4], theirs.kind[:4]} == {"send", "rece"}:
                lists[mine.peer].pop(0)
                operations.pop(0)
                moved = True
    assert not any(lists), f"stuck: {[operations[:1] for operations in lists]}"


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.virtual_stages == 1])
def test_the_stash_under_1f1b_is_the_smaller_of_stages_ahead_and_micro_batches_and_all_under_gpipe(shape: PipelineShape) -> None:
    p, m = shape.ranks, shape.micro_batches
    assert [max_in_flight_micro_batches(operations) for operations in schedule("1f1b", shape)] == [min(p - rank, m) for rank in range(p)]
    assert [max_in_flight_micro_batches(operations) for operations in schedule("gpipe", shape)] == [m] * p


@pytest.mark.parametrize("shape", [s for s in SHAPES if s.virtual_stages > 1 and s.micro_batches % s.ranks == 0])
def test_the_stash_under_interleaved_1f1b_is_its_warm_up_and_one(shape: PipelineShape) -> None:
    p, v, work = shape.ranks, shape.virtual_stages, shape.virtual_stages * shape.micro_batches
    assert [max_in_flight_micro_batches(o) for o in schedule("interleaved", shape)] == [min(2 * (p - r - 1) + (v - 1) * p + 1, work) for r in range(p)]


@pytest.mark.parametrize(("name", "shape"), [(n, s) for n, s in EVERY if s.micro_batches and (n != "interleaved" or s.micro_batches % s.ranks == 0)])
def test_the_bubble_of_the_simulation_is_the_published_one(name: str, shape: PipelineShape) -> None:
    found = bubble_share(simulate(shape, schedule(name, shape)))  # type: ignore[arg-type]
    p, m, v = shape.ranks, shape.micro_batches, shape.virtual_stages
    assert found == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    assert published_bubble_share(shape) == pytest.approx(found, abs=1e-12)


def test_the_simulation_waits_for_the_slowest_stage() -> None:
    shape = PipelineShape(2, 3)
    timeline = simulate(shape, schedule("1f1b", shape), [1.0, 3.0], [2.0, 4.0])
    # Worked by hand: rank 0 computes 9 s; rank 1 begins at 1 and computes 21 s; the last backward of rank 0 takes 2 more.
    assert timeline[-1].end == 24.0
    assert bubble_share(timeline) == pytest.approx(1 - 30 / 48)


def test_orders_that_wait_for_each_other_are_said_to() -> None:
    shape = PipelineShape(1, 1)
    with pytest.raises(ValueError, match="rank 0 at backward"):
        simulate(shape, [[Operation("backward", 0, 0), Operation("forward", 0, 0)]])


@pytest.mark.parametrize(
    ("name", "shape"),
    [("1f1b", PipelineShape(2, 4, 2)), ("interleaved", PipelineShape(2, 4)), ("interleaved", PipelineShape(1, 4, 2)), ("gpipe", PipelineShape(0, 4))],
)
def test_a_pipeline_that_cannot_be_is_refused(name: str, shape: PipelineShape) -> None:
    with pytest.raises(ValueError, match=r"virtual|ranks|invalid pipeline"):
        schedule(name, shape)  # type: ignore[arg-type]


def shapes(**changed: object) -> ModelShapes:
    values: dict[str, object] = dict(
        architecture="qwen3", vocab_size=99, hidden_size=32, num_hidden_layers=7, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=64, max_position_embeddings=64, tie_word_embeddings=True, qk_norm=True,
    )  # fmt: skip
    return ModelShapes(**{**values, **changed})  # type: ignore[arg-type]


@pytest.mark.parametrize(("first", "last", "stages"), [(0.0, 0.0, 3), (0.5, 4.0, 3), (3.0, 9.0, 4), (0.0, 100.0, 2), (1.0, 2.5, 7)])
def test_the_split_by_cost_is_the_best_of_all_splits(first: float, last: float, stages: int) -> None:
    layers = (1.0, 1.0, 2.0, 1.0, 3.0, 1.0, 1.0)

    def dearest(counts: tuple[int, ...]) -> tuple[float, float]:
        ends = list(itertools.accumulate(counts))
        costs = [sum(layers[end - n : end]) for end, n in zip(ends, counts, strict=True)]
        costs[0] += first
        costs[-1] += last
        return max(costs), sum(cost * cost for cost in costs)

    every = [counts for counts in itertools.product(range(1, 8), repeat=stages) if sum(counts) == len(layers)]
    assert dearest(split_by_cost(layers, first, last, stages)) == pytest.approx(min(map(dearest, every)))


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    assert [s.stop - s.start for s in stage_spans(shapes(num_hidden_layers=8, vocab_size=100), 2)] == [4, 4]
    light, heavy = stage_spans(shapes(num_hidden_layers=8, vocab_size=2000), 2)
    assert light.stop - light.start > heavy.stop - heavy.start
    assert stage_spans(shapes(), 3, [1, 4, 2]) == (Span(0, 1, 7), Span(1, 5, 7), Span(5, 7, 7))


def test_costs_are_the_multiply_adds_of_the_matrices() -> None:
    dense = shapes()
    layers, embedding, head = stage_costs(dense)
    assert layers[0] == sum(p.numel for p in parameters(dense) if len(p.shape) == 2 and ".layers.0." in p.name) and embedding == 32 and head == 32 * 99
    mixed = shapes(architecture="qwen3_moe", experts=ExpertShapes(8, 2, 16, dense_layers=(0,)))
    costs = stage_costs(mixed)[0]
    assert costs[0] == layers[0]
    assert costs[1] == 32 * (mixed.qkv_size + 64 + 3 * 16 * 2 + 8)


@pytest.mark.parametrize(
    ("stages", "counts", "said"), [(8, (), "has 7 layers, fewer than 8"), (2, (3, 3), "do not split"), (3, (3, 4), "do not split"), (2, (7, 0), "do not split")]
)
def test_a_split_that_cannot_be_is_refused(stages: int, counts: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        stage_spans(shapes(), stages, counts)


@pytest.mark.parametrize("tied", [True, False])
def test_the_stages_hold_every_parameter_once_and_the_last_a_copy_of_a_tied_embedding(tied: bool) -> None:
    found = stage_spans(shapes(tie_word_embeddings=tied), 3)
    for name, _ in parameters(shapes(tie_word_embeddings=tied)):
        holders = [i for i, span in enumerate(found) if span.holds(name, tied)]
        if name == "model.embed_tokens.weight":
            assert holders == ([0, 2] if tied else [0])
        else:
            assert len(holders) == 1
