"""The predicted memory and work of training a draft head beside a frozen model, against the tensors of one and cases worked by hand."""

from dataclasses import replace

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.draft_work import draft_passes, draft_work
from tandem.estimate.model_bytes import weight_bytes
from tandem.estimate.time import Product
from tandem.estimate.training.layout import DraftTraining, TrainingLayout, layout_of_trainer
from tandem.estimate.training.rank_memory import machine_bytes, memory_by_stage, predict_rank_memory
from tandem.kernels.reference import ReferenceKernels
from tandem.layout.eagle3 import eagle3_shapes
from tandem.layout.flops import draft_step_flops
from tandem.layout.shapes import ModelShapes
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import eagle3_tensors

TARGET = ModelShapes("llama", 97, 64, 4, 4, 2, 16, 96, 128, tie_word_embeddings=False)
HEAD = eagle3_shapes(TARGET, 50)


def layout(steps: int, optimizer: str = "adamw", sequence: int = 16) -> TrainingLayout:
    trainer = TrainerConfig(optimizer=optimizer)  # type: ignore[arg-type]
    return replace(layout_of_trainer(trainer, ParallelConfig(), 64, is_forked=False), sequence=sequence, draft=DraftTraining(HEAD, steps))


def test_the_model_has_weights_and_the_head_gradients_and_moments() -> None:
    trained = sum(tensor.nbytes for tensor in eagle3_tensors(Eagle3Head(HEAD, ReferenceKernels())).values())
    memory = predict_rank_memory(TARGET, layout(3))
    assert memory.parameters == weight_bytes(TARGET, "float32") + trained
    assert (memory.gradients, memory.optimizer, memory.master_weights, memory.logits) == (trained, 2 * trained, 0, 0)
    assert memory.staged == 3 * trained
    coded = predict_rank_memory(TARGET, layout(3, "adamw8bit"))
    assert trained / 2 < coded.optimizer < 2 * trained


def test_every_position_of_a_draft_keeps_its_activations_until_the_backward_pass_and_all_one_distribution() -> None:
    one, two, three = (predict_rank_memory(TARGET, layout(steps)).activations for steps in (1, 2, 3))
    longer = predict_rank_memory(TARGET, layout(3, sequence=32)).activations
    assert three - two == two - one
    # 64 tokens: two copies of the shares of 16 more keys, for 4 heads, at each position but the first.
    assert longer - three == 2 * 64 * 2 * 16 * 4 * 4
    assert three - two > 64 * 4 * (64 + 2 * 16 * 4)


def test_the_operations_of_a_step_are_those_of_both_models() -> None:
    layer = (64 + 2 * 32) * 2 * 64 + 64 * 64 + 3 * 64 * 96
    model = 4 * ((64 + 2 * 32) * 64 + 64 * 64 + 3 * 64 * 96) + 97 * 64
    # Forward only; the head three times, forward and backward, and its states once.
    products = 2 * model + 6 * (3 * 64 * 64 + 3 * (layer + 50 * 64))
    attention = [16 * (2 * 4 + 6 * 3) * 2 * 64 * 16, 8 * (2 * 4 + 6 * 3) * 2 * 64 * 8]
    assert draft_step_flops(TARGET, HEAD, 3, [16, 8]) == 24 * products + sum(attention)


def test_the_work_is_a_forward_pass_of_the_model_and_the_head_once_for_each_position() -> None:
    work = draft_work(TARGET, DraftTraining(HEAD, 3), "float32", 128, 16, 64)
    # Two micro-batches. The model's layers and its distribution.
    assert work.products[Product(64, 128, 64)] == 2 * 4 and work.products[Product(64, 97, 64)] == 2
    assert work.products[Product(64, 64, 3 * 64, trains=True)] == 2
    assert work.products[Product(64, 128, 2 * 64, trains=True)] == 2 * 3
    assert work.products[Product(64, 50, 64, trains=True)] == work.products[Product(64, 50, 64)] == 2 * 3
    assert not any(product.trains for product in work.products if product.outputs == 97)
    assert work.attention_flops == pytest.approx(4 * 4 * 128 * 64 * 8 + 3 * 4 * 128 * 64 * 16 * 2.5)


def on_mesh(**axes: int) -> TrainingLayout:
    parallel = ParallelConfig(**axes)  # type: ignore[arg-type]
    return replace(layout_of_trainer(TrainerConfig(), parallel, 64, is_forked=True), sequence=16, draft=DraftTraining(HEAD, 3))


def test_on_a_mesh_one_rank_of_a_replica_has_the_head_and_each_its_part_of_the_model() -> None:
    trained = sum(tensor.nbytes for tensor in eagle3_tensors(Eagle3Head(HEAD, ReferenceKernels())).values())
    alone, halves = predict_rank_memory(TARGET, on_mesh()), predict_rank_memory(TARGET, on_mesh(tensor=2))
    assert halves.parameters == weight_bytes(TARGET, "float32", 2) + trained and halves.gradients == alone.gradients == trained
    assert halves.activations == alone.activations, "the head is not divided"
    first, last = memory_by_stage(TARGET, on_mesh(pipeline=2))
    assert first.parameters + last.parameters == alone.parameters
    assert (first.gradients, first.optimizer, first.staged) == (0, 0, 0) and (last.gradients, last.optimizer) == (trained, 2 * trained)
    # Between the stages, each of two layers: the residual stream, the embedding and the input of layer 1, of the two micro-batches of a step.
    assert on_mesh(pipeline=2).micro_batches == 2 and (first.communication, last.communication) == (2 * 3 * 64 * 64 * 4,) * 2
    sharded = predict_rank_memory(TARGET, on_mesh(data=2, zero=2))
    assert (sharded.gradients, sharded.optimizer) == (trained // 2, trained)


def test_a_machine_has_the_head_once_for_each_replica() -> None:
    layout = on_mesh(data=2, tensor=2)
    holder = predict_rank_memory(TARGET, layout)
    trained = sum(tensor.nbytes for tensor in eagle3_tensors(Eagle3Head(HEAD, ReferenceKernels())).values())
    other = (machine_bytes(TARGET, layout) - 2 * holder.total) // 2
    assert 0 < other < holder.total - 4 * trained
    assert machine_bytes(TARGET, layout, 2) == 2 * holder.total


def test_the_work_of_the_head_counts_for_every_rank_that_waits_for_it() -> None:
    draft = DraftTraining(HEAD, 3)
    one, four = (draft_work(TARGET, draft, "float32", 128, 16, 64, waiting) for waiting in (1, 4))
    for product, count in one.products.items():
        of_head = product.trains or product.outputs == 50
        assert four.products[product] == (4 if of_head else 1) * count
    passes = [draft_passes(TARGET, 3, waiting) - 1 for waiting in (1, 4)]
    assert passes[1] == pytest.approx(4 * passes[0])
    assert four.attention_flops - one.attention_flops == 3 * (one.attention_flops - 4 * 4 * 128 * 64 * 8)
