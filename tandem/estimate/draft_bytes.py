"""Predicts the bytes of a draft head that a trainer trains beside the policy. Imports no torch."""

from dataclasses import replace
from typing import NamedTuple

from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.model_bytes import optimizer_bytes, weight_bytes
from tandem.estimate.processes import COMPILER_BYTES
from tandem.estimate.training.draft_head import update_bytes
from tandem.estimate.training.layout import DraftTraining, layout_of_trainer
from tandem.estimate.training_bytes import checkpoint_bytes
from tandem.layout.shapes import ModelShapes


class DraftBytes(NamedTuple):
    """``held`` by each rank that has the head, in every phase: weights, gradients, moments, and on CPUs the staged copy of a checkpoint and torch's compiler;
    ``working``: what its update needs besides; ``published``: its share of a weight buffer; ``staged``: beside GPUs, that copy of all ranks in the host's
    memory."""

    held: int = 0
    working: int = 0
    published: int = 0
    staged: int = 0


def draft_bytes(
    policy: ModelShapes, draft: DraftTraining | None, trainer: TrainerConfig, parallel: ParallelConfig, tokens: int, sequence: int, *, on_cpu: bool
) -> DraftBytes:
    """Returns the bytes of ``draft`` beside ``policy``, whose hidden states it reads, with micro-batches of ``tokens`` in sequences of up to ``sequence``; none
    of ``None``."""
    if draft is None:
        return DraftBytes()
    own = replace(trainer, recompute="none", offload="none", offload_activations="none", optimizer="adamw", lora=None)
    layout = replace(layout_of_trainer(own, parallel, tokens, on_cpu=on_cpu), sequence=sequence)
    weights, update = weight_bytes(draft.head.trained, own.dtype), update_bytes(policy, *draft, layout)
    compiler = COMPILER_BYTES if on_cpu and trainer.recompute != "full" else 0
    held, staged = 2 * weights + optimizer_bytes(draft.head.trained, own.optimizer, own.dtype), checkpoint_bytes(draft.head.trained, own)
    # Products of 16 bits read rounded weights.
    rounded = 0 if on_cpu or own.precision == "fp32" else weights // 2
    return DraftBytes(held + (staged + compiler if on_cpu else 0), round(update.saved + update.working) + rounded, weights, 0 if on_cpu else staged)
