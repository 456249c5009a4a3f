"""The time of a training step on GPUs against published measurements, the simulation of the real schedules and closed forms."""

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import planner_errors

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.training.attention import Kernel, attention_seconds
from tandem.estimate.training.collectives import all_to_all_seconds, gather_seconds
from tandem.estimate.training.efficiency import FITTED
from tandem.estimate.training.host import START_S
from tandem.estimate.training.layer_time import LayerTimes
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.pipeline import bubble_seconds
from tandem.estimate.training.predict import predict_step_time
from tandem.estimate.training.products import chance_tiles, product_seconds
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.schedules import PipelineShape, published_bubble_share, schedule, simulate
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError

H100, A100 = load_hardware("H100-80GB"), load_hardware("A100-80GB")
GPT = ModelShapes("gpt", 51200, 4096, 32, 32, 32, 128, 16384, 2048, tie_word_embeddings=False, gated_mlp=False)
ONE = TrainingLayout(ParallelConfig(data=8), 2048, 64, 2)


def seconds_of(shapes: ModelShapes, layout: TrainingLayout, **parallel: object) -> float:
    return predict_step_time(shapes, replace(layout, parallel=replace(layout.parallel, **parallel)), H100).seconds  # type: ignore[arg-type]


def test_published_steps_are_predicted_within_six_percent_on_average_and_fifteen_at_worst() -> None:
    errors = [abs(row.predicted(FITTED) / row.seconds - 1) for row in planner_errors.read(planner_errors.FOLDER / "planner-measured.csv")]
    assert len(errors) == 26 and fmean(errors) < 0.06 and max(errors) < 0.15


@pytest.mark.full
def test_steps_that_nothing_was_fitted_on_are_predicted_better_than_by_a_constant_utilisation() -> None:
    rows = planner_errors.read(planner_errors.FOLDER / "planner-measured.csv")
    held = [row for name in planner_errors.HELD_OUT for row in planner_errors.read(planner_errors.FOLDER / name)]
    tested = [abs(error) for error in planner_errors.folds(rows, planner_errors.by_fit)]
    assert fmean(tested) < 0.06 and max(tested) < 0.15
    constant = planner_errors.utilisation(rows)
    for day, most in {"2026-11-26": 0.065, "2026-11-27": 0.15, "2026-11-27 later": 0.15, "2026-11-27 second": 0.12}.items():
        added = [row for row in held if row.collected == day]
        ours = fmean(abs(row.predicted(FITTED) / row.seconds - 1) for row in added)
        assert ours < most and ours < 0.6 * fmean(abs(row.baseline(constant) / row.seconds - 1) for row in added)
    strangers = [row.first_s / row.seconds - 1 for row in held if row.collected == "2026-11-27 second"]
    assert len(strangers) == 60 and fmean(map(abs, strangers)) == pytest.approx(0.104, abs=0.001), "predicted before anything was changed"


@pytest.mark.parametrize(("ranks", "virtual", "micro_batches"), [(2, 1, 2), (4, 1, 8), (8, 1, 8), (4, 1, 2), (2, 2, 4), (4, 2, 8), (4, 3, 12), (8, 4, 16)])
def test_the_bubble_is_that_of_the_simulated_schedule_and_of_the_published_formula(ranks: int, virtual: int, micro_batches: int) -> None:
    shape = PipelineShape(ranks, micro_batches, virtual)
    orders = schedule("interleaved" if virtual > 1 else "1f1b", shape)
    span = max(compute.end for compute in simulate(shape, orders))
    work = 3.0 * virtual * micro_batches
    bubble = bubble_seconds([3.0 * virtual] * ranks, 0, virtual)
    assert span == pytest.approx(work + bubble)
    assert bubble / work == pytest.approx((ranks - 1) / (virtual * micro_batches))
    assert bubble / (work + bubble) == pytest.approx(published_bubble_share(shape))


