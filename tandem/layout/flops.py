"""Floating-point operations of a training step as counted in the literature. Imports no torch.

Model FLOPs utilisation (Chowdhery et al., 2022, "PaLM", appendix B): 6 operations per parameter and token, and 12 L H Q T per token for
attention over T tokens, without a discount for the causal half. Recomputation and embedding look-ups are not counted.
"""

from collections.abc import Iterable, Sequence

from tandem.layout.eagle3 import EMBEDDING, FROM_TARGET, Eagle3Shapes, eagle3_parameters
from tandem.layout.shapes import ModelShapes


def matrix_parameters(shapes: ModelShapes) -> int:
    """Returns the weights of the matrices that a token is multiplied with: of experts those that it is routed to; the head, but not the
    embedding."""
    return shapes.head_rows * shapes.hidden_size + sum(layer_parameters(shapes, layer) for layer in range(shapes.num_hidden_layers))


def layer_parameters(shapes: ModelShapes, layer: int) -> int:
    """Returns the weights of ``matrix_parameters`` that ``layer`` has."""
    experts = shapes.experts_of(layer)
    if experts is None:
        return shapes.attention_weights(layer) + shapes.mlp_matrices * shapes.hidden_size * shapes.intermediate_size
    return shapes.attention_weights(layer) + shapes.hidden_size * (experts.num_experts + 3 * experts.visited_size + experts.shared_gate)


def step_flops(shapes: ModelShapes, lengths: Iterable[int], *, absorbed: bool = False) -> int:
    """Returns the operations of the forward and the backward pass of sequences of ``lengths`` tokens, each of which attends to its own
    tokens; a layer with linear attention has as many for each token, however many are before it. ``absorbed``: latent attention multiplies with compressed
    vectors, as Tandem's trainer does, instead of expanded keys and values; the matrix within
    heads is multiplied with as many numbers in both forms."""
    matrices, total = matrix_parameters(shapes), 0
    attended, linear = shapes.query_size + shapes.attended_size, shapes.linear_attention
    recurrent = 0 if linear is None else 3 * len(linear.layers) * linear.token_flops
    if absorbed and shapes.latent is not None:
        attended = shapes.num_attention_heads * shapes.latent.absorbed_size
    for length in lengths:
        seen = sum(min(length, shapes.window(layer) or length) for layer in range(shapes.num_hidden_layers) if shapes.linear_attention_of(layer) is None)
        # 12 L H Q T where queries, keys and values have heads of one size.
        total += length * (6 * matrices + 6 * attended * seen + recurrent)
    return total


def draft_step_flops(target: ModelShapes, head: Eagle3Shapes, steps: int, lengths: Sequence[int]) -> int:
    """Returns the operations of training ``head`` for ``steps`` positions of a draft beside ``target``, on sequences as in ``step_flops``: the target's forward
    pass; once what the head reads of the target's states, and at each position its layer and its logits, forward and backward."""
    matrices = {parameter.name: parameter.numel for parameter in eagle3_parameters(head) if len(parameter.shape) == 2 and parameter.name != EMBEDDING}
    read, attended = matrices.pop(FROM_TARGET), head.layer.query_size + head.layer.attended_size
    frozen = step_flops(target, lengths, absorbed=True) // 3
    return frozen + sum(6 * length * (read + steps * (sum(matrices.values()) + attended * length)) for length in lengths)
