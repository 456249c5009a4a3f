"""gpt-oss (OpenAI, 2025): a mixture of experts with biases and a bounded SwiGLU, windows in every second layer, and attention with sinks."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import SWIGLU_ALPHA, SWIGLU_LIMIT, ModelShapes
from tandem.model.family import ConfigFlag, Family, Mixture, Terms, read_expert_count
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import windows_by_type

NAMES = ExpertNames(router="mlp.router")


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    """Reads the experts. Their gates are a softmax of the chosen experts' logits: the probabilities among all, divided by their sum."""
    count, each = read_expert_count(reader, 128), reader.integer("num_experts_per_tok", 4)
    return ExpertShapes(count, each, reader.integer("intermediate_size"), names=NAMES, biased=True)


def write_experts(experts: ExpertShapes) -> dict[str, Any]:
    return {"num_local_experts": experts.num_experts, "num_experts_per_tok": experts.num_experts_per_tok, "output_router_logits": False}


def read_terms(reader: ConfigReader, layers: int, head_dim: int) -> dict[str, Any]:
    """Reads the bounds of the gate, of which the kernels have one kind."""
    reader.only("swiglu_alpha", SWIGLU_ALPHA)
    reader.only("swiglu_limit", SWIGLU_LIMIT)
    return {"attention_sinks": True}


def write_terms(shapes: ModelShapes) -> dict[str, Any]:
    return {"hidden_act": "silu", "swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT}


FAMILY = Family(
    model_type="gpt_oss",
    class_name="GptOssForCausalLM",
    attention_bias=ConfigFlag("attention_bias", True),
    output_bias=ConfigFlag("attention_bias", True),
    activation="clamped_swiglu",
    activation_alias="silu",
    terms=Terms(read_terms, write_terms, lambda layers: {"attention_sinks": True}),
    mask=windows_by_type(default=128, full_every=2),
    experts=Mixture(NAMES, read_experts, write_experts, lambda inner: {"biased": True}, stacked=True),
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=150000.0,
    rope_scaling=RopeScaling("yarn", factor=32.0, original_max_position_embeddings=4096, truncate=False),
)
