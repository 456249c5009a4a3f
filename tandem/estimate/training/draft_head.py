"""The bytes of the process that trains a draft head beside a frozen model (``model.draft_decoder``). Imports no torch.

The target has weights alone; its forward pass keeps nothing. The head has gradients and moments. Its one layer is run once for each position of a draft, and
the backward pass begins when all of them have run: what each saved is there at once, and so is the target's distribution, which the loss compares with.
"""

from typing import NamedTuple

from tandem.estimate.model_bytes import DTYPE_BYTES, trained_bytes, weight_bytes
from tandem.estimate.processes import COMPILER_BYTES, rank_process_bytes
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.literature import CONTEXT_BYTES, FRAGMENTATION
from tandem.estimate.training.own_trainer import (
    element_bytes,
    end_bytes,
    largest_layer_bytes_per_token,
    staging_bytes,
    trainer_of,
    whole_bytes,
)
from tandem.estimate.training.stage_bytes import StageBytes
from tandem.estimate.training_bytes import state_bytes
from tandem.layout.eagle3 import AUX_LAYERS, Eagle3Shapes
from tandem.layout.parameters import parameter_count
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
    sequences of ``layout.sequence``, all of which are learned."""
    each, tokens = element_bytes(layout), layout.pass_tokens
    states = each * target.hidden_size * tokens
    saved = tokens * (steps * _of_position(head, layout) + 4 * head.draft_vocab_size)
    saved += tokens * (steps - 1) * later_attention_bytes(head.layer, layout.sequence, each) + AUX_LAYERS * states
    logits = 4 * tokens * head.draft_vocab_size
    # What the forward pass holds beside what is saved: the target's states and a layer of it, and later the logits.
    forward = (1 + AUX_LAYERS) * states + LOGIT_COPIES * logits
    return UpdateBytes(saved, max(forward, LOGIT_COPIES * logits, tokens * largest_layer_bytes_per_token(target, layout) - saved))


def stage_bytes(target: ModelShapes, head: Eagle3Shapes, steps: int, layout: TrainingLayout) -> StageBytes:
    """Returns the bytes of the one rank that trains ``head`` beside ``target``, as ``update_bytes``."""
    trainer = trainer_of(layout)
    size, trained, table = DTYPE_BYTES[trainer.dtype], head.trained, head.own_embedding * head.layer.vocab_size * head.layer.hidden_size
    weights = weight_bytes(target, trainer.dtype) + size * (parameter_count(trained) + table)
    saved, working = update_bytes(target, head, steps, layout)
    parameters, master = weights, 0
    if not layout.on_cpu and trainer.precision != "fp32":
        # Rounded beside the weights: the head's until their backward pass, the target's one at a time.
        parameters, master = trained_bytes(trained, trainer.dtype) // 2, weights
    on_cpu = layout.on_cpu
    return StageBytes(
        parameters, trained_bytes(trained, trainer.dtype), state_bytes(trained, trainer), master, saved=saved, working=working, logits=0, gathered=0, reduced=0,
        buffers=0, kept=KEPT_SHARE if on_cpu else FRAGMENTATION, keeps_states=on_cpu,
        context=rank_process_bytes(trainer, layout.is_forked) + COMPILER_BYTES if on_cpu else CONTEXT_BYTES,
        staged=staging_bytes(trained, trainer, layout.parallel) if on_cpu else 0,
    )  # fmt: skip


def _of_position(head: Eagle3Shapes, layout: TrainingLayout) -> float:
    """Returns the bytes that the head saves for one token at one position of a draft: those of a layer and of the norm behind it, the second half of what its
    queries, keys and values read, the input of the norm before that, and the rows whose logits are compared."""
    size = element_bytes(layout) * head.layer.hidden_size
    return whole_bytes(head.layer, 0, layout).of_rank(layout) + end_bytes(head.layer, layout) + 3 * size


def later_attention_bytes(layer: ModelShapes, sequence: int, element: int) -> float:
    """Returns the bytes that attention saves beside that for one token from the second position on, where it is written out: the shares of all tokens of its
    ``sequence`` before and after they are arranged for the product with the values, and queries, keys and values, of ``element`` bytes a number, by heads."""
    return 4.0 * 2 * sequence * layer.num_attention_heads + element * layer.qkv_size
