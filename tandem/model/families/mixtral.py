"""Mixtral (Jiang et al., 2024): Mistral with a mixture of experts of the full ``intermediate_size`` in every layer."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes
from tandem.model.family import Family, Mixture, read_expert_count
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import sliding_window

NAMES = ExpertNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{}.w1",
    up="block_sparse_moe.experts.{}.w3",
    down="block_sparse_moe.experts.{}.w2",
)


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    count, each = read_expert_count(reader, 8), reader.integer("num_experts_per_tok", 2)
    return ExpertShapes(count, each, reader.integer("intermediate_size"), names=NAMES)


def write_experts(experts: ExpertShapes) -> dict[str, Any]:
    return {
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "output_router_logits": False,
    }


FAMILY = Family(
    model_type="mixtral",
    class_name="MixtralForCausalLM",
    mask=sliding_window(default=None),
    experts=Mixture(NAMES, read_experts, write_experts),
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_theta=1e6,
)
