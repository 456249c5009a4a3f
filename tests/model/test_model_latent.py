"""Latent attention: the size of its cache, its bits in every form of numbers and with adapters, and what is read and refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.config.engine import EngineArgs
from tandem.config.lora import LoraConfig
from tandem.engine.kv_cache.cache_tensors import block_bytes, make_cache
from tandem.estimate.model_bytes import held_parameters, kv_bytes_per_token
from tandem.estimate.pod_gpu import ENGINE_CONTEXT_BYTES, cache_tokens_within, engine_weight_bytes, engine_working_bytes
from tandem.kernels import BLOCK_TOKENS, select
from tandem.kernels.mixed import Precision, in_precision
from tandem.kernels.quantized import PackedQuantized
from tandem.layout.expert_shapes import ExpertShapes, SigmoidRouting, SoftmaxRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.parameters import is_of_adapter
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_config import config_json, shapes_of
from tandem.model.huggingface.model_folder import load_tensors, to_huggingface
from tandem.model.initialise import initialise
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype

LATENT = LatentAttention(kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, q_lora_rank=20)
V3 = ModelShapes(
    "deepseek_v3", 61, 32, 2, 4, 4, 24, 48, 128, False, latent=LATENT, rotary_interleaved=True,
    experts=ExpertShapes(8, 3, 16, dense_layers=(0,), shared_intermediate_size=16, sigmoid=SigmoidRouting(4, 2, 1.7)),
)  # fmt: skip
V2 = replace(
    V3, architecture="deepseek_v2", latent=replace(LATENT, q_lora_rank=0),
    experts=ExpertShapes(8, 3, 16, normalised=False, dense_layers=(0,), shared_intermediate_size=16, softmax=SoftmaxRouting(4, 2, 1.7)),
)  # fmt: skip
MODULES = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
SEQUENCES = [torch.randint(3, 61, (n,), generator=torch.Generator().manual_seed(n)) for n in (21, 2, 34)]
STEPS = [[(s, n)] for n in (5, 7, 40) for s in (2, 0, 1)]


def random_decoder(shapes: ModelShapes, precision: Precision = "fp32", kernels: Any = "cpu") -> Decoder:
    decoder = Decoder(shapes, in_precision(select(kernels), precision, torch.device("cpu")))
    initialise(decoder, 0, 0.3)
    if shapes.lora is not None:
        drawn = torch.Generator().manual_seed(5)
        for name, tensor in to_huggingface(decoder):
            if is_of_adapter(name):
                tensor.normal_(0.0, 0.2, generator=drawn)
    return decoder


@pytest.mark.parametrize(("stored", "each"), [("auto", 4 * 32), ("bfloat16", 2 * 32), ("int8", 32 + 4), ("fp8_e4m3", 32 + 4)])
def test_a_token_takes_one_compressed_row_in_each_layer(stored: KVCacheDtype, each: int) -> None:
    caches = make_cache(random_decoder(V3), 5, stored)
    assert block_bytes(caches) == BLOCK_TOKENS * V3.num_hidden_layers * each == BLOCK_TOKENS * kv_bytes_per_token(V3, "float32", stored)
    assert sum(tensor.nbytes for layer in caches for tensor in layer.tensors()) == 5 * block_bytes(caches)


@pytest.mark.parametrize("shapes", [V3, replace(V3, attention_bias=True, output_bias=True), V2], ids=["V3", "V3 with biases", "V2"])
def test_the_planner_counts_the_parameters_that_the_decoder_holds(shapes: ModelShapes) -> None:
    assert sorted(count for count, _ in held_parameters(shapes)) == sorted(parameter.numel() for parameter in random_decoder(shapes).parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_rank_of_an_engine_holds_the_whole_row(ranks: int) -> None:
    engine = EngineArgs(gpu_memory_utilization=0.9, tensor_parallel_size=ranks)
    tokens = cache_tokens_within(V3, engine, "float32", 2**32)
    weights = (engine_weight_bytes(V3, "float32", "float32") + engine_working_bytes(V3, engine)) // ranks
    assert tokens == (int(0.9 * 2**32) - ENGINE_CONTEXT_BYTES - weights) // (V3.num_hidden_layers * 4 * 32)


def test_the_published_cache_has_the_published_size() -> None:
    """DeepSeek-AI (2025), arXiv 2505.09343, table 1: 70.272 KB a token in bf16."""
    published = LatentAttention(512, 128, 64, 128, 1536)
    shapes = ModelShapes("deepseek_v3", 129280, 7168, 61, 128, 128, 192, 18432, 4096, False, latent=published)
    assert kv_bytes_per_token(shapes, "bfloat16") == 70_272 == 61 * 2 * (512 + 64)


@pytest.mark.parametrize("stored", ["bfloat16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("shapes", [V3, V2], ids=lambda shapes: shapes.architecture)
def test_packed_sequences_have_the_bits_of_a_rounded_cache(
    shapes: ModelShapes, stored: KVCacheDtype, packed_logits: Callable[..., list[Tensor]], paged_logits: Callable[..., list[Tensor]]
) -> None:
    decoder = random_decoder(shapes)
    exact = packed_logits(decoder, SEQUENCES)
    decoder.kv_cache_dtype = stored
    rounded = packed_logits(decoder, SEQUENCES)
    # The median, because a few tokens are sent to other experts.
    every, other = torch.cat(rounded), torch.cat(exact)
    assert 0 < (every - other).abs().median() < 0.2 * other.std()
    decoder.pack()
    assert all(torch.equal(a, b) for a, b in zip(paged_logits(decoder, SEQUENCES, STEPS), rounded, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_an_adapter_of_every_matrix_has_the_same_bits_in_an_engine_before_and_after_it_changes(
    precision: Precision, quantization: Any, packed_logits: Callable[..., list[Tensor]], paged_logits: Callable[..., list[Tensor]]
) -> None:
    shapes = adapted_shapes(V3, LoraConfig(3, 6.0, MODULES, quantization))
    trainer, engine = (random_decoder(shapes, precision) for _ in range(2))
    weights = {name: tensor.clone() for name, tensor in to_huggingface(trainer)}
    load_tensors(trainer, weights.items())
    load_tensors(engine, weights.items(), pack=True)
    with trainer.without_adapter():
        plain = packed_logits(trainer, SEQUENCES)
    first = packed_logits(trainer, SEQUENCES)
    assert all((a - b).abs().max() > 0.01 for a, b in zip(first, plain, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(paged_logits(engine, SEQUENCES, STEPS), first, strict=True))
    sum(logits.square().sum() for logits in first).backward()
    assert all((p.grad is not None and p.grad.abs().max() > 0) == is_of_adapter(f"{name}.weight") for name, p in trainer.named_parameters())
    changed = {name: tensor * 0.5 for name, tensor in weights.items() if is_of_adapter(name)}
    for decoder in (trainer, engine):
        load_tensors(decoder, changed.items())
    second = packed_logits(trainer, SEQUENCES)
    assert not torch.equal(second[0], first[0])
    assert all(torch.equal(a, b) for a, b in zip(paged_logits(engine, SEQUENCES, STEPS), second, strict=True))


def test_the_matrix_of_heads_stays_as_it_is_in_a_quantized_engine() -> None:
    from tandem.model.quantization.scheme import scheme_named

    decoder = random_decoder(V3)
    decoder.quantization = scheme_named("int8")
    decoder.pack()
    for matrices in decoder.packed_matrices()[:-1]:
        assert all(isinstance(matrices[name], PackedQuantized) for name in ("queries", "q_a", "kv_a", "output"))
        assert not isinstance(matrices["within_heads"].keys, PackedQuantized)


def test_a_config_of_transformers_4_is_read_as_it_is_published() -> None:
    """huggingface.co/deepseek-ai/DeepSeek-V2-Lite, config.json; the scale is that of its own code, 192^-0.5 (0.0707 ln 40 + 1)^2."""
    lite = {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001, "bos_token_id": 100000, "eos_token_id": 100001,
        "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
    }  # fmt: skip
    shapes = shapes_of(lite)
    assert (shapes.latent, shapes.head_dim, shapes.num_key_value_heads) == (LatentAttention(512, 128, 64, 128), 192, 16)
    assert shapes.attention_scale == pytest.approx(192**-0.5 * (0.0707 * math.log(40) + 1) ** 2)
    assert shapes.experts is not None and shapes.experts.softmax is None and not shapes.experts.normalised
    assert shapes_of(json.loads(json.dumps(config_json(shapes)))) == shapes


@pytest.mark.parametrize(
    ("shapes", "key", "value", "message"),
    [
        (V2, "norm_topk_prob", True, "norm_topk_prob True; only False is supported"),
        (V2, "topk_method", "noaux_tc", "topk_method 'noaux_tc'; supported are greedy and group_limited_greedy"),
        (V2, "scoring_func", "sigmoid", "scoring_func 'sigmoid'; only 'softmax' is supported"),
        (V2, "n_group", 3, "groups 3 do not divide its 8 experts into one or more each"),
        (V3, "scoring_func", "softmax", "scoring_func 'softmax'; only 'sigmoid' is supported"),
        (V3, "first_k_dense_replace", 3, "first_k_dense_replace 3; it must be a whole number of at most the 2 layers"),
        (V3, "qk_rope_head_dim", 7, "head_dim 23 is odd"),
        (V3, "moe_layer_freq", 2, "moe_layer_freq 2; only 1 is supported"),
    ],
)
def test_a_key_that_changes_the_arithmetic_is_refused_by_name(shapes: ModelShapes, key: str, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        shapes_of({**config_json(shapes), key: value})


def test_an_adapter_of_a_matrix_that_the_model_has_not_is_refused() -> None:
    with pytest.raises(UserError, match="model has no matrix 'q_a_proj'; set target_modules to some of q_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj"):
        adapted_shapes(V2, LoraConfig(target_modules=("q_a_proj",)))
    with pytest.raises(UserError, match="model has no matrix 'kv_b_proj'; set target_modules to some of q_proj, k_proj, v_proj, o_proj"):
        adapted_shapes(ModelShapes("llama", 43, 32, 2, 4, 4, 8, 48, 128, False), LoraConfig(target_modules=("kv_b_proj",)))
    with pytest.raises(UserError, match="'gate_proj' can have no adapter; set target_modules to q_a_proj and q_b_proj and"):
        adapted_shapes(V3, LoraConfig(target_modules=("gate_proj",)))


def test_yarn_is_in_the_scale_of_scores_and_not_in_cosines_when_both_mscales_are_given(tmp_path: Path) -> None:
    scaled = replace(V3, rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=32, mscale=1.0, mscale_all_dim=1.0))
    factor = 0.1 * math.log(4.0) + 1.0
    assert scaled.attention_scale == pytest.approx(24**-0.5 * factor * factor)
    assert V3.attention_scale == 24**-0.5
    assert Decoder(scaled, select("reference")).rotary_tables[0][0, :4].tolist() == [1.0] * 4
