"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024): latent attention with a compressed cache, and a mixture of experts with shared ones, chosen by sigmoid scores."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes, SigmoidRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.family import ConfigFlag, Family, Mixture, Terms
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.latent_config import read_latent
from tandem.model.huggingface.routed_experts import read_sigmoid_experts, routed_expert_keys

NAMES = ExpertNames()
PUBLISHED = LatentAttention(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, q_lora_rank=1536)


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    reader.only("scoring_func", "sigmoid")
    reader.only("topk_method", "noaux_tc")
    return read_sigmoid_experts(reader, layers, NAMES, experts=256, inner=2048, dense=3, routing=SigmoidRouting(8, 4, 2.5))


def write_experts(experts: ExpertShapes) -> dict[str, Any]:
    keys = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return {**routed_expert_keys(experts, experts.sigmoid or SigmoidRouting()), **keys}


def new_latent(head_dim: int) -> LatentAttention:
    """Returns sizes in the ratios of the published model."""
    return LatentAttention(4 * head_dim, head_dim, max(2, head_dim // 4 * 2), head_dim, 12 * head_dim)


def write_order(shapes: ModelShapes) -> dict[str, Any]:
    return {"rope_interleave": shapes.rotary_interleaved}


FAMILY = Family(
    model_type="deepseek_v3",
    class_name="DeepseekV3ForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    terms=Terms(
        lambda reader, layers, head_dim: {"rotary_interleaved": reader.boolean("rope_interleave", True)},
        write_order,
        lambda layers: {"rotary_interleaved": True},
    ),
    experts=Mixture(NAMES, read_experts, write_experts, lambda inner: {"shared_intermediate_size": inner, "sigmoid": SigmoidRouting()}),
    max_position_embeddings=4096,
    latent=lambda reader: read_latent(reader, PUBLISHED),
    new_latent=new_latent,
)
