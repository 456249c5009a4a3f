"""What models Megatron-Core trains here, and on which meshes. Imports neither it nor torch."""

from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.rotary import RopeScaling
from tandem.layout.shapes import ModelShapes
from tandem.model.megatron.division import divided_by_tensor
from tandem.model.megatron.terms import missing_term
from tandem.types import UserError

LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
"""The only scaling of rotary frequencies that its GPT takes, but for the factor (Llama 3.1, 3.2 and 3.3)."""


def check_model(shapes: ModelShapes, parallel: ParallelConfig) -> None:
    """Raises ``UserError`` for a model that the layers of Megatron-Core's local specification are not built for, or that the mesh does not divide."""
    lacking = missing_block(shapes)
    if lacking is not None:
        raise UserError(f"the model has {lacking}, which trainer.backend 'megatron' does not train; set trainer.backend to tandem")
    divided = "latent attention" if shapes.latent is not None else "a mixture of experts" if shapes.experts is not None else None
    if divided is not None and parallel.tensor > 1 and not parallel.sequence_parallel:
        raise UserError(
            f"'parallel.tensor' is {parallel.tensor} and the model has {divided}, which Megatron-Core divides over tensor ranks with sequence "
            "parallelism alone; set parallel.sequence_parallel to true"
        )
    stages = parallel.pipeline * parallel.virtual_stages
    if parallel.virtual_stages > 1 and shapes.num_hidden_layers % stages:
        raise UserError(
            f"'parallel.virtual_stages' is {parallel.virtual_stages} and parallel.pipeline {parallel.pipeline} with trainer.backend 'megatron', which divides "
            f"the model's {shapes.num_hidden_layers} layers evenly over {stages} stages; choose numbers whose product divides {shapes.num_hidden_layers}"
        )
    for key, ranks, what, count in (
        ("parallel.pipeline", parallel.pipeline, "layers", shapes.num_hidden_layers),
        *(("parallel.tensor", parallel.tensor, what, count) for what, count in divided_by_tensor(shapes, parallel.tensor)),
        ("parallel.expert", parallel.expert, "experts", 0 if shapes.experts is None else shapes.experts.num_experts),
    ):
        if ranks > 1 and ((count == 0 and key == "parallel.expert") or count % ranks):
            raise UserError(f"'{key}' is {ranks} with trainer.backend 'megatron', which divides the model's {count} {what} evenly; choose a divisor of {count}")


def window_sizes(shapes: ModelShapes) -> set[int]:
    """Returns the sizes of the sliding windows that layers have, in tokens."""
    return {window for layer in range(shapes.num_hidden_layers) if (window := shapes.window(layer)) is not None}


def missing_block(shapes: ModelShapes) -> str | None:
    """Returns what of ``shapes`` is not built with Megatron-Core; ``None``: nothing."""
    if not shapes.language_head or shapes.value_head != "none":
        return "a value head"
    lacking = missing_term(shapes)
    if lacking is not None:
        return lacking
    if shapes.latent is None and shapes.rope_scaling.kind != "default" and replace(shapes.rope_scaling, factor=LLAMA3.factor) != LLAMA3:
        return f"rope_scaling '{shapes.rope_scaling.kind}'" + (" with other lengths than Llama 3.1's" if shapes.rope_scaling.kind == "llama3" else "")
    if len(window_sizes(shapes)) > 1:
        return f"sliding windows of several sizes ({', '.join(map(str, sorted(window_sizes(shapes))))})"
    if shapes.output_bias or shapes.mlp_bias:
        return "biases of o_proj or of the MLP"
    return None if shapes.experts is None else _missing_of_routing(shapes.experts)


def _missing_of_routing(experts: ExpertShapes) -> str | None:
    routing = experts.sigmoid or experts.softmax
    if experts.sigmoid is not None and experts.num_experts_per_tok == 1:
        return "a sigmoid gate of one expert, which Megatron-Core never divides"
    if routing is None or routing.groups == 1:
        return None
    # DeepSeek-V3 chooses groups by their two best experts, V2 by their best; Megatron by as many as each chosen group has on average.
    best, most = (2, "two best experts") if experts.sigmoid is not None else (1, "best expert")
    count = experts.num_experts_per_tok // routing.groups_per_tok
    return None if count == best else f"groups of experts chosen by their {most}, where Megatron-Core sums the {count} best"
