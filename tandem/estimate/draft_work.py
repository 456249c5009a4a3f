"""The work of a training step of a draft head beside its frozen target (``model.draft_decoder``). Imports no torch."""

from tandem.estimate.model_bytes import DTYPE_BYTES
from tandem.estimate.time import Product, Work, elementwise_bytes, training_work
from tandem.estimate.training.layout import DraftTraining
from tandem.layout.eagle3 import AUX_LAYERS
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes

FORWARD_PASSES = 3
"""Of a forward and a backward pass."""
SCORE_PASSES = 20
"""Times that a share of attention is read or written, in fp32, where it is written out: forward it is computed, masked, put beside the later ones, scaled and
normalised, each read and written, and arranged for the product; backward as often, in the other direction."""


def draft_passes(target: ModelShapes, steps: int, waiting: int = 1) -> float:
    """Returns the forward passes of ``target`` that an update of a head of its sizes for ``steps`` positions is worth by its products: the target's own pass,
    and at each position a layer, forward and backward, and the head's logits, which are computed again for the backward pass. ``waiting``: as of
    ``draft_work``."""
    head = target.vocab_size * target.hidden_size
    whole = parameter_count(target) - (0 if target.tie_word_embeddings else head)
    layer = (whole - head) / target.num_hidden_layers
    return 1.0 + waiting * steps * (FORWARD_PASSES * layer + (1 + FORWARD_PASSES) * head) / whole


def draft_work(
    target: ModelShapes, draft: DraftTraining, dtype: str, tokens: float, sequence_tokens: float, micro_batch_tokens: int, waiting: int = 1
) -> Work:
    """Returns the work of one step on ``tokens`` tokens, all of which are learned, in sequences of ``sequence_tokens``: the target's forward pass and its
    distribution; at each position of a draft the head's layer forward and backward, and its logits twice; and an update of the head. ``waiting``: ranks that
    compute the target together, of which one has the head: the head's work counts as often, so that a division by all ranks gives the seconds of that one."""
    (head, steps), rows = draft, max(1, min(micro_batch_tokens, round(tokens)))
    frozen = training_work(target, dtype, tokens, sequence_tokens, micro_batch_tokens, 1, 0)
    layer, hidden, times = head.layer, head.layer.hidden_size, tokens / rows
    products = dict(frozen.products)

    def add(product: Product, count: float) -> None:
        products[product] = products.get(product, 0.0) + count * times * waiting

    add(Product(rows, hidden, AUX_LAYERS * target.hidden_size, trains=True), 1)
    for outputs, inputs in (
        (layer.qkv_size, 2 * hidden), (hidden, layer.query_size), (2 * layer.intermediate_size, hidden), (hidden, layer.intermediate_size),
        (head.draft_vocab_size, hidden),
    ):  # fmt: skip
        add(Product(rows, outputs, inputs, trains=True), steps)
    add(Product(rows, head.draft_vocab_size, hidden), steps)
    each = DTYPE_BYTES[dtype]
    scores = tokens * sequence_tokens * layer.num_attention_heads
    moved = 7.0 * each * parameter_count(head.trained)
    moved += steps * (FORWARD_PASSES * tokens * elementwise_bytes(layer, each) + 4.0 * tokens * 12 * head.draft_vocab_size)
    moved += 4.0 * SCORE_PASSES * (steps - 1) * scores
    # A causal half at the first position, in one kernel; whole products later.
    attention = FORWARD_PASSES * layer.query_size * 4 * tokens * sequence_tokens * (0.5 + (steps - 1))
    moved = frozen.moved_bytes + 4.0 * tokens * 2 * target.vocab_size + waiting * moved
    return Work(products, frozen.attention_flops + waiting * attention, moved)
