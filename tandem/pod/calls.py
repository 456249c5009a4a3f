"""The names of the calls that a sidecar's worker answers. Imports no torch, as the shims that pass them on."""

from typing import Literal

TRAINER_CALLS = (
    "create_model", "export", "load", "measure", "inference", "compare", "train", "offload", "prefetch", "onload", "convert", "register", "save",
    "copy_checkpoint", "finish_save", "forget_local",
)  # fmt: skip
InferencePart = Literal["all", "rewards", "update"]
"""Which passes of other models an inference phase has: those that ``rewards`` need, those that the ``update`` needs, or both."""
MEASURED_CALLS = frozenset({"inference", "train", "rollout"})
"""The calls of which the controller records the memory of the worker at their end: the shim's reply has it."""
ROLLOUT_CALLS = ("start_engine", "stage_weight", "update_weight", "confirm_weight", "rollout", "sleep_engine", "weight_digests", "verify_engine")
LEARNED_CALLS = frozenset(
    {"inference", "compare", "train", "offload", "prefetch", "onload", "convert", "register", "update_weight", "confirm_weight", "rollout", "sleep_engine"}
)
"""The calls of a step, whose deadline follows the times of earlier steps. What reads a model or writes a checkpoint has the longest deadline."""
