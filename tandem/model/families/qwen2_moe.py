"""Qwen1.5-MoE and Qwen2-MoE (Yang et al., 2024): Qwen2 with a mixture of experts and a shared expert, which a sigmoid gates."""

from dataclasses import replace
from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes
from tandem.model.families import qwen3_moe
from tandem.model.family import ConfigFlag, Family, Mixture, read_expert_count
from tandem.model.huggingface.config_reader import ConfigReader
from tandem.model.sliding_windows import WINDOW_BY_LAYER, Mask, Windows

NAMES = ExpertNames(shared="mlp.shared_expert")


def read_experts(reader: ConfigReader, layers: int, count: int = 60, chosen: int = 4, inner: int = 1408, shared: int = 5632) -> ExpertShapes:
    """Reads the experts; dense layers are those of Qwen3-MoE, ``norm_topk_prob`` is off by default too. The numbers are the defaults of their count, of those
    that a token visits, and of the inner sizes of each and of the shared one."""
    return replace(
        qwen3_moe.read_experts(reader, layers),
        num_experts=read_expert_count(reader, count),
        num_experts_per_tok=reader.integer("num_experts_per_tok", chosen),
        intermediate_size=reader.integer("moe_intermediate_size", inner),
        names=NAMES,
        shared_intermediate_size=reader.integer("shared_expert_intermediate_size", shared),
        shared_gate=True,
    )


def write_experts(experts: ExpertShapes) -> dict[str, Any]:
    return qwen3_moe.write_experts(experts) | {"shared_expert_intermediate_size": experts.shared_intermediate_size}


def read_windows(reader: ConfigReader, layers: int) -> Windows:
    """Reads the windows: without ``layer_types``, of every second layer, the first among them, below ``max_window_layers``."""
    if reader.config.get("layer_types") is not None or not reader.boolean("use_sliding_window", False):
        return WINDOW_BY_LAYER.read(reader, layers)
    if reader.config.get("sliding_window", 0) is None:
        return ()
    window, most = reader.integer("sliding_window", 4096), reader.config.get("max_window_layers", 28)
    if not isinstance(most, int) or isinstance(most, bool) or most < 0:
        raise reader.fail("max_window_layers", most, "it must be a whole number of at least 0")
    return tuple(window if i % 2 == 0 and i < most else None for i in range(layers)) if most else ()


FAMILY = Family(
    model_type="qwen2_moe",
    class_name="Qwen2MoeForCausalLM",
    attention_bias=ConfigFlag("qkv_bias", True),
    mask=Mask(read_windows, WINDOW_BY_LAYER.write),
    experts=Mixture(NAMES, read_experts, write_experts, lambda inner: {"shared_intermediate_size": inner, "shared_gate": True}),
    num_key_value_heads=16,
)
