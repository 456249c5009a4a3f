"""The figure's cycle as an explicit state machine: which state each sidecar may go to from where it is.

Trainer: ``train -> offload -> convert -> register -> update_weight -> wait_rollout -> onload -> train``.
Rollout: ``start_engine -> update_weight -> rollout -> terminate_engine -> start_engine``, or ``keep_engine -> update_weight``, or ``sleep_engine ->
update_weight``.
One step off (``rollout.max_staleness``), the rollout is in ``rollout`` while the trainer goes on to ``onload``, ``inference`` and ``train``; an engine that
dies meanwhile is started and updated again without the trainer.
If a step's samples are in the journal already, ``inference`` or ``train`` follows without a rollout between. Where a reward model scores each of several
rounds of rollout, ``offload`` and the next round follow ``inference``. Weights that arrive damaged are registered again. When the rollout sidecar
dies, the trainer goes from ``register`` or ``update_weight`` straight to ``onload``.
"""

from collections.abc import Mapping
from enum import StrEnum


class TrainerState(StrEnum):
    DOWN = "down"
    START = "start"
    TRAIN = "train"
    OFFLOAD = "offload"
    CONVERT = "convert"
    REGISTER = "register"
    UPDATE_WEIGHT = "update_weight"
    WAIT_ROLLOUT = "wait_rollout"
    ONLOAD = "onload"
    INFERENCE = "inference"
    CHECKPOINT = "checkpoint"


class RolloutState(StrEnum):
    DOWN = "down"
    START_ENGINE = "start_engine"
    UPDATE_WEIGHT = "update_weight"
    ROLLOUT = "rollout"
    EVALUATE = "evaluate"
    KEEP_ENGINE = "keep_engine"
    SLEEP_ENGINE = "sleep_engine"
    TERMINATE_ENGINE = "terminate_engine"


_T, _R = TrainerState, RolloutState

TRAINER_TRANSITIONS: Mapping[TrainerState, frozenset[TrainerState]] = {
    _T.DOWN: frozenset({_T.START}),
    _T.START: frozenset({_T.TRAIN, _T.INFERENCE, _T.OFFLOAD, _T.CHECKPOINT}),
    _T.TRAIN: frozenset({_T.TRAIN, _T.INFERENCE, _T.OFFLOAD, _T.CHECKPOINT}),
    _T.CHECKPOINT: frozenset({_T.OFFLOAD, _T.INFERENCE, _T.TRAIN}),
    _T.OFFLOAD: frozenset({_T.CONVERT}),
    _T.CONVERT: frozenset({_T.REGISTER}),
    _T.REGISTER: frozenset({_T.UPDATE_WEIGHT, _T.ONLOAD}),
    _T.UPDATE_WEIGHT: frozenset({_T.WAIT_ROLLOUT, _T.ONLOAD, _T.REGISTER}),
    _T.WAIT_ROLLOUT: frozenset({_T.ONLOAD}),
    _T.ONLOAD: frozenset({_T.INFERENCE, _T.TRAIN, _T.OFFLOAD, _T.CHECKPOINT}),
    _T.INFERENCE: frozenset({_T.TRAIN, _T.INFERENCE, _T.OFFLOAD}),
}

ROLLOUT_TRANSITIONS: Mapping[RolloutState, frozenset[RolloutState]] = {
    _R.DOWN: frozenset({_R.START_ENGINE}),
    _R.START_ENGINE: frozenset({_R.UPDATE_WEIGHT}),
    _R.UPDATE_WEIGHT: frozenset({_R.ROLLOUT, _R.EVALUATE, _R.UPDATE_WEIGHT}),
    _R.EVALUATE: frozenset({_R.ROLLOUT, _R.EVALUATE, _R.KEEP_ENGINE, _R.SLEEP_ENGINE, _R.TERMINATE_ENGINE}),
    _R.ROLLOUT: frozenset({_R.ROLLOUT, _R.EVALUATE, _R.KEEP_ENGINE, _R.SLEEP_ENGINE, _R.TERMINATE_ENGINE}),
    _R.KEEP_ENGINE: frozenset({_R.UPDATE_WEIGHT, _R.TERMINATE_ENGINE}),
    _R.SLEEP_ENGINE: frozenset({_R.UPDATE_WEIGHT}),
    _R.TERMINATE_ENGINE: frozenset({_R.START_ENGINE}),
}


def check_trainer(before: TrainerState, after: TrainerState) -> None:
    """Raise ``AssertionError`` for a transition that the figure does not have. A dead sidecar goes ``DOWN`` from anywhere."""
    assert after is TrainerState.DOWN or after in TRAINER_TRANSITIONS[before], f"trainer sidecar: {before} -> {after}"


def check_rollout(before: RolloutState, after: RolloutState) -> None:
    """As ``check_trainer``, for the rollout sidecar."""
    assert after is RolloutState.DOWN or after in ROLLOUT_TRANSITIONS[before], f"rollout sidecar: {before} -> {after}"
