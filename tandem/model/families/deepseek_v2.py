"""DeepSeek-V2 and V2-Lite (DeepSeek-AI, 2024): latent attention with a compressed cache, and a mixture of experts with shared ones, chosen by groups."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes, SoftmaxRouting
from tandem.layout.latent_attention import LatentAttention
from tandem.model.families.deepseek_v3 import PUBLISHED, new_latent
from tandem.model.family import ConfigFlag, Family, Mixture
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.huggingface.latent_config import read_latent
from tandem.model.huggingface.routed_experts import read_dense_layers, routed_expert_keys

NAMES = ExpertNames()
GREEDY, BY_GROUPS = "greedy", "group_limited_greedy"


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    """Reads the experts. Gates are never divided by their sum, as in transformers, and no MLP has biases."""
    reader.only("scoring_func", "softmax")
    for key in ("norm_topk_prob", "mlp_bias"):
        reader.only(key, False)
    method = reader.config.get("topk_method") or GREEDY
    if method not in (GREEDY, BY_GROUPS):
        raise reader.fail("topk_method", method, f"supported are {GREEDY} and {BY_GROUPS}")
    scaling, inner = reader.number("routed_scaling_factor", 1.0), reader.integer("moe_intermediate_size", 1407)
    groups = (reader.integer("n_group"), reader.integer("topk_group")) if method == BY_GROUPS else (1, 1)
    routing = SoftmaxRouting(*groups, scaling)
    return ExpertShapes(
        reader.integer("n_routed_experts" if "n_routed_experts" in reader.config else "num_experts", 64),
        reader.integer("num_experts_per_tok"),
        inner,
        normalised=False,
        dense_layers=read_dense_layers(reader, layers, 0),
        names=NAMES,
        shared_intermediate_size=inner * reader.integer("n_shared_experts", 2),
        softmax=None if routing == SoftmaxRouting() else routing,
    )


def write_experts(experts: ExpertShapes) -> dict[str, Any]:
    routing = experts.softmax or SoftmaxRouting()
    method = BY_GROUPS if routing.groups > 1 else GREEDY
    return {**routed_expert_keys(experts, routing), "moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": method}


def new_uncompressed(head_dim: int) -> LatentAttention:
    """Returns sizes in the ratios of V2-Lite, whose queries are not compressed."""
    sizes = new_latent(head_dim)
    return LatentAttention(sizes.kv_lora_rank, sizes.qk_nope_head_dim, sizes.qk_rope_head_dim, sizes.v_head_dim)


FAMILY = Family(
    model_type="deepseek_v2",
    class_name="DeepseekV2ForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    rotary_interleaved=True,
    experts=Mixture(NAMES, read_experts, write_experts, lambda inner: {"normalised": False, "shared_intermediate_size": inner}),
    max_position_embeddings=2048,
    latent=lambda reader: read_latent(reader, PUBLISHED),
    new_latent=new_uncompressed,
)
