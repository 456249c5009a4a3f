"""What Megatron's tensor-parallel ranks divide evenly. Imports no torch."""

from collections.abc import Iterator

from tandem.layout.shapes import ModelShapes


def divided_by_tensor(shapes: ModelShapes, tensor: int) -> Iterator[tuple[str, int]]:
    """Yields what ``tensor`` ranks divide, and how much there is of it.

    With a multiple of the query groups as ranks, several ranks compute with the same key-value heads, and the rows of queries, keys and values are divided
    instead of the groups."""
    groups, experts = shapes.num_key_value_heads, shapes.experts
    if tensor > groups and tensor % groups == 0:
        yield "rows of queries, keys and values", shapes.qkv_size
    elif shapes.latent is None:
        yield "query groups (num_key_value_heads)", groups
    yield "num_attention_heads", shapes.num_attention_heads
    yield "intermediate_size", shapes.intermediate_size
    if experts is not None:
        yield "experts' intermediate_size", experts.intermediate_size
        if experts.shared_intermediate_size:
            yield "shared experts' intermediate size", experts.shared_intermediate_size
