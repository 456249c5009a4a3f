"""Qwen3-MoE (Yang et al., 2025): Qwen3 with a mixture of experts in all layers except those that ``config.json`` lists as dense."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes
from tandem.model.family import ConfigFlag, Family, Mixture, read_expert_count
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import SWITCHED_WINDOW

NAMES = ExpertNames(
    router="mlp.gate", gate="mlp.experts.{}.gate_proj", up="mlp.experts.{}.up_proj", down="mlp.experts.{}.down_proj"
)


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    """Reads the experts; dense layers are those of ``mlp_only_layers``, and all but every ``decoder_sparse_step``-th."""
    step, listed = reader.integer("decoder_sparse_step", 1), reader.config.get("mlp_only_layers") or []
    if not isinstance(listed, list) or not all(isinstance(layer, int) for layer in listed):
        raise reader.fail("mlp_only_layers", listed, "it must be a list of layers")
    return ExpertShapes(
        read_expert_count(reader, 128),
        reader.integer("num_experts_per_tok", 8),
        reader.integer("moe_intermediate_size", 768),
        normalised=reader.boolean("norm_topk_prob", False),
        dense_layers=tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step),
        names=NAMES,
    )


def write_experts(experts: ExpertShapes) -> dict[str, Any]:
    return {
        "num_experts": experts.num_experts,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.normalised,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(experts.dense_layers),
        "output_router_logits": False,
    }


FAMILY = Family(
    model_type="qwen3_moe",
    class_name="Qwen3MoeForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    qk_norm=True,
    mask=SWITCHED_WINDOW,
    experts=Mixture(NAMES, read_experts, write_experts),
    num_key_value_heads=4,
)
