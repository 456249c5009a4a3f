"""The recommendation matrix and the decision tree of memory, at their edges and against the sums of the literature."""

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.training.predict import predict_step_time
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import ModelShapes
from tandem.planner.layouts import check_training_layout, even_layers
from tandem.planner.memory_rules import branch, communication_bytes, memory_advice
from tandem.planner.plan import make_plan
from tandem.planner.request import PlanRequest
from tandem.planner.rules import MATRIX, advise, expert_ranks, rule_for, tensor_ranks
from tandem.planner.score import Score
from tandem.planner.search import candidates, pareto_front, sweep
from tandem.types.errors import UserError

H100 = load_hardware("H100-80GB")


def llama(hidden: int, layers: int, heads: int, ffn: int, experts: ExpertShapes | None = None) -> ModelShapes:
    return ModelShapes("llama", 128256, hidden, layers, heads, 8, hidden // heads, ffn, 8192, tie_word_embeddings=False, experts=experts)


B1, B8, B70, B405 = llama(2048, 16, 32, 8192), llama(4096, 32, 32, 14336), llama(8192, 80, 64, 28672), llama(16384, 126, 128, 53248)
MIXTURE = llama(4096, 32, 32, 14336, ExpertShapes(8, 2, 14336))


@pytest.mark.parametrize(("parameters", "row"), ((6.99e9, 0), (7e9, 1), (29.9e9, 1), (30e9, 2), (100e9, 3), (500e9, 3), (2e12, 3)))
def test_a_row_has_its_lower_bound(parameters: float, row: int) -> None:
    assert rule_for(parameters) is MATRIX[row]


@pytest.mark.parametrize(
    ("shapes", "gpus", "tensor", "pipelines"),
    ((B1, 8, 1, (1,)), (B8, 32, 8, (1,)), (B70, 256, 8, (2, 4)), (B405, 2048, 8, (8, 16)), (B405, 8192, 8, (8, 16)), (B70, 8, 8, (1,)), (B8, 4, 4, (1,))),
    ids=("1B", "8B", "70B", "405B", "405B-more-GPUs", "70B-fewer-GPUs", "8B-fewer-GPUs"),
)
def test_the_matrix_gives_the_published_layouts(shapes: ModelShapes, gpus: int, tensor: int, pipelines: tuple[int, ...]) -> None:
    request = PlanRequest(shapes, H100, gpus, 4096, 4 * gpus)
    layout = advise(request).layout
    assert layout.parallel.tensor == tensor
    assert layout.parallel.pipeline in pipelines
    assert layout.parallel.world == gpus
    check_training_layout(shapes, layout, gpus)


def test_a_mixture_has_as_many_expert_ranks_as_experts_or_what_divides_both() -> None:
    assert expert_ranks(MIXTURE, 64) == 8
    assert expert_ranks(MIXTURE, 12) == 4
    assert expert_ranks(B8, 64) == 1
    assert advise(PlanRequest(MIXTURE, H100, 512, 4096, 2048)).layout.parallel.expert == 8


def test_tensor_ranks_divide_heads_and_inner_size() -> None:
    assert tensor_ranks(B8, 8) == 8
    assert tensor_ranks(llama(4096, 32, 32, 14336 + 2), 8) == 2


@pytest.mark.parametrize(
    ("ratio", "strategy"),
    ((0.5, "ZeRO 1"), (1.0, "ZeRO 1"), (1.5, "ZeRO 2 and recomputation"), (3.9, "ZeRO 2 and recomputation"), (7, "ZeRO 3"), (11, "ZeRO 3 with offload")),
)
def test_the_decision_tree(ratio: float, strategy: str) -> None:
    assert branch(ratio)[0] == strategy


def test_a_rank_sends_what_rajbhandari_counts() -> None:
    # In one precision of 4 bytes: 2 P without ZeRO and with ZeRO 1 and 2, 3 P with ZeRO 3 (section 7), for many ranks.
    sent = [communication_bytes(1000, 10**9, zero, 4) for zero in (0, 1, 2, 3)]
    assert sent == pytest.approx([8000, 8000, 8000, 12000])


def test_strategies_are_computed_for_the_model() -> None:
    advice = memory_advice(PlanRequest(B8, H100, 8, 4096, 32))
    by_name = {each.name: each for each in advice.strategies}
    alone, count = by_name["data parallelism alone"], 8_030_261_248
    # ZeRO 1 on 8 ranks saves 7/8 of 12 bytes a parameter.
    assert alone.memory_bytes - by_name["ZeRO 1"].memory_bytes == pytest.approx(12 * count * 7 / 8, rel=0.01)
    assert by_name["recomputation"].compute_overhead == pytest.approx(1 / 3, abs=0.05)
    assert by_name["ZeRO 3 with offload to NVMe"].step_seconds > by_name["ZeRO 3 with offload to the host"].step_seconds
    assert advice.fastest is not None


def test_every_candidate_is_a_layout_that_exists() -> None:
    for shapes, gpus in ((B8, 64), (MIXTURE, 64), (B405, 1024)):
        layouts = list(candidates(PlanRequest(shapes, H100, gpus, 8192, 2 * gpus)))
        assert len(layouts) == len(set(layouts)) > 10
        for layout in layouts:
            check_training_layout(shapes, layout, gpus)


def test_no_score_beats_one_on_the_front_and_the_front_beats_all_others() -> None:
    found = sweep(PlanRequest(B8, H100, 16, 4096, 64))
    front = list(pareto_front(found.scored))

    def beats(a: Score, b: Score) -> bool:
        better = (a.step_seconds, a.memory.total), (b.step_seconds, b.memory.total)
        return all(x <= y for x, y in zip(*better, strict=True)) and better[0] != better[1]

    assert not any(beats(each, on_front) for each in found.scored for on_front in front)
    on_it = {each.layout for each in front}
    assert all(any(beats(on_front, each) for on_front in front) for each in found.scored if each.layout not in on_it)


def test_a_plan_says_when_the_rule_is_beaten_and_takes_what_beats_it() -> None:
    plan = make_plan(PlanRequest(B8, H100, 8, 4096, 64))
    assert plan.sweep.best is not None
    assert plan.chosen.fits
    if plan.chosen is not plan.rule:
        assert plan.chosen.step_seconds < plan.rule.step_seconds
        assert "beats the rule by" in plan.verdict or "does not fit" in plan.verdict


def test_what_cannot_fit_names_the_smallest_change() -> None:
    with pytest.raises(UserError, match=r"no layout of 8 x H100-80GB fits: .* needs .* GiB of 79.6 GiB on a GPU; \d+ GPUs fit"):
        make_plan(PlanRequest(B405, H100, 8, 4096, 32))


def test_layers_are_spread_evenly() -> None:
    for layers, stages in ((80, 8), (126, 16), (105, 35), (7, 7), (9, 4), (3, 2), (11, 4)):
        counts = even_layers(layers, stages)
        assert sum(counts) == layers
        assert max(counts) - min(counts) <= 1
    assert even_layers(126, 16)[0] == even_layers(126, 16)[-1] == 7


def test_a_mesh_that_is_not_the_gpus_is_refused() -> None:
    from tandem.estimate.training.layout import TrainingLayout

    with pytest.raises(UserError, match=r"--tp 2 x --pp 1 x --cp 1 x --dp 2 are 4 GPUs, and --gpus is 8; change one of them \(--dp 4 fits\)"):
        check_training_layout(B8, TrainingLayout(ParallelConfig(data=2, tensor=2), 4096, 8), 8)


def test_the_step_of_an_offloaded_strategy_has_its_transfers_once() -> None:
    request = PlanRequest(B8, H100, 16, 4096, 64)
    for strategy in memory_advice(request).strategies:
        assert strategy.step_seconds == predict_step_time(B8, strategy.layout, request.hardware).seconds
        assert (strategy.offload_seconds > 0) == (strategy.layout.offload != "none")
        assert strategy.offload_seconds < strategy.step_seconds
