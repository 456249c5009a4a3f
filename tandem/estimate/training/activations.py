"""Bytes of the activations of one pass on a GPU, layer by layer. Imports no torch.

The counts are those of Korthikanti et al. (2022), "Reducing Activation Recomputation in Large Transformer Models", for any heads, inner size and mixture of
experts: a tensor that the backward pass needs counts once, in the precision of the products. Attention is fused (Dao et al., 2022): it saves its output and
a logarithm per head instead of the scores, whose 5 a s / h is therefore 0 unless ``layout.attention`` is ``unfused``.
"""

from dataclasses import dataclass

from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.linear_attention import saved_in_chunks
from tandem.layout.lm_head import gpu_logits_bytes
from tandem.layout.shapes import ModelShapes

LOG_SUM_EXP_BYTES = 4
WHOLE_LOGIT_BYTES, PARALLEL_LOGIT_BYTES = {"fp32": 12, "bf16": 8}, 16
"""Of a logit where the head is not chunked, by ``loss_precision``: its logarithm of the softmax, the gradient of that and the gradient of the logit, each in
fp32; in 16 bits also the logit itself, which nothing else replaces. Where PyTorch's tensor-parallel ranks divide the vocabulary: beside logarithm and gradient
the exponential and the sum of both (torch/distributed/tensor/parallel/loss.py, ``_nll_loss_and_log_softmax_backward``)."""


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Bytes of a layer for one token. ``replicated``: what tensor-parallel ranks each have whole unless they divide the tokens too; ``divided``: what they
    divide in any case; ``gathered``: what each has whole in any case."""

    replicated: float
    divided: float
    gathered: float = 0.0

    def of_rank(self, layout: TrainingLayout) -> float:
        """Returns the bytes of one rank for one token."""
        tensor = layout.parallel.tensor
        return self.replicated / (tensor if layout.shares_tokens else 1) + self.divided / tensor + self.gathered


def element_bytes(layout: TrainingLayout) -> int:
    """Returns the bytes of an activation: those of the products, which fp8 keeps in 16 bits."""
    return 4 if layout.precision == "fp32" else 2


def pass_tokens(layout: TrainingLayout) -> float:
    """Returns the tokens of a micro-batch on one rank."""
    return layout.micro_batch * layout.sequence / layout.parallel.context


def is_by_operation(layout: TrainingLayout) -> bool:
    """Returns whether ``selective`` chooses operations of a whole layer. With ZeRO 3, where the matrices are not divided, the word means PyTorch's selective
    activation checkpointing, which keeps the outputs of attention and of every other matrix product; elsewhere Korthikanti's, which keeps all but the
    scores."""
    return layout.recompute == "selective" and layout.parallel.zero == 3


def saved_bytes(shapes: ModelShapes, layer: int, layout: TrainingLayout, *, dropout: bool = False) -> LayerBytes:
    """Returns what a forward pass saves of ``layer`` for its backward pass. ``dropout``: masks of one byte after attention, after the MLP and, without fused
    attention, of the scores."""
    each, hidden = element_bytes(layout), shapes.hidden_size
    if layout.recompute == "full":
        return LayerBytes(each * hidden, 0)
    if is_by_operation(layout):
        return _by_operation(shapes, layer, each)
    kept, fused = layout.recompute == "none", layout.fused_attention
    return whole_layer_bytes(shapes, layer, each, layout.sequence if kept and not fused else 0, keeps_sums=kept and fused, dropout=dropout)


def whole_layer_bytes(
    shapes: ModelShapes, layer: int, each: int, score_tokens: int = 0, *, keeps_sums: bool = True, dropout: bool = False
) -> LayerBytes:
    """Returns the bytes of a layer without recomputation. ``score_tokens``: keys whose scores, softmax and mask each query keeps."""
    hidden = shapes.hidden_size
    # The inputs of the norms, and what they return: the inputs of the first products.
    replicated = 2.0 * len(shapes.layer_norms) * each * hidden + (2 * hidden if dropout else 0)
    linear = shapes.linear_attention_of(layer)
    if linear is None:
        divided = float(each * (shapes.qkv_size + shapes.attended_size * (3 if shapes.attention_gate else 1)))
        divided += LOG_SUM_EXP_BYTES * shapes.num_attention_heads if keeps_sums else 0
        divided += shapes.num_attention_heads * score_tokens * (2 * each + 1)
    else:
        divided = saved_in_chunks(linear, each)
    if shapes.latent is not None:
        replicated += each * shapes.latent.compressed_size
    experts = shapes.experts_of(layer)
    if experts is None:
        # gate and up, or up alone, and what the activation function returns.
        divided += each * shapes.mlp_matrices * shapes.intermediate_size
    else:
        routed = experts.num_experts_per_tok
        divided += each * 3 * experts.visited_size
        # Sorted by expert, each token's input and output are there once for each expert that it visits; the router has probabilities in fp32.
        replicated += each * 2 * routed * hidden + 8 * experts.num_experts
    return LayerBytes(replicated, divided)


def _by_operation(shapes: ModelShapes, layer: int, each: int) -> LayerBytes:
    experts, hidden = shapes.experts_of(layer), shapes.hidden_size
    linear, attended = shapes.linear_attention_of(layer), each * shapes.attended_size + LOG_SUM_EXP_BYTES * shapes.num_attention_heads
    if linear is not None:
        # Its recurrence is none of the operations that are kept.
        outputs, attended = [(matrix.outputs, matrix.by_head) for matrix in linear.matrices(hidden)[:-1]], 0
    elif shapes.latent is None:
        outputs = [(size, True) for size in (shapes.query_rows, shapes.key_value_size, shapes.key_value_size)]
    else:
        outputs = [(matrix.outputs, matrix.by_head) for matrix in shapes.latent.matrices(hidden, shapes.num_attention_heads)]
    outputs.append((hidden, False))
    if experts is None:
        outputs += [*[(shapes.intermediate_size, True)] * (shapes.mlp_matrices - 1), (hidden, False)]
    elif experts.shared_intermediate_size:
        # Grouped products are none of the operations that are kept.
        outputs += [*[(experts.shared_intermediate_size, True)] * 2, (hidden, False)]
    kept = outputs[::2]
    divided = each * sum(size for size, is_divided in kept if is_divided) + attended
    return LayerBytes(each * (hidden + sum(size for size, is_divided in kept if not is_divided)), divided)


def working_bytes(shapes: ModelShapes, layer: int, layout: TrainingLayout) -> float:
    """Returns what a rank holds for one token, beside what is saved, while the backward pass is in ``layer``: what is computed again, the gradients of the
    layer's widest tensors and, where the tokens are divided, the gathered input of the products."""
    each, hidden = element_bytes(layout), shapes.hidden_size
    experts = shapes.experts_of(layer)
    inner = shapes.intermediate_size if experts is None else experts.visited_size
    gradients = LayerBytes(2 * each * hidden, each * shapes.mlp_matrices * inner).of_rank(layout)
    gathered = 2 * each * hidden if layout.shares_tokens else 0
    if layout.recompute == "full" or is_by_operation(layout):
        whole = whole_layer_bytes(shapes, layer, each).of_rank(layout)
        return gradients + gathered + whole - saved_bytes(shapes, layer, layout).of_rank(layout)
    return gradients + gathered


