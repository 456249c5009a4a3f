"""What of a network the layers of Megatron-Core have no place for. Imports no torch."""

from dataclasses import replace

from tandem.layout.shapes import ModelShapes


def missing_term(shapes: ModelShapes) -> str | None:
    """Returns a term of ``shapes`` for which Megatron's layers have no tensor or no setting, in words; ``None``: they have all."""
    latent, experts = shapes.latent, shapes.experts
    if experts is not None:
        experts = replace(experts, sigmoid=None, softmax=None, shared_intermediate_size=0, shared_gate=False)
    rest = replace(
        shapes, latent=None, experts=experts, unrotated_layers=(), rotary_fraction=1.0,
        rotary_interleaved=shapes.rotary_interleaved and latent is None,
    )  # fmt: skip
    if rest.further_terms:
        return rest.further_terms[0]
    if shapes.experts is not None and shapes.experts.sigmoid is not None and not shapes.experts.normalised:
        return "sigmoid gates that are not divided by their sum"
    return None if latent is None else _missing_of_latent(shapes)


def _missing_of_latent(shapes: ModelShapes) -> str | None:
    rope = shapes.rope_scaling
    if not shapes.rotary_interleaved:
        return "latent attention that rotates other components than neighbours together"
    if shapes.attention_bias:
        return "biases of latent attention"
    if rope.kind not in ("default", "yarn"):
        return f"latent attention with rope_scaling '{rope.kind}'"
    if rope.attention_factor is not None or not rope.truncate:
        return "YaRN with a factor of attention of its own, or a range that is not rounded"
    return "YaRN with mscale_all_dim and without mscale" if rope.mscale_all_dim and not rope.mscale else None
