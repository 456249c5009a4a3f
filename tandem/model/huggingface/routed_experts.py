"""The keys of ``config.json`` that DeepSeek's mixtures of experts and those like them share. Imports no torch."""

from typing import Any

from tandem.layout.expert_shapes import ExpertNames, ExpertShapes, SigmoidRouting, SoftmaxRouting
from tandem.model.huggingface.config_reader import ConfigReader


def read_dense_layers(reader: ConfigReader, layers: int, default: int) -> tuple[int, ...]:
    """Reads ``first_k_dense_replace``: the first layers, which have a plain MLP."""
    dense = reader.config.get("first_k_dense_replace")
    dense = default if dense is None else dense
    if not isinstance(dense, int) or isinstance(dense, bool) or not 0 <= dense <= layers:
        raise reader.fail("first_k_dense_replace", dense, f"it must be a whole number of at most the {layers} layers")
    reader.only("moe_layer_freq", 1)
    return tuple(range(dense))


def read_sigmoid_experts(
    reader: ConfigReader, layers: int, names: ExpertNames, *, experts: int, inner: int, dense: int, routing: SigmoidRouting
) -> ExpertShapes:
    """Reads the experts of DeepSeek-V3 and of families like it, which a token chooses as ``SigmoidRouting`` describes. The others are what the keys default to:
    ``dense`` of the first layers have a plain MLP."""
    size = reader.integer("moe_intermediate_size", inner)
    return ExpertShapes(
        reader.integer("n_routed_experts" if "n_routed_experts" in reader.config else "num_local_experts", experts),
        reader.integer("num_experts_per_tok", 8),
        size,
        normalised=reader.boolean("norm_topk_prob", True),
        dense_layers=read_dense_layers(reader, layers, dense),
        names=names,
        shared_intermediate_size=size * reader.integer("n_shared_experts", 1),
        sigmoid=SigmoidRouting(
            reader.integer("n_group", routing.groups), reader.integer("topk_group", routing.groups_per_tok),
            reader.number("routed_scaling_factor", routing.scaling),
        ),
    )  # fmt: skip


def routed_expert_keys(experts: ExpertShapes, routing: SigmoidRouting | SoftmaxRouting) -> dict[str, Any]:
    """Returns the keys of ``experts``, which are chosen by ``routing``."""
    return {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.intermediate_size,
        "n_shared_experts": experts.shared_intermediate_size // experts.intermediate_size,
        "first_k_dense_replace": len(experts.dense_layers),
        "norm_topk_prob": experts.normalised,
        "n_group": routing.groups,
        "topk_group": routing.groups_per_tok,
        "routed_scaling_factor": routing.scaling,
    }
