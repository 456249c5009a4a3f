"""Qwen3-Next (Qwen team, 2025): linear attention by the gated delta rule in three of four layers, gated softmax attention in the others, and a mixture
of many small experts with a shared one."""

from dataclasses import replace
from typing import Any

from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes
from tandem.model.families import qwen2_moe
from tandem.model.family import ConfigFlag, Family, Mixture, Terms
from tandem.model.huggingface.config_reader import ConfigReader

INTERVAL = 4
"""Every so many layers one has softmax attention."""


def linear_layers(layers: int, interval: int = INTERVAL) -> tuple[int, ...]:
    return tuple(layer for layer in range(layers) if (layer + 1) % interval)


def read_linear_layers(reader: ConfigReader, layers: int) -> tuple[int, ...]:
    """Reads ``layer_types``, or else ``full_attention_interval``."""
    kinds = reader.config.get("layer_types")
    if kinds is None:
        return linear_layers(layers, reader.integer("full_attention_interval", INTERVAL))
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise reader.fail("layer_types", kinds, f"it must list the kind of each of {layers} layers")
    for kind in kinds:
        if kind not in ("linear_attention", "full_attention"):
            raise reader.fail("layer_types", kind, "supported are linear_attention and full_attention")
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention")


def read_terms(reader: ConfigReader, layers: int, head_dim: int) -> dict[str, Any]:
    linear, own = read_linear_layers(reader, layers), {"attention_gate": True}
    if not linear:
        return own
    size = lambda name, default: reader.integer(f"linear_{name}", default)
    return own | {
        "linear_attention": LinearAttention(
            linear, size("num_key_heads", 16), size("num_value_heads", 32), size("key_head_dim", 128), size("value_head_dim", 128), size("conv_kernel_dim", 4)
        )
    }


def write_terms(shapes: ModelShapes) -> dict[str, Any]:
    linear = shapes.linear_attention
    kinds = ["full_attention" if shapes.linear_attention_of(layer) is None else "linear_attention" for layer in range(shapes.num_hidden_layers)]
    if linear is None:
        return {"layer_types": kinds}
    return {
        "layer_types": kinds, "linear_num_key_heads": linear.num_key_heads, "linear_num_value_heads": linear.num_value_heads,
        "linear_key_head_dim": linear.key_head_dim, "linear_value_head_dim": linear.value_head_dim, "linear_conv_kernel_dim": linear.kernel_size,
    }  # fmt: skip


def new_terms(layers: int) -> dict[str, Any]:
    return {"attention_gate": True, "linear_attention": LinearAttention(linear_layers(layers), 2, 4, 16, 16, 4)}


def read_experts(reader: ConfigReader, layers: int) -> ExpertShapes:
    """Reads the experts, which are those of Qwen2-MoE; ``norm_topk_prob`` is on by default."""
    experts = qwen2_moe.read_experts(reader, layers, count=512, chosen=10, inner=512, shared=512)
    return replace(experts, normalised=reader.boolean("norm_topk_prob", True))


FAMILY = Family(
    model_type="qwen3_next",
    class_name="Qwen3NextForCausalLM",
    attention_bias=ConfigFlag("attention_bias"),
    output_bias=ConfigFlag("attention_bias"),
    qk_norm=True,
    rotary_fraction=0.25,
    norms_from_one=True,
    terms=Terms(read_terms, write_terms, new_terms),
    experts=Mixture(qwen2_moe.NAMES, read_experts, qwen2_moe.write_experts, lambda inner: {"shared_intermediate_size": inner, "shared_gate": True}),
    num_key_value_heads=2,
    head_dim=256,
)
