"""The work of all ranks of a mesh against closed forms of its products, elementwise kernels and collectives."""

import pytest

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.mesh_work import LOGIT_BYTES, mesh_work
from tandem.estimate.time import Product, Speed, Work
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes

SHAPES = ModelShapes("llama", 1000, 64, 3, 4, 2, 16, 192, 256, tie_word_embeddings=True)
TOKENS, LENGTH, MOST = 1024, 256, 512
WEIGHTS = 4 * parameter_count(SHAPES)


def work(**mesh: int | bool) -> Work:
    return mesh_work(SHAPES, TrainerConfig(), ParallelConfig(**mesh), TOKENS, LENGTH, MOST)  # type: ignore[arg-type]


def flops(of: Work) -> float:
    return sum(times * product.flops for product, times in of.products.items())


def test_tensor_parallel_ranks_divide_every_product_and_compute_logits_once_more() -> None:
    alone, divided = work(), work(tensor=2, sequence_parallel=False)
    # A forward pass of the head: 2 operations for each of its elements and tokens.
    assert flops(divided) == pytest.approx(flops(alone) + 2 * TOKENS * 1000 * 64)
    assert divided.attention_flops == alone.attention_flops
    assert Product(MOST, 2 * 192 // 2, 64, True) in divided.products and Product(MOST, 500, 64) in divided.products
    # Two norms (4 forward, 8 backward) and residuals (6, 6) of the hidden size, in fp32 twice the bytes of 16 bits, on the second rank too.
    again = 2 * 3 * TOKENS * (2 * 24) * 64
    assert divided.moved_bytes - alone.moved_bytes == pytest.approx(again + TOKENS * 1000 * LOGIT_BYTES)
    assert divided.moved_bytes - work(tensor=2).moved_bytes == pytest.approx(again), "with sequence parallelism each has some of the tokens"


def test_tensor_parallel_ranks_sum_two_activations_of_a_layer_forward_and_two_gradients_backward() -> None:
    divided = work(tensor=2)
    # And the embeddings, and the gradient of the head's input; each sends the whole [T, H] from both ranks together, twice.
    assert divided.sent_bytes == (4 * 3 + 2) * 2 * TOKENS * 64 * 4
    assert divided.calls == ((4 * 3 + 2) * 2 + 2) * 2 * (TOKENS / MOST)
    assert work().calls == work().sent_bytes == 0


def test_every_micro_batch_goes_through_a_pipeline_and_back_and_the_tied_embeddings_are_summed() -> None:
    staged = work(pipeline=3)
    assert staged.sent_bytes == 2 * 2 * TOKENS * 64 * 4 + 2 * 1000 * 64 * 4 and staged.calls == 4 * 2 * (TOKENS / MOST)


@pytest.mark.parametrize(("zero", "times"), [(0, 2), (1, 2), (2, 2), (3, 3)])
def test_replicas_send_the_volume_of_zero_for_a_step_of_one_pass(zero: int, times: int) -> None:
    # Rajbhandari et al. (2020), section 7: 2 Psi, with stage 3 3 Psi, of which each of n ranks sends (n - 1) / n.
    replicated = work(data=2, zero=zero)
    assert replicated.sent_bytes == times * WEIGHTS and replicated.calls == times * 2 * (3 + 2)
    updated = replicated.moved_bytes - work().moved_bytes
    assert updated == (7 * WEIGHTS if zero == 0 else 0)


def test_collectives_cost_cpu_seconds_by_call_and_by_byte() -> None:
    speed = Speed({}, 1.0, {}, 1.0, call_cpu_s=0.5, sent_byte_cpu_s=0.25)
    assert Work(moved_bytes=3.0, calls=4.0, sent_bytes=8.0).cpu_seconds(speed) == 3.0 + 2.0 + 2.0
