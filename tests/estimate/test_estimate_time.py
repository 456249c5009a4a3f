"""The predicted work of a step against closed forms: 6 operations for each parameter and token (Kaplan et al., 2020), and a roofline by hand."""

from dataclasses import replace

import pytest

from tandem.estimate.time import Product, Speed, Work, generation_work, training_work
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes

# Qwen3-0.6B: 0.44 billion parameters without its embedding (model card), which is its head as well.
QWEN = ModelShapes(
    architecture="qwen3", vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
    intermediate_size=3072, max_position_embeddings=40960, tie_word_embeddings=True, qk_norm=True,
)  # fmt: skip
NORMS = 28 * 2 * (1024 + 128) + 1024


def flops(work: Work) -> float:
    return sum(times * product.flops for product, times in work.products.items())


def test_a_forward_and_a_backward_pass_are_six_operations_for_each_parameter_and_token() -> None:
    work = training_work(QWEN, "float32", tokens=10_000, sequence_tokens=500, micro_batch_tokens=2048, passes=3, updates=1, backward=1)
    assert flops(work) == pytest.approx(6 * (parameter_count(QWEN) - NORMS) * 10_000)
    # Two products of half a context of 500 tokens with 16 heads of 128, of which each operation is a multiplication and an addition.
    assert work.attention_flops == 3 * 28 * 10_000 * (2 * 2 * 250 * 16 * 128)
    # AdamW reads weights, gradients and two moments, and writes all but the gradients, 4 bytes each.
    still = training_work(QWEN, "float32", tokens=10_000, sequence_tokens=500, micro_batch_tokens=2048, passes=3, updates=0, backward=1)
    assert work.moved_bytes - still.moved_bytes == 7 * 4 * parameter_count(QWEN)
    # Kernels between products, twice the bytes of 16 bits: two norms (4 forward, 8 backward) and residuals (6, 6) of the hidden size, rotary embedding (4, 4)
    # of queries and keys, the gated activation (6, 10).
    assert still.moved_bytes == pytest.approx(2 * 28 * 10_000 * (2 * 24 * 1024 + 8 * (16 + 8) * 128 + 16 * 3072))
    assert {product.outputs for product in work.products if not product.trains} == {151936}, "of the head three products"


def test_what_is_recomputed_is_a_further_forward_pass() -> None:
    asked = {"tokens": 10_000, "sequence_tokens": 500, "micro_batch_tokens": 2048, "updates": 0, "backward": 1}
    plain, again = (training_work(QWEN, "float32", passes=passes, **asked) for passes in (3, 4))
    # A layer is computed again but for its last product, the head is not.
    layers = 2 * (parameter_count(QWEN) - NORMS - 151936 * 1024 - 28 * 3072 * 1024) * 10_000
    assert flops(again) - flops(plain) == pytest.approx(layers) and sum(not product.trains for product in again.products) > 1


def test_a_token_of_a_mixture_of_experts_costs_the_experts_that_it_visits() -> None:
    experts = replace(QWEN, experts=ExpertShapes(num_experts=8, num_experts_per_tok=2, intermediate_size=512))
    dense = replace(QWEN, intermediate_size=2 * 512)
    asked = {"tokens": 4096, "sequence_tokens": 512, "micro_batch_tokens": 2048, "passes": 3, "updates": 1, "backward": 1}
    assert flops(training_work(experts, "float32", **asked)) == pytest.approx(flops(training_work(dense, "float32", **asked)))


def test_generation_prefills_each_prompt_once_and_feeds_all_but_the_last_token_of_every_sample() -> None:
    head = 151936 * 1024
    layers = parameter_count(QWEN) - NORMS - head
    work = generation_work(QWEN, "float32", prompts=4, prompt_tokens=100, samples=8, completion_tokens=64, max_num_seqs=16, max_num_batched_tokens=4096)
    # Of a prompt only the last token goes through the end of the last layer (q * H + 3 H I) and the head, which the first tokens are drawn by.
    behind = 16 * 128 * 1024 + 3 * 1024 * 3072
    prefilled = 2 * (layers - behind) * 4 * 100 + 2 * (behind + head) * 4
    assert flops(work) == pytest.approx(prefilled + 2 * (layers + head) * 4 * 8 * 63)
    # 32 sequences in 16 places are twice 63 steps, and each of them reads the cache of 101 to 163 tokens.
    assert {times for product, times in work.products.items() if product == Product(16, 151936, 1024)} == {126.0}
    assert work.moved_bytes == 126 * 16 * 132 * (2 * 28 * 8 * 128 * 4)


def test_seconds_are_products_attention_at_their_speed_and_bytes() -> None:
    product = Product(10, 20, 30)
    work = Work({product: 4.0}, attention_flops=12_000.0, moved_bytes=500.0)
    # 48,000 operations take 2 s, so that 12,000 of attention take 0.5 s.
    speed = Speed({product: 0.5}, bytes_per_s=1000.0, cpu={product: 1.0}, bytes_per_cpu_s=500.0)
    assert work.seconds(speed) == 2.0 + 0.5 + 0.5
    assert work.cpu_seconds(speed) == 4.0 + 1.0 + 1.0, "of two threads at once"
