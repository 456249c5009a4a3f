"""GLM-4.5 and later (Zhipu AI, 2025): a mixture of experts with shared ones, chosen by sigmoid scores as in DeepSeek-V3, behind a few dense layers."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes, SigmoidRouting
from tandem.layout.shapes import ModelShapes
from tandem.model.family import ConfigFlag, Family, Mixture, Terms
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.routed_experts import read_dense_layers, routed_expert_keys

NAMES = ExpertNames()


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    """Reads the experts; the first ``first_k_dense_replace`` layers are dense."""
    inner = reader.integer("moe_intermediate_size", 1408)
    groups = SigmoidRouting(reader.integer("n_group", 1), reader.integer("topk_group", 1), reader.number("routed_scaling_factor", 1.0))
    return ExpertShapes(
        reader.integer("n_routed_experts" if "n_routed_experts" in reader.config else "num_local_experts", 128),
        reader.integer("num_experts_per_tok", 8),
        inner,
        normalised=reader.boolean("norm_topk_prob", True),
        dense_layers=read_dense_layers(reader, layers, 1),
        names=NAMES,
        shared_intermediate_size=inner * reader.integer("n_shared_experts", 1),
        sigmoid=groups,
    )


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
