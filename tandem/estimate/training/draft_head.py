"""The bytes of the ranks that train a draft head beside a frozen model (``model.draft_decoder``). Imports no torch.

One rank of each replica has the head (``trainer.parallel.draft_pipeline``). The target has weights alone; its forward pass keeps nothing. The head has
gradients and moments. Its one layer is run once for each position of a draft, and the backward pass begins when all of them have run: what each saved is there
at once, and so is the target's distribution, which the loss compares with.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from tandem.config.parallel import ParallelConfig
from tandem.estimate.model_bytes import DTYPE_BYTES, trained_bytes
from tandem.estimate.processes import COMPILER_BYTES, rank_process_bytes
from tandem.estimate.training.held_parameters import held_on_span
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.literature import CONTEXT_BYTES, FRAGMENTATION
from tandem.estimate.training.own_trainer import (
    element_bytes,
    end_bytes,
    largest_layer_bytes_per_token,
    trainer_of,
    whole_bytes,
)
from tandem.estimate.training.stage_bytes import StageBytes
from tandem.estimate.training_bytes import checkpoint_bytes, state_bytes
from tandem.layout.eagle3 import AUX_LAYERS, Eagle3Shapes
from tandem.layout.parameters import parameter_count
from tandem.layout.pipeline_stages import Span
from tandem.layout.shapes import ModelShapes

KEPT_SHARE = 0.2
"""As ``own_trainer.KEPT_SHARE``, measured with four models of 1M to 17M parameters: tensors of many sizes come and go."""
LOGIT_COPIES = 4
"""Tensors as large as the logits of one position of a draft while they are compared: the distribution in the order of that position and, in the forward pass,
logits, their logarithms of the softmax and the product with the distribution; in the backward pass the logarithms, their gradient and that of the logits."""


class UpdateBytes(NamedTuple):
    """Bytes of an update of a draft head: what its forward pass has ``saved`` when the backward pass begins, and what is ``working`` besides."""

    saved: float
    working: float


def update_bytes(target: ModelShapes, head: Eagle3Shapes, steps: int, layout: TrainingLayout) -> UpdateBytes:
    """Returns the bytes of an update of ``head`` for ``steps`` positions with the states of ``target``, in micro-batches of ``layout.pass_tokens`` tokens in
    sequences of ``layout.sequence``, all of which are learned. The rank that has the head has all of it, however the mesh divides the target."""
    each, tokens, alone = element_bytes(layout), layout.pass_tokens, replace(layout, parallel=ParallelConfig())
    states, read = each * target.hidden_size * tokens, AUX_LAYERS + (not head.own_embedding)
    saved = tokens * (steps * _of_position(head, alone) + 4 * head.draft_vocab_size)
    saved += tokens * (steps - 1) * later_attention_bytes(head.layer, layout.sequence, each) + read * states
    logits = 4 * tokens * head.draft_vocab_size
    # What the forward pass holds beside what is saved: the target's states and a layer of it, and later the logits.
    forward = (1 + read) * states + LOGIT_COPIES * logits
    return UpdateBytes(saved, max(forward, LOGIT_COPIES * logits, tokens * largest_layer_bytes_per_token(target, alone) - saved))


def stage_bytes(
    target: ModelShapes, head: Eagle3Shapes, steps: int, layout: TrainingLayout, spans: Sequence[Span], *, is_first: bool = True
) -> StageBytes:
    """Returns the bytes of a rank that has ``spans`` of the layers of ``target``, and ``head`` if the last one is among them and the rank ``is_first`` of its
    tensor-parallel ranks; as ``update_bytes``."""
    trainer, parallel, on_cpu = trainer_of(layout), layout.parallel, layout.on_cpu
    size, trained, has_head = DTYPE_BYTES[trainer.dtype], head.trained, spans[-1].is_last and is_first
    weights = size * sum(held_on_span(target, span, parallel.tensor, parallel.expert).total for span in spans)
    rounded = not on_cpu and trainer.precision != "fp32"
    gradients = optimizer = of_head = staged = reduced = 0
    saved, working = 0.0, float(layout.pass_tokens * largest_layer_bytes_per_token(target, layout) / parallel.tensor)
    if has_head:
        of_head, numbers = size * parameter_count(trained), head.own_embedding * head.layer.vocab_size * head.layer.hidden_size
        weights += of_head + size * numbers
        gradients = trained_bytes(trained, trainer.dtype) // (parallel.data if parallel.zero >= 2 else 1)
        optimizer = state_bytes(trained, trainer) // (parallel.data if parallel.zero else 1)
        saved, working = update_bytes(target, head, steps, layout)
        staged = checkpoint_bytes(trained, trainer) // parallel.data if on_cpu else 0
        # All of it is one bucket, sent and received.
        reduced = 2 * of_head if parallel.data > 1 else 0
    parameters, master = weights, 0
    if rounded:
        # Rounded beside the weights: the head's until their backward pass, the target's one at a time.
        parameters, master = of_head // 2, weights
    context = rank_process_bytes(trainer, layout.is_forked) + COMPILER_BYTES * has_head if on_cpu else CONTEXT_BYTES
    return StageBytes(
        parameters, gradients, optimizer, master, saved=saved, working=working, logits=0, gathered=0, reduced=reduced,
        buffers=_sent_bytes(target, head, layout, spans), kept=KEPT_SHARE if on_cpu else FRAGMENTATION, keeps_states=on_cpu, context=context, staged=staged,
    )  # fmt: skip


def _sent_bytes(target: ModelShapes, head: Eagle3Shapes, layout: TrainingLayout, spans: Sequence[Span]) -> float:
    """Returns the bytes of the states that wait between the stages ``spans`` and their neighbours: two micro-batches that arrive, and as many that leave as a
    rank is ahead of the next one at most (``parallel.pipeline``)."""
    parallel = layout.parallel
    if parallel.pipeline == 1:
        return 0.0
    rows = layout.pass_tokens / (parallel.tensor if layout.shares_tokens else 1)
    ahead = min(layout.micro_batches, 2 * parallel.pipeline * parallel.virtual_stages)
    states = sum(2 * head.travelling(span.start) for span in spans if not span.is_first)
    states += max((ahead * head.travelling(span.stop) for span in spans if not span.is_last), default=0)
    return rows * target.hidden_size * DTYPE_BYTES[trainer_of(layout).dtype] * states


def _of_position(head: Eagle3Shapes, layout: TrainingLayout) -> float:
    """Returns the bytes that the head saves for one token at one position of a draft: those of a layer and of the norm behind it, the second half of what its
    queries, keys and values read, the input of the norm before that, and the rows whose logits are compared."""
    size = element_bytes(layout) * head.layer.hidden_size
    return whole_bytes(head.layer, 0, layout).of_rank(layout) + end_bytes(head.layer, layout) + 3 * size


def later_attention_bytes(layer: ModelShapes, sequence: int, element: int) -> float:
    """Returns the bytes that attention saves beside that for one token from the second position on, where it is written out: the shares of all tokens of its
    ``sequence`` before and after they are arranged for the product with the values, and queries, keys and values, of ``element`` bytes a number, by heads."""
    return 4.0 * 2 * sequence * layer.num_attention_heads + element * layer.qkv_size
