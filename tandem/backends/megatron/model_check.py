"""What models Megatron-Core trains here, and on which meshes. Imports neither it nor torch."""

from tandem.config.parallel import ParallelConfig
from tandem.layout.shapes import ModelShapes
from tandem.types import UserError


def check_model(shapes: ModelShapes, parallel: ParallelConfig) -> None:
    """Raises ``UserError`` for a model that the layers of Megatron-Core's local specification are not built for, or that the mesh does not divide."""
    lacking = missing_block(shapes)
    if lacking is not None:
        raise UserError(f"the model has {lacking}, which trainer.backend 'megatron' does not train; set trainer.backend to tandem")
    if shapes.experts is not None and parallel.tensor > 1:
        raise UserError(
            f"'parallel.tensor' is {parallel.tensor} and the model has a mixture of experts, which Megatron-Core divides over tensor ranks with sequence "
            "parallelism alone; set parallel.tensor to 1 and parallel.expert higher, or trainer.backend to tandem"
        )
    for key, ranks, what, count in (
        ("parallel.pipeline", parallel.pipeline, "layers", shapes.num_hidden_layers),
        ("parallel.tensor", parallel.tensor, "query groups (num_key_value_heads)", shapes.num_key_value_heads),
        ("parallel.tensor", parallel.tensor, "intermediate_size", shapes.intermediate_size),
        ("parallel.expert", parallel.expert, "experts", 0 if shapes.experts is None else shapes.experts.num_experts),
    ):
        if ranks > 1 and (count == 0 or count % ranks):
            raise UserError(f"'{key}' is {ranks} with trainer.backend 'megatron', which divides the model's {count} {what} evenly; choose a divisor of {count}")


def missing_block(shapes: ModelShapes) -> str | None:
    """Returns what of ``shapes`` is not built with Megatron-Core; ``None``: nothing."""
    if not shapes.language_head or shapes.value_head != "none":
        return "a value head"
    if shapes.rope_scaling.kind != "default":
        return f"rope_scaling '{shapes.rope_scaling.kind}'"
    if any(shapes.window(layer) is not None for layer in range(shapes.num_hidden_layers)):
        return "sliding windows"
    if shapes.output_bias or shapes.mlp_bias:
        return "biases of o_proj or of the MLP"
    if shapes.experts is not None and shapes.experts.dense_layers:
        return "a mixture of experts with dense layers"
    return None
