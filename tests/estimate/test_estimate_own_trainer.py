"""The predicted memory of a rank of Tandem's own trainer, on a CPU and on a GPU, against a calculation by hand."""

from dataclasses import replace

import pytest

from tandem.config.lora import LoraConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.memory import host_bytes_beside_gpu
from tandem.estimate.processes import (
    CONTROLLER_BYTES,
    FORK_SERVER_BYTES,
    FORKED_RANK_BYTES,
    SHARED_BYTES,
    TRAINING_PROCESS_BYTES,
    data_run_bytes,
)
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.linear_attention import scratch_in_chunks
from tandem.estimate.training.own_trainer import working_by_layer
from tandem.estimate.training.rank_memory import RankMemory, machine_bytes, memory_by_stage, predict_rank_memory
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes

LLAMA = ModelShapes("llama", 100, 32, 3, 4, 2, 8, 48, 64, tie_word_embeddings=False)
LAYER = 32 * (32 + 2 * 16) + 32 * 32 + 3 * 32 * 48 + 2 * 32
ENDS = 100 * 32 + 32 + 100 * 32
COUNT = parameter_count(LLAMA)


def memory(trainer: TrainerConfig = TrainerConfig(), parallel: ParallelConfig = ParallelConfig(), *, on_cpu: bool = True) -> RankMemory:  # noqa: B008
    return predict_rank_memory(LLAMA, layout_of_trainer(trainer, parallel, 50, on_cpu=on_cpu))


def test_a_rank_on_a_cpu_has_its_process_its_states_what_it_saves_what_ranks_exchange_and_the_copy_of_a_checkpoint() -> None:
    assert COUNT == 3 * LAYER + ENDS
    # The residual stream twice, two normed inputs, q|k|v before and after rotation, attention's output and log-sum-exp, gate|up and their product.
    layer = 4 * (4 * 32 + 2 * 64 + 32 + 4 + 3 * 48)
    # Sums under way: of two layers and of the embedding or the head, each as it is sent and as it arrives; and whole layers under ZeRO 3.
    exchanged = {0: (4 * LAYER + 6400, 0), 1: (4 * LAYER + 6400, 0), 2: (5 * LAYER + 9600, 0), 3: (5 * LAYER + 9600, 2 * LAYER + ENDS)}
    of_weights_and_moments = {0: 4, 1: 3, 2: 2.5, 3: 2}
    for zero, (reduced, gathered) in exchanged.items():
        predicted = memory(parallel=ParallelConfig(data=2, zero=zero))  # type: ignore[arg-type]
        assert predicted.parameters + predicted.gradients + predicted.optimizer == 4 * of_weights_and_moments[zero] * COUNT
        assert (predicted.communication, predicted.gathered) == (4 * reduced, 4 * gathered)
        assert predicted.activations == 50 * (3 * layer + 4 * 2 * 32) and predicted.logits == 2 * 4 * 50 * 100
        # Weights and two moments are staged, by two ranks half each; a tenth of what is freed is kept.
        assert predicted.staged == 6 * COUNT and predicted.context == FORKED_RANK_BYTES
        assert predicted.fragmentation == pytest.approx(0.1 * (predicted.allocated - predicted.staged - predicted.fragmentation), abs=2)


def test_one_process_exchanges_nothing_and_beside_offloaded_moments_the_copy_is_in_a_file() -> None:
    for config, staged in ((TrainerConfig(), 12 * COUNT), (TrainerConfig(offload="nvme"), 0)):
        predicted = memory(config)
        assert (predicted.communication, predicted.gathered, predicted.staged) == (0, 0, staged)


