"""Writes the folder of a draft head that was trained, which one rank of several may have alone."""

from pathlib import Path

import torch

from tandem.kernels.reference import ReferenceKernels
from tandem.layout.shapes import ModelShapes
from tandem.model.eagle3_folder import eagle3_tensors, fill_eagle3, load_eagle3, save_eagle3
from tandem.trainer.backend import TrainedState
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints


def export_draft(
    checkpoints: ReplicaCheckpoints, state: TrainedState, target: ModelShapes, start: Path, folder: Path, dtype: torch.dtype, *, of: str = ""
) -> None:
    """Writes the head of ``state`` with weights of ``dtype`` to ``folder``, on the first rank, unless it exists. What is not trained, the tokens that the head
    can propose and an embedding of its own, is that of the folder ``start``. A head that is on another rank is read from the newest checkpoint, which must be
    of the current step. ``of``: the name that it is saved by beside another model."""
    if not state.replica.ranks.is_first or folder.exists():
        return
    tensors = state.whole()
    trained = dict(checkpoints.whole_weights(state, of) if tensors is None else tensors)
    head = load_eagle3(start, ReferenceKernels(), target, dtype=state.replica.model.dtype)
    fill_eagle3(head, eagle3_tensors(head) | trained)
    save_eagle3(head, folder, dtype=dtype)