def end_bytes(shapes: ModelShapes, layout: TrainingLayout, *, is_first: bool, is_last: bool) -> float:
    """Returns what the ends of the model save for one token: the embedding's output; the final norm's input and output."""
    each = element_bytes(layout)
    return LayerBytes(each * shapes.hidden_size * (is_first + 2 * is_last), 0).of_rank(layout)


def logit_bytes(shapes: ModelShapes, layout: TrainingLayout) -> float:
    """Returns the bytes of the logits of a micro-batch on a rank of the last stage, at the worst moment."""
    if layout.chunked_head:
        return gpu_logits_bytes(int(pass_tokens(layout)), -(-shapes.head_rows // layout.parallel.tensor))
    rows = shapes.head_rows / layout.parallel.tensor
    if layout.whole_vocabulary and layout.parallel.tensor > 1:
        # Beside its own part, which was gathered.
        return pass_tokens(layout) * (element_bytes(layout) * rows + shapes.head_rows * WHOLE_LOGIT_BYTES[layout.loss_precision])
    return pass_tokens(layout) * rows * (PARALLEL_LOGIT_BYTES if layout.copies_collectives else WHOLE_LOGIT_BYTES[layout.loss_precision])


def freed_logit_bytes(shapes: ModelShapes, layout: TrainingLayout) -> float:
    """Returns the bytes of the 16-bit logits of a loss in fp32, which the caching allocator keeps: nothing that follows fits their place."""
    if layout.chunked_head or layout.loss_precision == "bf16" or layout.precision == "fp32":
        return 0.0
    return pass_tokens(layout) * element_bytes(layout) * shapes.head_rows / layout.parallel.tensor


def kept_logit_bytes(shapes: ModelShapes, layout: TrainingLayout) -> float:
    """Returns the bytes of the logits on a rank of the last stage while the layers' backward pass runs: of a loss in 16 bits the logits, which a training loop
    still names (torchtitan deletes them before)."""
    if layout.chunked_head or layout.loss_precision == "fp32":
        return 0.0
    return pass_tokens(layout) * element_bytes(layout) * shapes.head_rows / (1 if layout.whole_vocabulary else layout.parallel.tensor)