@pytest.mark.parametrize(("slowest", "above"), [(0, 1.06), (3, 1.0)])
def test_the_bubble_of_ranks_of_unequal_cost_is_that_of_the_simulation_or_a_little_more(slowest: int, above: float) -> None:
    # The last rank, which has the head, is the slowest of a pipeline that is split evenly; the first can do a part of its work while it would wait.
    forward = [1.0, 1.0, 1.0, 1.0]
    forward[slowest] = 1.5
    shape = PipelineShape(4, 16)
    span = max(compute.end for compute in simulate(shape, schedule("1f1b", shape), forward, [2 * each for each in forward]))
    rank_seconds = [3 * each for each in forward]
    assert span <= 16 * rank_seconds[slowest] + bubble_seconds(rank_seconds, slowest, 1) <= above * span * (1 + 1e-9)


def test_a_step_of_a_pipeline_has_the_bubble_of_its_layout() -> None:
    layout = replace(ONE, parallel=ParallelConfig(pipeline=4, data=2), global_batch=64, micro_batch=1)
    time = predict_step_time(replace(GPT, vocab_size=64), layout, H100)
    busy = time.seconds - time.bubble - time.optimizer - time.data_communication
    # The tiny head makes the last rank a little slower than the others.
    assert time.bubble / busy == pytest.approx(3 / 32, rel=0.02)
    with pytest.raises(UserError, match="fewer than 64 pipeline stages"):
        predict_step_time(GPT, replace(layout, parallel=ParallelConfig(pipeline=64)), H100)


def test_a_product_takes_whole_tiles_and_waves_and_never_beats_the_measured_peak() -> None:
    def seconds(rows: int, columns: int, inner: int) -> float:
        return product_seconds(H100, "bf16", rows, columns, inner, FITTED)

    assert seconds(8192, 8192, 8192 - 63) < seconds(8192, 8192, 8192) == pytest.approx(seconds(8192 - 63, 8192 - 63, 8192), rel=0.02)
    for size in (64, 512, 2048, 8192, 16384):
        assert 2 * size**3 / seconds(size, size, size) < H100.product_rate("bf16")
    assert 2 * 512**3 / seconds(512, 512, 512) < 0.5 * 2 * 8192**3 / seconds(8192, 8192, 8192)
    # A product with few rows takes the time of reading its matrix.
    assert seconds(1, 16384, 16384) == pytest.approx(2 * 16384**2 / (3.35e12 * FITTED.memory), rel=0.02)
    assert product_seconds(H100, "fp8", 8192, 8192, 8192, FITTED) < 0.65 * seconds(8192, 8192, 8192)


def test_attention_costs_two_products_forward_five_backward_and_a_window_less() -> None:
    def seconds(sequence: int, window: int | None, kernel: Kernel = "fused") -> tuple[float, float]:
        return attention_seconds(H100, "bf16", 1, sequence, sequence, window, 32, 128, kernel, FITTED)

    forward, backward = seconds(8192, None)
    assert backward / forward == pytest.approx(2.5 * 539 / 467, rel=0.02)
    assert seconds(16384, None)[0] == pytest.approx(4 * forward, rel=0.03)
    # The window leaves 1 - (7/8)^2 of the triangle, and the diagonal as long.
    assert seconds(8192, 1024)[0] == pytest.approx(forward * (4096 * (1 - (7 / 8) ** 2) + 150) / (4096 + 150), rel=0.01)
    assert seconds(2048, None, "unfused")[0] > seconds(2048, None, "flash1")[0] > seconds(2048, None, "flash2")[0] > seconds(2048, None)[0]


