"""GLM-4.5 and later (Zhipu AI, 2025): a mixture of experts with shared ones, chosen by sigmoid scores as in DeepSeek-V3, behind a few dense layers."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes, SigmoidRouting
from tandem.layout.shapes import ModelShapes
from tandem.model.family import ConfigFlag, Family, Mixture, Terms
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.routed_experts import read_sigmoid_experts, routed_expert_keys

NAMES = ExpertNames()


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    return read_sigmoid_experts(reader, layers, NAMES, experts=128, inner=1408, dense=1, routing=SigmoidRouting(1, 1, 1.0))


def write_experts(experts: ExpertShapes) -> dict[str, Any]:
    return {**routed_expert_keys(experts, experts.sigmoid or SigmoidRouting()), "num_nextn_predict_layers": 0}


def write_norms(shapes: ModelShapes) -> dict[str, Any]:
    return {"use_qk_norm": shapes.qk_norm}


FAMILY = Family(
    model_type="glm4_moe",
    class_name="Glm4MoeForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    rotary_fraction=0.5,
    terms=Terms(lambda reader, layers, head_dim: {"qk_norm": reader.boolean("use_qk_norm", False)}, write_norms),
    experts=Mixture(NAMES, read_experts, write_experts, lambda inner: {"shared_intermediate_size": inner, "sigmoid": SigmoidRouting()}),
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
)
