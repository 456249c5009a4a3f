"""The sizes of models from ``config.json`` against the models that transformers builds from it, published totals, and closed forms of latent attention."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.config.engine import EngineArgs
from tandem.estimate.model_bytes import kv_bytes_per_token, state_bytes
from tandem.estimate.pod_gpu import cache_tokens_within, engine_working_bytes
from tandem.estimate.training.activations import whole_layer_bytes
from tandem.estimate.training.held_parameters import held_on_span
from tandem.layout.flops import matrix_parameters, step_flops
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.parameters import parameter_count
from tandem.layout.pipeline_stages import whole
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, local_parameters
from tandem.planner.model_sizes import model_sizes
from tandem.planner.request import PlanRequest
from tandem.planner.search import candidates
from tandem.types.errors import UserError

DEEPSEEK_V3: dict[str, Any] = {
    # huggingface.co/deepseek-ai/DeepSeek-V3, config.json.
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
    "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}, "rms_norm_eps": 1e-06,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16", "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip
GPT_OSS: dict[str, Any] = {
    # huggingface.co/openai/gpt-oss-20b, config.json; the 120b has 36 layers and 128 experts.
    "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64,
    "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False,
    "pad_token_id": 199999, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
    "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "transformers_version": "4.55.0.dev0", "use_cache": True, "vocab_size": 201088,
}  # fmt: skip
QWEN3_NEXT: dict[str, Any] = {
    # huggingface.co/Qwen/Qwen3-Next-80B-A3B-Instruct, config.json.
    "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
    "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
    "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 512,
    "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2,
    "output_router_logits": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
SMALL = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "intermediate_size": 160, "vocab_size": 300, "max_position_embeddings": 128}
WITH_GROUPS = {**SMALL, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WITH_GROUPS),
    "llama-tied-with-biases": ("llama", {**WITH_GROUPS, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {**WITH_GROUPS, "sliding_window": 32}),
    "mixtral": ("mixtral", {**WITH_GROUPS, "num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen3-moe": ("qwen3_moe", {**WITH_GROUPS, **MOE, "head_dim": 32, "num_experts": 8, "mlp_only_layers": [1]}),
    "qwen2-moe": ("qwen2_moe", {**WITH_GROUPS, **MOE, "num_experts": 8, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 2}),
    "qwen2-moe-without-bias": (
        "qwen2_moe", {**WITH_GROUPS, **MOE, "num_experts": 8, "shared_expert_intermediate_size": 96, "qkv_bias": False, "mlp_only_layers": [0, 4]}
    ),
    "deepseek-v2": ("deepseek_v2", {**SMALL, **MOE, **LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 1}),
    "deepseek-v2-lite": (
        "deepseek_v2", {**SMALL, **MOE, **LATENT, "q_lora_rank": None, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 2}
    ),
    "deepseek-v3-with-biases": (
        "deepseek_v3",
        {**SMALL, **MOE, **LATENT, "q_lora_rank": 24, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "attention_bias": True,
         "n_group": 2, "topk_group": 1},
    ),
    "glm4-moe": (
        "glm4_moe",
        {**WITH_GROUPS, **MOE, "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 1, "use_qk_norm": True, "attention_bias": True,
         "head_dim": 24, "n_group": 1, "topk_group": 1},
    ),
    "gpt-oss": ("gpt_oss", {**WITH_GROUPS, "num_experts_per_tok": 2, "num_local_experts": 8, "head_dim": 24, "sliding_window": 16}),
    "qwen3-next": (
        "qwen3_next",
        {**WITH_GROUPS, **MOE, "num_experts": 8, "shared_expert_intermediate_size": 96, "head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 12, "linear_value_head_dim": 16, "mlp_only_layers": [1]},
    ),
    "granite": ("granite", {**WITH_GROUPS, "attention_bias": True, "mlp_bias": True, "residual_multiplier": 0.22}),
    "olmo2": ("olmo2", WITH_GROUPS),
    "olmo3-window": ("olmo3", {**WITH_GROUPS, "sliding_window": 16}),
    "phi3": ("phi3", {**WITH_GROUPS, "pad_token_id": 0}),
    "smollm3": ("smollm3", {**WITH_GROUPS, "pad_token_id": 0}),
    "gemma": ("gemma", {**WITH_GROUPS, "head_dim": 32}),
    "gemma2": ("gemma2", {**WITH_GROUPS, "head_dim": 32, "sliding_window": 16}),
    "gemma3": ("gemma3_text", {**WITH_GROUPS, "head_dim": 32, "sliding_window": 16}),
}  # fmt: skip

FAST = ("qwen2-moe", "deepseek-v2", "gemma2")


def built(model_type: str, keys: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the ``config.json`` that transformers writes for ``keys``, and the parameters of the model that it builds."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING[model_type](**keys)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return config.to_dict(), sum(parameter.numel() for parameter in model.parameters())


def check_parameters(model_type: str, keys: dict[str, Any]) -> None:
    written, parameters = built(model_type, keys)
    # What a person writes and what transformers writes, which has its defaults beside.
    assert parameter_count(model_sizes({"model_type": model_type, **keys}, "config.json")) == parameters
    shapes = model_sizes(written, "config.json")
    assert parameter_count(shapes) == parameters
    # The sharding plan knows every one of them, and layers of a kind have as many on each rank.
    tensor = 1 if shapes.qk_norm_all_heads or shapes.linear_attention is not None else 2
    held = held_on_span(shapes, whole(5), tensor, 2 if shapes.experts is not None else 1)
    spec = ShardSpec(size=tensor, deterministic=False, expert_size=2 if shapes.experts is not None else 1)
    assert held.total == sum(parameter.numel for parameter in local_parameters(shapes, spec))


@pytest.mark.parametrize("family", FAST)
def test_parameters_are_those_of_the_model_that_transformers_builds(family: str) -> None:
    check_parameters(*FAMILIES[family])


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in FAST])
def test_parameters_of_every_family_are_those_of_the_model_that_transformers_builds(family: str) -> None:
    check_parameters(*FAMILIES[family])


@pytest.mark.full
def test_windows_are_those_that_transformers_gives_each_layer() -> None:
    for name in ("mistral-window", "gemma2", "gemma3", "olmo3-window", "gpt-oss"):
        model_type, keys = FAMILIES[name]
        written, _ = built(model_type, {**keys, "num_hidden_layers": 13})
        kinds = written.get("layer_types") or ["sliding_attention"] * 13
        expected = tuple(keys["sliding_window"] if kind == "sliding_attention" else None for kind in kinds)
        assert model_sizes({"model_type": model_type, **keys, "num_hidden_layers": 13}, "config.json").layer_windows == expected


@pytest.mark.parametrize(("layers", "experts", "total", "active"), [(24, 32, 20.91, 3.61), (36, 128, 116.83, 5.13)], ids=["20b", "120b"])
def test_the_total_and_the_active_parameters_of_gpt_oss_are_the_published_ones(layers: int, experts: int, total: float, active: float) -> None:
    # OpenAI (2025), "gpt-oss-120b & gpt-oss-20b Model Card", table 1; the active ones have the head, but not the embedding.
    kinds = ["sliding_attention", "full_attention"] * (layers // 2)
    shapes = model_sizes({**GPT_OSS, "num_hidden_layers": layers, "num_local_experts": experts, "layer_types": kinds}, "config.json")
    assert round(parameter_count(shapes) / 1e9, 2) == total
    assert abs(matrix_parameters(shapes) / 1e9 - active) < 0.01


def test_the_total_and_the_active_parameters_of_deepseek_v3_are_the_published_ones() -> None:
    # DeepSeek-AI (2024), "DeepSeek-V3 Technical Report", abstract: 671B, of which 37B for each token.
    shapes = model_sizes(DEEPSEEK_V3, "config.json")
    assert round(parameter_count(shapes) / 1e9) == 671
    # Without the embedding's rows, of which a token reads one.
    active = matrix_parameters(shapes) + shapes.vocab_size * shapes.hidden_size
    assert round(active / 1e9) in (37, 38) and round(matrix_parameters(shapes) / 1e9) == 37
    # Table 1 of arXiv 2505.09343: 70.272 KB a token in bf16.
    assert kv_bytes_per_token(shapes, "bfloat16") == 70_272


@pytest.mark.full
def test_deepseek_v3_has_as_many_parameters_as_the_model_that_transformers_builds() -> None:
    keys = {key: value for key, value in DEEPSEEK_V3.items() if key not in ("architectures", "auto_map", "quantization_config", "model_type", "torch_dtype")}
    assert parameter_count(model_sizes(DEEPSEEK_V3, "config.json")) == built("deepseek_v3", keys)[1]


def test_the_sizes_of_qwen3_next_are_the_published_ones() -> None:
    # Its model card: 80B parameters, of which 3B are active; 79.67 in its safetensors, without the layer that predicts further tokens.
    shapes = model_sizes(QWEN3_NEXT, "config.json")
    assert round(parameter_count(shapes) / 1e9, 2) == 79.67
    assert round((matrix_parameters(shapes) + shapes.vocab_size * shapes.hidden_size) / 1e9, 2) == 3.87
    # By hand: 12 layers with 2 keys and values of 256 numbers; 36 with 32 matrices of 128 by 128 and 3 inputs of 8,192 numbers in fp32.
    assert kv_bytes_per_token(shapes, "bfloat16") == 12 * 2 * 2 * 256 * 2
    assert (states := state_bytes(shapes)) == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    few, many = (cache_tokens_within(shapes, EngineArgs(max_num_seqs=n, gpu_memory_utilization=0.9), "bfloat16", 1 << 40) for n in (1, 257))
    logits = engine_working_bytes(replace(shapes, linear_attention=None), EngineArgs(max_num_seqs=257))
    logits -= engine_working_bytes(replace(shapes, linear_attention=None), EngineArgs(max_num_seqs=1))
    # Snapshots of states take as much memory as keys and values.
    token = 2 * kv_bytes_per_token(shapes, "bfloat16")
    assert abs((few - many) * token - logits - 256 * states) < token, "an engine's rows of states are not for its KV cache"
    without = cache_tokens_within(shapes, EngineArgs(max_num_seqs=1, gpu_memory_utilization=0.9, enable_prefix_caching=False), "bfloat16", 1 << 40)
    assert 2 * few <= without <= 2 * few + 1


def test_steps_of_qwen3_next_are_its_layers_of_two_kinds_and_ranks_hold_what_the_sharding_plan_says() -> None:
    from tandem.estimate.hardware.load import load_hardware
    from tandem.estimate.serving.layout import ServingLayout
    from tandem.estimate.serving.step_time import predict_decode_step
    from tandem.estimate.training.held_parameters import held_on_span
    from tandem.layout.pipeline_stages import whole
    from tandem.layout.sharding import ShardSpec, local_parameters

    shapes, hardware = model_sizes(QWEN3_NEXT, "config.json"), load_hardware("H100-80GB")
    linear = shapes.linear_attention
    assert linear is not None
    for tensor in (1, 2):
        held = sum(parameter.numel for parameter in local_parameters(shapes, ShardSpec(size=tensor, deterministic=False)))
        assert held_on_span(shapes, whole(48), tensor, 1).total == held
    # By hand, of a token in bf16: inputs of the convolution, and queries, keys and values behind it (8,192 each), gate, output and gated output (4,096 each),
    # rows of 64 for 32 heads, and two numbers of each head in fp32; softmax attention 16 queries of 256 with gates and gated outputs, 2 keys and values.
    own, soft = (whole_layer_bytes(shapes, layer, 2, keeps_sums=False).divided for layer in (0, 3))
    assert own - soft == 2 * (2 * 8192 + 3 * 4096 + 64 * 32) + 8 * 32 - 2 * (4096 + 2 * 512 + 3 * 4096)
    short, long, states = (
        predict_decode_step(shapes, ServingLayout(tensor=4), hardware, sequences, context).attention for sequences, context in ((64, 1), (64, 2), (128, 1))
    )
    # A longer context costs the 12 layers of softmax attention alone; as many sequences again read and write their states of 75 MiB too.
    assert 1e3 * (long - short) < states - short > 64 * 2 * state_bytes(shapes) / 4 / hardware.memory_bandwidth


def test_a_serving_plan_counts_the_states_and_snapshots_that_an_engine_of_qwen3_next_allocates(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from tandem.engine import settings
    from tandem.estimate.hardware.load import load_hardware
    from tandem.estimate.serving.engine_memory import predict_engine_memory
    from tandem.estimate.serving.layout import ServingLayout

    shapes, hardware = model_sizes(QWEN3_NEXT, "config.json"), load_hardware("B200")
    layout = ServingLayout(tensor := 2, max_num_seqs=64, max_model_len=8192)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=hardware.memory_bytes))
    resolved = settings.resolve(replace(layout.engine_args(), device="cuda"), shapes, torch.bfloat16)
    memory = predict_engine_memory(shapes, layout, hardware)
    assert (memory.num_blocks, memory.num_snapshots) == (resolved.num_blocks, resolved.state_snapshots) and memory.num_snapshots > 100
    assert (memory.states, memory.snapshots) == tuple(count * state_bytes(shapes) // tensor for count in (64, memory.num_snapshots))
    assert memory.kv_cache == memory.num_blocks * 16 * kv_bytes_per_token(shapes, "bfloat16") // tensor
    assert memory.total == hardware.memory_bytes and memory.unused > 0


@pytest.mark.full
def test_qwen3_next_has_as_many_parameters_as_the_model_that_transformers_builds() -> None:
    keys = {key: value for key, value in QWEN3_NEXT.items() if key not in ("architectures", "model_type", "torch_dtype")}
    assert parameter_count(model_sizes(QWEN3_NEXT, "config.json")) == built("qwen3_next", keys)[1]


def test_latent_attention_computes_and_keeps_what_its_matrices_say() -> None:
    latent = LatentAttention(kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, q_lora_rank=24)
    plain = ModelShapes("model", 300, 64, 2, 4, 4, 24, 160, 128, tie_word_embeddings=False)
    shapes = replace(plain, latent=latent)
    # By hand: 64 x 24, 24 x 96, 64 x 40, 32 x 112, 48 x 64.
    weights = 64 * 24 + 24 * 96 + 64 * 40 + 32 * 112 + 48 * 64
    assert shapes.attention_weights(0) == weights
    # 6 a weight and token; forward and backward 6 T for a number of a query or of a value.
    assert step_flops(shapes, [10]) == 10 * (6 * (2 * (weights + 3 * 64 * 160) + 300 * 64) + 6 * (96 + 48) * 2 * 10)
    kept, kept_plain = (whole_layer_bytes(each, 0, 2, keeps_sums=False) for each in (shapes, plain))
    assert kept.replicated - kept_plain.replicated == 2 * (2 * 24 + 2 * 32 + 8)
    assert kept.divided - kept_plain.divided == 2 * (2 * 96 + 2 * 48 - 4 * 96)


def test_a_model_with_norms_over_all_heads_is_planned_without_tensor_parallelism(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16, "intermediate_size": 8192, "vocab_size": 100352}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo2", "max_position_embeddings": 4096, **sizes}))
    plan = ["plan", str(tmp_path), "--gpu", "H100-80GB", "--gpus", "8"]
    assert main(plan) == 0
    assert "pipeline" in capsys.readouterr().out
    assert main([*plan, "--tp", "2", "--dp", "4"]) == 2
    assert "--tp is 2; this olmo2 model has norms of queries and keys over all heads: leave it at 1" in capsys.readouterr().err
    serving = ["plan", "serving", *plan[1:4], "--requests-per-s", "1", "--prompt-tokens", "100", "--output-tokens", "20", "--tensor-parallel-size", "2"]
    assert main(serving) == 2
    assert "tensor parallel size is 2; the model's norms of queries and keys are over all heads: leave it at 1" in capsys.readouterr().err


def test_a_model_with_latent_attention_and_shared_experts_has_layouts() -> None:
    from tandem.estimate.hardware.load import load_hardware
    from tandem.planner.score import score

    hardware = load_hardware("H100-80GB")
    shapes = model_sizes(DEEPSEEK_V3, "config.json")
    layouts = list(candidates(PlanRequest(shapes, hardware, 2048, 4096, 15360, "fp8", micro_batch=1)))
    assert {layout.parallel.expert for layout in layouts} > {1, 64}
    without = replace(shapes, experts=replace(shapes.experts, shared_intermediate_size=0))  # type: ignore[type-var]
    for layout in layouts[:3]:
        whole_score, less = score(shapes, layout, hardware), score(without, layout, hardware)
        assert whole_score.step_seconds > less.step_seconds and whole_score.memory.total > less.memory.total


@pytest.mark.parametrize(
    ("keys", "message"),
    (
        ({"memory_slots": 1}, "fields that the planner does not understand: memory_slots; name those"),
        ({"linear_attention": True}, "linear_attention"),
        ({"ffn_multipliers": [0.5, 1.0]}, "ffn_multipliers"),
        ({"vision_config": {"hidden_size": 64}}, "vision_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"layer_types": ["linear_attention"] * 5}, "layer_types 'linear_attention'; the planner knows full_attention and sliding_attention"),
        ({"layer_types": ["full_attention"]}, "it must list the kind of each of 5 layers"),
    ),
    ids=("number", "switch", "floats", "other-model", "heads", "kind", "kinds"),
)
@pytest.mark.parametrize("model_type", ("llama", "seed_oss"))
def test_what_is_not_understood_is_refused_in_one_line(model_type: str, keys: dict[str, Any], message: str, tmp_path: Path, capsys: Any) -> None:
    if "layer_types" in keys and model_type == "llama":
        keys = {"surprise": 2, **keys}
        message = "surprise"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **WITH_GROUPS, **keys}))
    assert main(["plan", str(tmp_path), "--gpus", "8"]) != 0
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_latent_attention_that_lacks_a_size_is_refused() -> None:
    with pytest.raises(UserError, match="has no v_head_dim; a model needs it"):
        model_sizes({"model_type": "kimi_k2", **SMALL, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}, "config.json")


def test_flags_describe_the_same_model_as_its_config(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = (
        "--hidden 7168 --layers 61 --heads 128 --ffn 18432 --vocab 129280 --experts 256 --experts-per-token 8 --expert-ffn 2048 --shared-ffn 2048 "
        "--dense-layers 3 --kv-lora-rank 512 --q-lora-rank 1536 --qk-nope-head-dim 128 --qk-rope-head-dim 64 --v-head-dim 128"
    )
    layout = "--gpus 2048 --pp 16 --dp 128 --ep 64 --global-batch 15360 --json"
    assert main(["plan", *sizes.split(), *layout.split()]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == parameter_count(model_sizes(DEEPSEEK_V3, "config.json"))
    assert main(["plan", *sizes.replace("--v-head-dim 128", "").split(), *layout.split()]) != 0
    assert capsys.readouterr().err == "tandem: --v-head-dim is missing; latent attention (--kv-lora-rank) needs it\n"