@pytest.mark.parametrize(("kernel", "published"), [("fused", (315, 410, 484, 518, 529, 539)), ("flash2", (191, 260, 298, 319, 333, 335))])
def test_attention_reaches_the_rates_that_were_published_at_each_length(kernel: Kernel, published: tuple[int, ...]) -> None:
    # Shah et al. (2024), figure 5e: forward, causal, heads of 128, 16,384 tokens in all, from 512 to 16,384 in a sequence.
    alone = replace(FITTED, products=1.0, kernel_s=0.0)
    for power, rate in enumerate(published):
        sequence = 512 << power
        seconds = attention_seconds(H100, "bf16", 16384 // sequence, sequence, sequence, None, 16, 128, kernel, alone).forward
        assert 2 * 16384 * sequence * 2048 / seconds / 1e12 == pytest.approx(rate, rel=0.13)


def test_what_hides_tensor_communication_is_left_out() -> None:
    # Micro-batches of 8,192 tokens, whose products take longer than the communication beside them.
    wide = replace(GPT, hidden_size=8192, num_attention_heads=64, num_key_value_heads=64, intermediate_size=32768)
    layout = TrainingLayout(ParallelConfig(tensor=8), 8192, 1)
    none, backward, both = (predict_step_time(wide, replace(layout, tensor_overlap=each), H100).tensor_communication for each in ("none", "backward", "all"))  # type: ignore[arg-type]
    one = gather_seconds(H100, 8, 1, 2 * 8192 * 8192, FITTED)
    assert none == pytest.approx(32 * 10 * one)
    assert backward == pytest.approx(32 * (4 + 2 + 4 * FITTED.contention) * one)
    assert both == pytest.approx(32 * 10 * (1 / 8 + 7 / 8 * FITTED.contention) * one)


def test_a_ring_takes_a_latency_for_every_rank() -> None:
    def latency(size: int, stride: int) -> float:
        return gather_seconds(H100, size, stride, 1.0, FITTED)

    # NCCL's figures of LL128: 10 us, 1.9 us over NVLink, 4 us over the network.
    assert latency(8, 1) == pytest.approx(10e-6 + 7 * 1.9e-6, rel=0.01)
    assert latency(512, 1) == pytest.approx(10e-6 + 448 * 1.9e-6 + 63 * 4e-6, rel=0.01)
    assert latency(64, 8) == pytest.approx(10e-6 + 63 * 4e-6, rel=0.01)


def test_collectives_follow_the_topology() -> None:
    within, beyond, one_card = (gather_seconds(H100, size, stride, 1e9, FITTED) for size, stride in ((8, 1), (64, 1), (8, 8)))
    # 370 of NVLink's 450 GB/s carry data.
    assert within == pytest.approx(1e9 * 7 / 8 / 370e9, rel=0.02)
    # Eight GPUs of a node use their eight cards together; ranks that are a node apart have one each.
    assert beyond == pytest.approx(1e9 * 63 / 64 / min(370e9, 400e9 * FITTED.links), rel=0.12)
    assert one_card == pytest.approx(1e9 * 7 / 8 / (50e9 * FITTED.links), rel=0.01)
    assert all_to_all_seconds(H100, 64, 1, 1e8, FITTED) > 5 * all_to_all_seconds(H100, 8, 1, 1e8, FITTED)
    assert gather_seconds(H100, 1, 1, 1e9, FITTED) == 0


def test_each_stage_of_zero_moves_what_its_paper_counts() -> None:
    quiet = replace(FITTED, contention=1.0)  # All communication counts, hidden or not.
    comm = [predict_step_time(GPT, replace(ONE, parallel=replace(ONE.parallel, zero=stage)), H100, quiet).data_communication for stage in (0, 1, 2, 3)]  # type: ignore[arg-type]
    held, passes, rate = 6.86e9 * 7 / 8, ONE.micro_batches, 370e9
    # A reduce-scatter and an all-gather of each bucket of 40 million parameters.
    started = 2 * round(6.86e9 / 40e6) * (8.4e-6 + 7 * 3.4e-6)
    assert comm[0] == pytest.approx(held * 8 / rate + started, rel=0.03) and comm[1] == pytest.approx(held * 6 / rate + started, rel=0.03)
    copied = 6.86e9 * (2 * 4 + 6) / (3.35e12 * FITTED.memory)
    assert comm[2] == pytest.approx(held * (4 * passes + 2) / rate + started / 2 * (passes + 1), rel=0.03)
    assert comm[3] == pytest.approx((held * 8 / rate + copied) * passes, rel=0.03)
    whole = replace(ONE, parallel=replace(ONE.parallel, zero=3), reshard_after_forward=False)
    # In 32 layers instead of buckets of 40 million parameters.
    assert predict_step_time(GPT, whole, H100, quiet).data_communication == pytest.approx(comm[1], rel=0.1)


def test_recomputation_costs_a_forward_pass_and_selective_only_what_it_drops() -> None:
    def recomputed(**changes: object) -> tuple[float, float]:
        time = predict_step_time(GPT, replace(ONE, **changes), A100)  # type: ignore[arg-type]
        return time.recomputed, time.seconds

    assert recomputed()[0] == 0 and recomputed(recompute="selective", precision="bf16")[0] == 0
    full, seconds = recomputed(recompute="full")
    assert 0.2 < full / seconds < 0.26
    assert 0 < recomputed(recompute="selective", precision="fp16")[0] < 0.5 * recomputed(recompute="full", precision="fp16")[0]


def test_experts_cost_what_their_tokens_visit_and_the_exchange_between_ranks() -> None:
    moe = replace(GPT, gated_mlp=True, experts=ExpertShapes(8, 2, 4096))
    assert seconds_of(moe, ONE) < seconds_of(replace(GPT, gated_mlp=True), ONE)
    local, spread = (predict_step_time(moe, replace(ONE, parallel=replace(ONE.parallel, expert=size)), H100) for size in (1, 8))
    assert local.expert_communication == 0 < spread.expert_communication
    rows = 2 * 2048 * 2
    each = 2 * all_to_all_seconds(H100, 8, 1, 2 * rows * 4096, FITTED)
    assert spread.expert_communication == pytest.approx(2 * 32 * each * ONE.micro_batches)


def test_context_parallel_ranks_divide_the_work_and_show_the_communication_that_attention_does_not_hide() -> None:
    long = replace(GPT, num_key_value_heads=8, max_position_embeddings=131072)
    layout = TrainingLayout(ParallelConfig(data=8), 65536, 8, 1)
    whole = predict_step_time(long, layout, H100)
    divided = predict_step_time(long, replace(layout, parallel=ParallelConfig(data=1, context=8)), H100)
    assert divided.context_communication == 0  # Attention over 65,536 tokens is longer than the transfer of their keys and values.
    assert divided.attention == pytest.approx(whole.attention, rel=0.02) and divided.products == pytest.approx(whole.products, rel=0.05)
    short = TrainingLayout(ParallelConfig(context=16), 1024, 1, 1)
    assert predict_step_time(long, short, H100).context_communication > 0


def test_context_ranks_send_the_inputs_of_linear_attention_to_its_heads_and_their_outputs_back_in_fp32() -> None:
    linear, quiet = LinearAttention((0,), 16, 32, 128, 64, 4), replace(FITTED, latency_s=0.0)
    layout = replace(ONE, parallel=ParallelConfig(context=4))
    forward = LayerTimes(GPT, layout, H100, quiet).layer(None, None, linear).forward
    tokens, sent = layout.micro_batch * layout.sequence // 4, 2 * 16 * 128 + 32 * 64 + 2 * 32 + 32 * 64
    assert forward.context == pytest.approx(all_to_all_seconds(H100, 4, 1, 4.0 * tokens * sent, quiet))


def test_offloading_the_optimizer_takes_the_time_of_its_transfers() -> None:
    seconds = [predict_step_time(GPT, replace(ONE, offload=where), H100).optimizer for where in ("none", "cpu", "nvme")]  # type: ignore[arg-type]
    assert seconds == sorted(seconds) and seconds[1] > 4 * 6.8e9 / 55e9 and seconds[2] > 24 * 6.8e9 / 0.8e9


def test_the_parts_of_a_step_add_up_and_more_gpus_of_a_group_take_less_time_each() -> None:
    time = predict_step_time(GPT, ONE, H100)
    assert time.seconds == pytest.approx(sum(getattr(time, name) for name in time.__slots__)) and all(getattr(time, n) >= 0 for n in time.__slots__)
    assert seconds_of(GPT, ONE, tensor=2) > seconds_of(GPT, ONE) / 2
    head = LayerTimes(GPT, ONE, H100, FITTED).head()
    assert head.forward.products == pytest.approx(product_seconds(H100, "bf16", 4096, 51200, 4096, FITTED)) and math.isclose(head.recomputed.total, 0)


def test_prediction_starts_without_torch() -> None:
    code = "import sys, tandem.estimate.training.predict, tandem.estimate.training.predict_run, tandem.estimate.hardware.load; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == "False"


MIXTURE = ModelShapes("mixture", 1024, 4096, 8, 32, 32, 128, 512, 8192, tie_word_embeddings=False, experts=ExpertShapes(64, 2, 32))


def test_a_small_model_takes_the_time_in_which_the_host_starts_its_kernels() -> None:
    # 8 layers with 4 products, attention and 8 elementwise kernels, and twice as many backward.
    small = replace(GPT, hidden_size=256, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=8, intermediate_size=1024, vocab_size=512)
    layout = TrainingLayout(ParallelConfig(), 128, 4)
    time, graphs = (predict_step_time(small, replace(layout, cuda_graphs=each), H100) for each in (False, True))
    assert graphs.host == 0 < time.host
    assert time.seconds - time.optimizer - time.data_communication == pytest.approx(4 * 8 * 3 * 13 * START_S)
    assert predict_step_time(GPT, ONE, H100).host == 0


def test_the_host_delays_experts_whose_sizes_it_awaits_and_less_those_it_knows_or_that_are_one_kernel() -> None:
    layout = TrainingLayout(ParallelConfig(data=8, expert=8), 8192, 64)
    each, padded, grouped = (predict_step_time(MIXTURE, replace(layout, experts_as=kind), H100) for kind in ("each", "padded", "grouped"))  # type: ignore[arg-type]
    # The number of a layer's tokens is awaited in each of 8 layers and micro-batches, and nothing is queued behind it.
    assert each.seconds > padded.seconds and each.host > grouped.host == pytest.approx(8 * 8 * START_S) and padded.host == 0
    # Of 8 local experts, 16 kernels forward and 32 backward, less the time in which the GPU computes them.
    assert each.host - grouped.host < 8 * 8 * 48 * START_S


def test_experts_that_get_their_tokens_by_chance_need_the_tiles_and_wait_for_the_rank_that_draws_say() -> None:
    generator = random.Random(0)

    def drawn(mean: float) -> int:
        return max(0, round(generator.gauss(mean, mean**0.5)))

    for mean in (90, 250, 1024, 2000):
        tiles = fmean(-(-drawn(mean) // 256) for _ in range(20_000))
        assert chance_tiles(mean, 256) == pytest.approx(tiles, rel=0.01)
    assert product_seconds(H100, "bf16", 512, 2048, 2048, FITTED, 16, is_chance=True) > product_seconds(H100, "bf16", 512, 2048, 2048, FITTED, 16)
    hottest = fmean(max(drawn(32768) for _ in range(16)) for _ in range(500))
    times = LayerTimes(replace(MIXTURE, experts=ExpertShapes(64, 8, 32)), TrainingLayout(ParallelConfig(data=16, expert=16), 4096, 64), H100, FITTED)
    assert times._expert_rows(times.shapes.experts) == pytest.approx(hottest, rel=0.005)  # type: ignore[arg-type]


def test_an_imbalance_slows_experts_and_their_exchange_and_an_overlap_hides_the_exchange_but_for_what_it_costs() -> None:
    layout = TrainingLayout(ParallelConfig(data=16, expert=16), 8192, 64)
    even, uneven, hidden = (
        predict_step_time(MIXTURE, each, H100) for each in (layout, replace(layout, expert_imbalance=1.5), replace(layout, overlaps_experts=True))
    )
    assert uneven.expert_communication == pytest.approx(1.5 * even.expert_communication, rel=0.02) and uneven.products > even.products
    assert hidden.expert_communication == pytest.approx(FITTED.contention * even.expert_communication, rel=0.001)


def test_pytorch_copies_what_tensor_parallel_ranks_gather_and_scatter_and_gathers_in_eight_bits() -> None:
    layout = TrainingLayout(ParallelConfig(data=2, tensor=4, zero=3), 4096, 8, 4)
    times = [LayerTimes(GPT, replace(layout, precision=each), H100, FITTED)._tensor_seconds(0.0, None) for each in ("bf16", "fp8")]  # type: ignore[arg-type]
    moved = 2.0 * 4 * 4096 * 4096
    # Over the link and, read and written, over the memory.
    one = gather_seconds(H100, 4, 1, moved, FITTED) + 2 * moved / (3.35e12 * FITTED.memory)
    assert times[0] == pytest.approx((4 * one, 4 * one)) and times[1] == pytest.approx((3 * one, 4 * one), rel=0.02)


def test_inputs_of_products_in_eight_bits_are_cast_before_ranks_gather_them_and_sums_are_not() -> None:
    layout = TrainingLayout(ParallelConfig(tensor=8, data=1), 4096, 8, 1, tensor_overlap="none")
    cast = replace(layout, precision="fp8")
    own = replace(cast, trainer=TrainerConfig(learning_rate=1e-4))
    times = [LayerTimes(GPT, each, H100, FITTED)._tensor_seconds(0.0, None) for each in (layout, cast, own)]
    sums, inputs = (gather_seconds(H100, 8, 1, size * 4096.0 * 4096, FITTED) for size in (2, 1))
    assert times[0] == times[2] == pytest.approx((4 * sums, 6 * sums)), "Tandem's trainer gathers 16 bits"
    assert times[1] == pytest.approx((2 * inputs + 2 * sums, 4 * inputs + 2 * sums))
    whole = replace(cast, parallel=replace(cast.parallel, sequence_parallel=False))
    assert LayerTimes(GPT, whole, H100, FITTED)._tensor_seconds(0.0, None) == pytest.approx((4 * sums, 4 * sums)), "an all-reduce adds up 16 bits"


def test_operands_scaled_by_their_own_largest_value_are_read_once_more_and_their_casts_are_more_kernels() -> None:
    layout = TrainingLayout(ParallelConfig(data=8), 2048, 64, 2, "fp8")
    delayed, current = (predict_step_time(GPT, replace(layout, fp8_scaling=each), H100).memory_bound for each in ("delayed", "current"))  # type: ignore[arg-type]
    operands = 2 * 2048 * (3 * 4096 + 16384)
    kernels = 3 * 4 * FITTED.kernel_s
    assert current - delayed == pytest.approx(4 * 32 * 2 * (2 * operands / (3.35e12 * FITTED.memory) + kernels), rel=0.01)


def test_ranks_that_divide_experts_gather_what_each_of_them_got_and_ranks_with_whole_experts_send_their_tokens_alone() -> None:
    mixed = replace(GPT, experts=ExpertShapes(16, 4, 2048))
    divided = TrainingLayout(ParallelConfig(data=8, tensor=4, expert=2, zero=1), 4096, 8, tensor_overlap="none")
    whole = replace(divided, whole_experts=True)
    dense, shared, own = (LayerTimes(s, e, H100, FITTED).layer(None, s.experts) for s, e in ((GPT, divided), (mixed, divided), (mixed, whole)))
    # Attention gathers its input, scatters its output and does the same backward, once more for its weights; the MLP as often, for each copy of a token.
    one = gather_seconds(H100, 4, 1, 2.0 * 4096 * 4096, FITTED)
    assert (dense.forward.tensor, dense.backward.tensor) == pytest.approx((4 * one, 6 * one))
    assert (own.forward.tensor, own.backward.tensor) == pytest.approx((2 * one, 3 * one))
    copies = gather_seconds(H100, 4, 1, 4 * 2.0 * 4096 * 4096, FITTED)
    assert (shared.forward.tensor, shared.backward.tensor) == pytest.approx((2 * one + 2 * copies, 3 * one + 2 * copies))
    # The same copies of a quarter of the tokens leave a rank, now to eight ranks of a node.
    sent = 4 * 2.0 * 1024 * 4096 * 7 / 8 / (H100.link_bandwidth * 370 / 450)
    assert own.forward.expert == pytest.approx(2 * (sent + 3 * FITTED.latency_s))
    assert whole.expert_ranks == 8 and own.forward.products == pytest.approx(shared.forward.products, rel=0.03), "as many operations"


def test_a_pair_of_gpus_without_a_switch_has_its_own_links_alone() -> None:
    meshed = replace(H100, gpus_per_node=4, is_meshed=True)
    moved, started = 1e9, gather_seconds(H100, 2, 1, 1.0, FITTED)
    two, four = (gather_seconds(meshed, size, 1, moved, FITTED) - gather_seconds(meshed, size, 1, 1.0, FITTED) for size in (2, 4))
    switched = [gather_seconds(H100, size, 1, moved, FITTED) - gather_seconds(H100, size, 1, 1.0, FITTED) for size in (2, 4)]
    assert two == pytest.approx(3 * switched[0], rel=0.01) and four == pytest.approx(switched[1], rel=0.01) and started > 0
    # A node's four cards are as fast as before, and so is one of them.
    assert gather_seconds(meshed, 8, 1, moved, FITTED) == pytest.approx(gather_seconds(replace(H100, gpus_per_node=4), 8, 1, moved, FITTED))


def test_tokens_that_travel_once_are_those_that_a_random_choice_sends_to_a_node_or_gpu() -> None:
    generator, copies, moved = random.Random(0), 8, 1e9
    apart = replace(H100, link_bandwidth=1e15)
    drawn = [[generator.randrange(64) for _ in range(copies)] for _ in range(4000)]
    # 64 GPUs in 8 nodes; the sender is GPU 0 of node 0.
    other_nodes = fmean(len({gpu // 8 for gpu in chosen} - {0}) for chosen in drawn)
    once = all_to_all_seconds(apart, 64, 1, moved, FITTED, copies, once=True)
    assert once == pytest.approx(moved * other_nodes / (5e10 * FITTED.links), rel=0.02)
    assert all_to_all_seconds(apart, 64, 1, moved, FITTED, copies) == pytest.approx(moved * copies * 56 / 64 / (5e10 * FITTED.links), rel=0.01)
    assert all_to_all_seconds(H100, 8, 1, moved, FITTED, 1, once=True) <= all_to_all_seconds(H100, 8, 1, moved, FITTED, 1) * 1.01


def test_gradients_in_16_bits_or_summed_once_a_step_take_less_of_the_network() -> None:
    slow = replace(H100, network_bandwidth=1e9)
    layout = TrainingLayout(ParallelConfig(data=64, zero=3), 2048, 256)
    halved, once = replace(layout, reduce_precision="bf16"), replace(layout, reduces_each_pass=False)
    whole, in_half, at_end = (predict_step_time(GPT, each, slow).data_communication for each in (layout, halved, once))
    # Of 2 + 2 bytes gathered and 4 summed in each of 4 micro-batches, 2 are saved, or the 4 of three micro-batches.
    assert in_half / whole == pytest.approx(6 / 8, rel=0.05) and at_end / whole == pytest.approx(20 / 32, rel=0.05)