def test_a_rank_on_a_gpu_has_fp32_weights_beside_rounded_ones() -> None:
    bf16 = TrainerConfig(precision="bf16")
    predicted = memory(bf16, on_cpu=False)
    # In 16 bits: two normed inputs, q|k|v, attention's output, gate|up and their product; the residual stream twice in fp32.
    layer = 2 * (2 * 32 + 64 + 32 + 3 * 48) + 8 * 32 + 4 * 4
    assert predicted.activations == 50 * (6 * 32 + 3 * layer) and predicted.logits == 50 * 100 * 4 and predicted.staged == 0
    assert (predicted.parameters, predicted.master_weights, predicted.gradients, predicted.optimizer) == (2 * COUNT, 4 * COUNT, 4 * COUNT, 8 * COUNT)
    offloaded = memory(replace(bf16, offload="cpu"), on_cpu=False)
    assert predicted.optimizer - offloaded.optimizer == 8 * COUNT - 6 * (16 << 20)
    assert host_bytes_beside_gpu(LLAMA, replace(bf16, offload="cpu")) == 12 * COUNT + 8 * COUNT
    assert predicted.optimizer - memory(bf16, ParallelConfig(data=2, zero=1), on_cpu=False).optimizer == 4 * COUNT
    shapes = replace(LLAMA, lora=LoraConfig(rank=4, target_modules=("q_proj",)))
    adapted = predict_rank_memory(shapes, layout_of_trainer(bf16, ParallelConfig(), 50, on_cpu=False))
    assert adapted.gradients == 4 * 3 * 4 * (32 + 32), "only the adapter has gradients"


def test_a_rank_on_a_gpu_has_the_scratch_of_one_layer_with_linear_attention_at_a_time() -> None:
    # Of Qwen3-Next's layers: 64 KiB of a token are the states of a chunk and their gradients.
    linear = LinearAttention((0, 1), 16, 32, 128, 128, 4)
    heads, size, chunk = 32, 128, 64
    scratch = 4 * heads * (2 * size * size // chunk + chunk + 6 * size + 2)
    assert scratch_in_chunks(linear) == scratch and 4 * heads * 2 * size * size // chunk == 64 << 10
    shapes = replace(LLAMA, linear_attention=linear)
    of_gpu = lambda ranks: layout_of_trainer(TrainerConfig(), ParallelConfig(tensor=ranks), 50, on_cpu=False)
    assert [working_by_layer(shapes, layer, of_gpu(1)) for layer in range(3)] == [scratch, scratch, 0]
    assert working_by_layer(shapes, 0, of_gpu(2)) == scratch / 2
    assert working_by_layer(shapes, 0, layout_of_trainer(TrainerConfig(), ParallelConfig(), 50)) == 0


def test_gradients_of_the_only_pass_of_a_step_take_the_place_of_activations() -> None:
    several, one = (predict_rank_memory(LLAMA, layout_of_trainer(TrainerConfig(), ParallelConfig(), 50, micro_batches=count)) for count in (2, 1))
    assert several.gradients == one.gradients == 4 * COUNT and several.activations > 4 * COUNT
    assert several.activations - one.activations == 4 * COUNT


def test_stages_and_expert_ranks_hold_their_own_parameters() -> None:
    stages = memory_by_stage(LLAMA, layout_of_trainer(TrainerConfig(), ParallelConfig(pipeline=3, pipeline_layers=(1, 1, 1)), 50))
    assert [each.parameters for each in stages] == [pytest.approx(4 * count, abs=4) for count in (LAYER + 3200, LAYER, LAYER + 3232)]
    assert [bool(each.logits) for each in stages] == [False, False, True]
    mixed = replace(LLAMA, experts=ExpertShapes(4, 2, 48))
    one, two = (predict_rank_memory(mixed, layout_of_trainer(TrainerConfig(), ParallelConfig(data=2, expert=size), 50)) for size in (1, 2))
    assert one.parameters - two.parameters == pytest.approx(4 * 3 * 2 * 3 * 32 * 48, abs=8), "half of four experts in three layers"


def test_a_machine_has_every_rank_and_the_pages_that_forked_ranks_share_once() -> None:
    layout = layout_of_trainer(TrainerConfig(), ParallelConfig(data=2, pipeline=3, pipeline_layers=(1, 1, 1)), 50)
    totals = [each.total for each in memory_by_stage(LLAMA, layout)]
    assert machine_bytes(LLAMA, layout) == 2 * sum(totals) and machine_bytes(LLAMA, layout, 2) == 2 * max(totals)
    assert data_run_bytes(TrainerConfig(), 4) == CONTROLLER_BYTES + FORK_SERVER_BYTES - 4 * SHARED_BYTES
    assert data_run_bytes(TrainerConfig(), 1) == 0
    assert replace(layout, is_forked=False) != layout
    assert predict_rank_memory(LLAMA, replace(layout, is_forked=False)).context == TRAINING_PROCESS_BYTES
