"""The memory and the steps of an engine on GPUs, beside the engine's own functions, published sizes and cases worked by hand."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tandem.engine import settings
from tandem.estimate.hardware.load import load_hardware
from tandem.estimate.serving.engine_memory import predict_engine_memory
from tandem.estimate.serving.host import HIDDEN, SEQUENCE_S
from tandem.estimate.serving.kernels import KERNELS, PUBLISHED
from tandem.estimate.serving.kv_cache import held_tokens, read_bytes, token_bytes
from tandem.estimate.serving.layout import ServingLayout
from tandem.estimate.serving.step_time import (
    REDUCE_S,
    REDUCE_SHARE,
    _matrices,
    all_reduce_seconds,
    predict_decode_step,
    predict_prefill,
)
from tandem.estimate.serving.throughput import predict_batch_seconds, predict_load, predict_offline_seconds, predict_saturated
from tandem.estimate.serving.weight_formats import FORMATS, quantized_weight_bytes
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.flops import matrix_parameters
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype

LLAMA_2_7B = ModelShapes("llama", 32000, 4096, 32, 32, 32, 128, 11008, 4096, False)
LLAMA_3_8B = ModelShapes("llama", 128256, 4096, 32, 32, 8, 128, 14336, 8192, False)
BANDWIDTH_SHARE = KERNELS[PUBLISHED].bandwidth
H100 = load_hardware("H100-80GB")


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_blocks_of_the_kv_cache_are_those_that_the_engine_allocates(monkeypatch: pytest.MonkeyPatch, tensor: int, kv_cache_dtype: KVCacheDtype) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=H100.memory_bytes))
    layout = ServingLayout(tensor, kv_cache_dtype=kv_cache_dtype)
    args = replace(layout.engine_args(), device="cuda")
    resolved = settings.resolve(args, LLAMA_3_8B, torch.bfloat16)
    assert predict_engine_memory(LLAMA_3_8B, layout, H100).num_blocks == resolved.num_blocks > 10_000


def test_the_parts_of_an_engine_s_memory_add_up_to_the_gpu() -> None:
    for quantization in FORMATS:
        memory = predict_engine_memory(LLAMA_3_8B, ServingLayout(2, quantization), H100)  # type: ignore[arg-type]
        assert memory.total == H100.memory_bytes
        assert min(memory.weights, memory.kv_cache, memory.activations, memory.unused) > 0


def test_published_files_of_quantized_models_have_the_predicted_sizes() -> None:
    # TheBloke/Llama-2-7B-AWQ: 3.89 GB; TheBloke/Llama-2-7B-GPTQ (128 columns): 3.90 GB; neuralmagic/Meta-Llama-3-8B-Instruct-FP8: 9.08 GB.
    assert quantized_weight_bytes(LLAMA_2_7B, "awq") == pytest.approx(3.89e9, rel=0.01)
    assert quantized_weight_bytes(LLAMA_2_7B, "gptq") == pytest.approx(3.90e9, rel=0.01)
    assert quantized_weight_bytes(LLAMA_3_8B, "fp8") == pytest.approx(9.08e9, rel=0.01)


def test_the_cache_of_a_token_has_the_published_bytes() -> None:
    assert token_bytes(LLAMA_3_8B, ServingLayout()) == 131_072
    # DeepSeek V3: 61 layers, a latent vector of 512 and a rotated key of 64 in bf16: 70.272 KB (DeepSeek-AI, 2025, arXiv 2505.09343, table 1).
    latent = LatentAttention(512, 128, 64, 128, 1536)
    deepseek = replace(LLAMA_3_8B, num_hidden_layers=61, num_attention_heads=128, num_key_value_heads=128, head_dim=192, latent=latent)
    assert token_bytes(deepseek, ServingLayout()) == 70_272
    assert token_bytes(deepseek, ServingLayout(8)) == 8 * 70_272, "every GPU holds the compressed vector"
    # Four heads of keys and values on eight GPUs: each is held twice.
    few = replace(LLAMA_3_8B, num_key_value_heads=4)
    assert token_bytes(few, ServingLayout(8)) == 2 * token_bytes(few, ServingLayout(1))


def test_a_sliding_window_limits_what_a_sequence_holds_and_reads() -> None:
    windowed = replace(LLAMA_3_8B, layer_windows=(1024,) * 32)
    mixed = replace(LLAMA_3_8B, layer_windows=(1024, None) * 16)
    layout, layer = ServingLayout(), token_bytes(LLAMA_3_8B, ServingLayout()) / 32
    assert held_tokens(windowed, 8000) == 1024 + 16 + 8
    assert held_tokens(mixed, 8000) == held_tokens(LLAMA_3_8B, 8000) == 8008
    assert read_bytes(windowed, layout, 8000) == 32 * 1024 * layer
    assert read_bytes(mixed, layout, 8000) == 16 * (1024 + 8000) * layer


def test_a_step_of_one_sequence_takes_the_time_of_reading_the_weights() -> None:
    time = predict_decode_step(LLAMA_3_8B, ServingLayout(), H100, 1, 0)
    in_layers = matrix_parameters(LLAMA_3_8B) - 128256 * 4096
    assert time.reads_weights
    assert time.products == pytest.approx(2 * in_layers / (BANDWIDTH_SHARE * H100.memory_bandwidth), rel=0.001)
    assert time.head >= 2 * 128256 * 4096 / (BANDWIDTH_SHARE * H100.memory_bandwidth)
    assert time.seconds == pytest.approx(
        time.products + time.head + time.attention + time.memory_bound + time.communication + time.launches + time.host
    )


def test_weights_of_four_bits_are_read_in_a_quarter_of_the_time_and_multiplied_in_none_of_it() -> None:
    one, many = (lambda q, rows: predict_decode_step(LLAMA_3_8B, ServingLayout(1, q), H100, rows, 0).products, 4096)
    assert one("awq", 1) == pytest.approx(one("bf16", 1) * (4 + 8 * 2.5 / 128) / 16, rel=0.01)
    assert one("awq", many) == pytest.approx(one("bf16", many), rel=0.01)
    assert one("fp8", many) == pytest.approx(one("bf16", many) * H100.product_rate("bf16") / H100.product_rate("fp8"), rel=0.01)


def test_keys_and_values_make_a_step_longer_by_the_time_of_reading_them() -> None:
    short, long = (predict_decode_step(LLAMA_3_8B, ServingLayout(), H100, 64, context).seconds for context in (1000, 3000))
    assert long - short == pytest.approx(64 * 2000 * 131_072 / (BANDWIDTH_SHARE * H100.memory_bandwidth), rel=1e-6)


def test_a_mixture_of_experts_reads_only_the_experts_that_are_visited() -> None:
    mixture = replace(LLAMA_3_8B, experts=ExpertShapes(64, 2, 1024))
    times = [predict_decode_step(mixture, ServingLayout(), H100, rows, 0).products for rows in (1, 4096)]
    expert, rate = 2 * 3 * 1024 * 4096 * 32, BANDWIDTH_SHARE * H100.memory_bandwidth
    rest = 2 * 32 * 4096 * (6144 + 4096)
    assert times[0] == pytest.approx((2 * expert + rest) / rate, rel=0.01)
    assert times[1] > 64 * expert / rate


def test_an_all_reduce_has_a_latency_and_the_time_of_its_bytes() -> None:
    assert all_reduce_seconds(1e9, ServingLayout(1), H100) == 0
    assert all_reduce_seconds(0, ServingLayout(8), H100) == REDUCE_S
    assert all_reduce_seconds(1e9, ServingLayout(2), H100) - REDUCE_S == pytest.approx(1e9 / (REDUCE_SHARE * H100.link_bandwidth))
    # Four nodes: 7 steps within a node and 2 between nodes, up and down; the bytes through eight network cards.
    latency = all_reduce_seconds(0, ServingLayout(32), H100)
    assert latency == pytest.approx(6.8e-6 + 2 * (7 * 0.6e-6 + 2 * 2.7e-6))
    assert all_reduce_seconds(1e9, ServingLayout(32), H100) - latency == pytest.approx(2 * 31 / 32 * 1e9 / (REDUCE_SHARE * 8 * H100.network_bandwidth))


@pytest.mark.parametrize(("sequences", "saved_ms"), [(32, 0.34), (64, 0.78), (128, 1.70), (256, 3.26)])
def test_the_host_of_an_engine_adds_what_scheduling_ahead_was_published_to_save(sequences: int, saved_ms: float) -> None:
    ahead, waits = (
        predict_decode_step(LLAMA_3_8B, ServingLayout(host_sequence_s=SEQUENCE_S[name]), H100, sequences, 1000).seconds for name in (HIDDEN, "vllm-0.8")
    )
    assert 1e3 * (waits - ahead) == pytest.approx(saved_ms, rel=0.22)


def test_a_prompt_in_chunks_takes_longer_than_at_once_and_a_closed_batch_is_its_prompts_and_its_steps() -> None:
    whole, chunked = (predict_prefill(LLAMA_3_8B, ServingLayout(max_num_batched_tokens=budget), H100, 4096) for budget in (4096, 512))
    assert whole < chunked < 1.5 * whole
    batch = predict_batch_seconds(LLAMA_3_8B, ServingLayout(), H100, 16, 500, 1)
    assert batch == predict_prefill(LLAMA_3_8B, ServingLayout(), H100, 500, 16)
    assert predict_offline_seconds(LLAMA_3_8B, ServingLayout(max_num_seqs=16), H100, 32, 500, 1) == pytest.approx(2 * batch)


def test_little_s_law_holds_for_an_engine_that_keeps_up_and_one_that_does_not_is_none() -> None:
    layout = ServingLayout(max_model_len=2048)
    most = predict_saturated(LLAMA_3_8B, layout, H100, 1000, 300)
    load = predict_load(LLAMA_3_8B, layout, H100, most.requests_per_s / 2, 1000, 300)
    assert load is not None and load.running == pytest.approx(most.requests_per_s / 2 * 300 * load.step_s, rel=1e-6)
    assert load.step_s < most.step_s and load.first_token_s > load.step_s
    assert predict_load(LLAMA_3_8B, layout, H100, most.requests_per_s * 1.01, 1000, 300) is None


def test_a_shared_prefix_is_computed_and_held_once() -> None:
    layout = ServingLayout(max_model_len=4096, max_num_seqs=2048)
    alone = predict_saturated(LLAMA_3_8B, layout, H100, 3000, 100)
    shared = predict_saturated(LLAMA_3_8B, layout, H100, 3000, 100, shared_tokens=2500)
    assert shared.running > 4 * alone.running or shared.running == 2048 * 1.0
    assert shared.requests_per_s > 2 * alone.requests_per_s


@pytest.mark.parametrize(
    ("layout", "says"),
    [
        (ServingLayout(3), "tensor parallel size is 3; it must divide the model's 32 attention heads"),
        (ServingLayout(quantization="q5"), "quantization is 'q5'; it must be one of bf16, fp16, fp8, int8, int4, gptq, awq"),  # type: ignore[arg-type]
        (ServingLayout(gpu_memory_utilization=0.1), "use more GPUs, fewer bits, or a smaller max_model_len"),
        (ServingLayout(max_num_seqs=0), "max_num_seqs is 0; it must be from 1"),
    ],
)
def test_an_engine_that_cannot_be_is_refused_in_one_line(layout: ServingLayout, says: str) -> None:
    with pytest.raises(UserError) as error:
        predict_engine_memory(LLAMA_3_8B, layout, H100)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_ranks_that_do_not_divide_the_key_heads_of_linear_attention_are_refused_in_one_line() -> None:
    shapes = replace(LLAMA_3_8B, linear_attention=LinearAttention((0,), 4, 8, 128, 128, 4))
    predict_engine_memory(shapes, ServingLayout(4), H100)
    with pytest.raises(UserError, match="tensor parallel size is 8; it must divide the 4 key heads of the model's linear attention"):
        predict_engine_memory(shapes, ServingLayout(8), H100)


def test_fp8_is_refused_on_a_gpu_that_has_no_fp8() -> None:
    with pytest.raises(UserError, match="which A100-80GB has not"):
        predict_engine_memory(LLAMA_3_8B, ServingLayout(quantization="fp8"), load_hardware("A100-80GB"))


def test_a_step_of_deepseek_v3_reads_its_matrices_and_a_query_computes_over_the_compressed_vectors() -> None:
    experts = ExpertShapes(256, 8, 2048, dense_layers=(0, 1, 2), shared_intermediate_size=2048)
    latent = LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)
    shapes = ModelShapes("deepseek_v3", 129280, 7168, 61, 128, 128, 192, 18432, 163840, False, experts=experts, latent=latent)
    h200 = load_hardware("H200")
    # So many prompt tokens that every expert is visited; 671 billion parameters, less 0.93 of the embedding, 0.93 of the head and 0.1 of routers.
    read = sum(outputs * inputs * layers * matrices for outputs, inputs, layers, _, matrices in _matrices(shapes, 1, 1e6))
    assert read == pytest.approx(671.03e9 - 2 * 129280 * 7168 - 58 * 256 * 7168, rel=1e-4)
    layout, context = ServingLayout(8, "fp8"), 10_000
    nothing, one = (predict_decode_step(shapes, layout, h200, count, context).products for count in (0, 1))
    assert nothing < one, "a step without a token visits no expert"
    # Of 16 heads on a GPU and 61 layers: scores over 576 numbers and sums over 512, each a product and a sum.
    operations = 61 * 16 * context * 2 * (576 + 512)
    attention = predict_decode_step(shapes, layout, h200, 100, context).attention
    assert attention == pytest.approx(100 * max(operations / (0.55 * h200.product_rate("bf16")), 70_272 * context / (0.85 * h200.memory_bandwidth)))
