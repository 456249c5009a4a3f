"""The work of a training step of all ranks of a mesh on a CPU, with the collectives between them. Imports no torch."""

from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import DTYPE_BYTES
from tandem.estimate.rl_work import forward_and_backward
from tandem.estimate.time import Product, Work, elementwise_bytes, training_work
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.layout.sharding import ShardSpec, local_shapes

LOGIT_BYTES = 88
"""Of a logit of a vocabulary-parallel head, in fp32 (``model.parallel.vocabulary_parallel``). Forward 48: its maximum is taken (4), it is subtracted (8) and
exponentiated (8), clamped (8) and multiplied (12) for the entropy, and both are summed (8); backward 40: divided, subtracted, exponentiated, negated and
multiplied, in place (8 each)."""


def mesh_work(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, tokens: float, sequence_tokens: float, most_tokens: int) -> Work:
    """Returns the work of a step on ``tokens`` tokens in sequences of ``sequence_tokens`` and micro-batches of at most ``most_tokens``.

    Matrices that tensor-parallel ranks divide are measured in their parts, whose products are less efficient; what they do not divide, the residual stream
    and its norms, each of them computes."""
    passes, replicas = forward_and_backward(trainer), parallel.data * parallel.context
    # Without ZeRO every rank that holds the same weights updates all of them.
    updates = 1 if parallel.zero else replicas
    if parallel.tensor == 1:
        work = training_work(shapes, trainer.dtype, tokens, sequence_tokens, most_tokens, passes, updates, 1)
    else:
        work = _divided(shapes, trainer, parallel, tokens, sequence_tokens, most_tokens, passes, updates)
    micro_batches = tokens / max(1.0, min(most_tokens, tokens))
    calls, sent = (sum(each) for each in zip(
        _of_tensor(shapes, trainer, parallel, tokens, micro_batches), _of_pipeline(shapes, trainer, parallel, tokens, micro_batches),
        _of_replicas(shapes, trainer, parallel, micro_batches), strict=True,
    ))  # fmt: skip
    return replace(work, calls=calls, sent_bytes=sent)


def _divided(
    shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, tokens: float, sequence_tokens: float, most_tokens: int, passes: float, updates: int
) -> Work:
    """Returns the work of tensor-parallel ranks beside their collectives."""
    ranks, each = parallel.tensor, DTYPE_BYTES[trainer.dtype]
    local = local_shapes(shapes, ShardSpec(size=ranks))
    own = training_work(local, trainer.dtype, tokens, sequence_tokens, most_tokens, passes, 0, 1)
    products: dict[Product, float] = {product: ranks * times for product, times in own.products.items()}
    moved = ranks * passes * tokens * elementwise_bytes(local, each, 1 / ranks if parallel.sequence_parallel else 1.0)
    moved += training_work(shapes, trainer.dtype, tokens, sequence_tokens, most_tokens, 0, updates).moved_bytes
    if shapes.language_head and not parallel.deterministic:
        # Logits are computed again in the backward pass.
        rows = max(1, min(most_tokens, round(tokens)))
        head = Product(rows, local.vocab_size, local.hidden_size)
        products[head] = products.get(head, 0.0) + ranks * tokens / rows
        moved += tokens * shapes.vocab_size * LOGIT_BYTES
    return Work(products, ranks * own.attention_flops, moved)


def _of_tensor(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, tokens: float, micro_batches: float) -> tuple[float, float]:
    """Returns the calls and the bytes of tensor-parallel ranks: of each layer two all-reduces forward and two backward, one of the embeddings, and one of the
    head's gradient, each a reduce-scatter and an all-gather. Sequence parallelism has one of the two in each of twice as many places."""
    ranks = parallel.tensor
    if ranks == 1:
        return 0.0, 0.0
    sums = (4 + 2 * (trainer.recompute == "full")) * shapes.num_hidden_layers + 2
    # Of the head, all ranks gather maxima and sums of each row, which are small.
    calls = (2 * sums + 2) * ranks * parallel.context * micro_batches
    return calls, 2 * sums * (ranks - 1) * tokens * shapes.hidden_size * DTYPE_BYTES[trainer.dtype]


def _of_pipeline(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, tokens: float, micro_batches: float) -> tuple[float, float]:
    """Returns those of pipeline ranks: every micro-batch goes through all borders of stages and back, sent and received."""
    borders = parallel.pipeline * parallel.virtual_stages - 1
    each = DTYPE_BYTES[trainer.dtype]
    if not borders:
        return 0.0, 0.0
    tied = 2 * each * shapes.vocab_size * shapes.hidden_size if shapes.tie_word_embeddings else 0
    return 4 * borders * micro_batches, 2 * borders * tokens * shapes.hidden_size * each + tied


def _of_replicas(shapes: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, micro_batches: float) -> tuple[float, float]:
    """Returns those of ranks with the same weights: gradients are reduced once, and with ZeRO 2 and 3 after every backward pass; gradients or weights are
    gathered once, and with ZeRO 3 weights before each forward and each backward pass (Rajbhandari et al., 2020, section 7)."""
    replicas = parallel.data * parallel.context
    if replicas == 1:
        return 0.0, 0.0
    own = micro_batches / replicas
    times = (own if parallel.zero >= 2 else 1.0) + (2 * own if parallel.zero == 3 else 1.0)
    buckets, size = shapes.num_hidden_layers / parallel.pipeline + 2, parameter_count(shapes) * DTYPE_BYTES[trainer.dtype]
    return times * parallel.world * buckets, times * (replicas - 1) * size
