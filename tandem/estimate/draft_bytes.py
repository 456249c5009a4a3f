"""Predicts the bytes of a draft head that a trainer trains beside the policy. Imports no torch."""

from dataclasses import replace
from typing import NamedTuple

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import DTYPE_BYTES, optimizer_bytes, weight_bytes
from tandem.estimate.processes import COMPILER_BYTES
from tandem.estimate.training.draft_head import LOGIT_COPIES, later_attention_bytes
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import saved_by_stage
from tandem.estimate.training_bytes import head_bytes
from tandem.layout.shapes import ModelShapes


class DraftBytes(NamedTuple):
    """``held`` in every phase: weights, gradients, moments, the staged copy of a checkpoint, and torch's compiler; ``working``: what its update needs
    besides; ``published``: its share of a weight buffer."""

    held: int = 0
    working: int = 0
    published: int = 0


def draft_bytes(draft: ModelShapes, trainer: TrainerConfig, parallel: ParallelConfig, tokens: int, draft_steps: int, sequence: int) -> DraftBytes:
    """Returns the bytes of the head ``draft`` (``Eagle3Shapes.trained``) with micro-batches of ``tokens`` in sequences of up to ``sequence``: what each of the
    positions of a draft saves for its backward pass with the policy's distributions, and the logits of one (as ``training.draft_head``)."""
    own = replace(trainer, recompute="none", offload="none", offload_activations="none", optimizer="adamw", lora=None)
    weights, moments = weight_bytes(draft, own.dtype), optimizer_bytes(draft, own.optimizer, own.dtype)
    saved = max(saved_by_stage(draft, layout_of_trainer(own, parallel, tokens)))
    compiler = 0 if trainer.recompute == "full" else COMPILER_BYTES
    labels = 4 * tokens * dict(draft.own_parameters)["lm_head.weight"][0]
    later = round(later_attention_bytes(draft, sequence, DTYPE_BYTES[own.dtype]))
    logits = max(LOGIT_COPIES * labels, head_bytes(draft, tokens, parallel))
    working = draft_steps * (saved + labels) + (draft_steps - 1) * tokens * later + logits
    return DraftBytes(3 * weights + 2 * moments + compiler, working, weights)
