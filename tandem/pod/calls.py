"""The names of the calls that a sidecar's worker answers. Imports no torch, as the shims that pass them on."""

TRAINER_CALLS = (
    "create_model", "export", "load", "inference", "train", "offload", "prefetch", "onload", "convert", "register", "save", "finish_save",
)  # fmt: skip
ROLLOUT_CALLS = ("start_engine", "update_weight", "rollout", "sleep_engine")
