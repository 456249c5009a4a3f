"""Every fault point of a run of the tiny recipe.

The pod (the controller, and with it everything) has a point before and after each journal commit and each state
transition; a worker before and after each of its calls; a shim before and after each call that it receives, including
those that it forwards. The list follows from the design figure and the recipe, not from a run.
"""

from collections.abc import Iterator

from tandem.runtime.process.faults import Fault

STEPS = 6
EVERY = 2
"""The interval of evaluations and checkpoints, which also occur before the first and after the last step."""

_BEFORE_STEPS = range(STEPS)
_SERVED = range(STEPS + 1)
_EVALUATED = range(0, STEPS + 1, EVERY)

TRAINER_CALLS = {
    "create_model": (0,), "load": (0,), "save": _EVALUATED,
    "offload": _SERVED, "convert": _SERVED, "register": _SERVED,
    "onload": _BEFORE_STEPS, "inference": _BEFORE_STEPS, "train": _BEFORE_STEPS,
    "finish_save": (STEPS,), "export": (STEPS,),
}  # fmt: skip
TRAINER_SHIM_CALLS = {**TRAINER_CALLS, "start_worker": (0,), "allocate": (0,), "memory": _BEFORE_STEPS}
ROLLOUT_CALLS = {"start_engine": (0,), "update_weight": _SERVED, "rollout": _SERVED}
ROLLOUT_SHIM_CALLS = {**ROLLOUT_CALLS, "start_worker": (0,), "memory": _SERVED}
STATES = {
    "start": (0,), "checkpoint": _EVALUATED, "offload": _SERVED, "convert": _SERVED, "register": _SERVED,
    "start_engine": (0,), "update_weight": _SERVED, "wait_rollout": _SERVED, "evaluate": _EVALUATED,
    "rollout": _BEFORE_STEPS, "keep_engine": _BEFORE_STEPS, "onload": _BEFORE_STEPS, "inference": _BEFORE_STEPS,
    "train": _BEFORE_STEPS,
}  # fmt: skip
COMMITS = {
    "commit_checkpoint": _EVALUATED, "commit_evaluation": _EVALUATED, "commit_samples": _BEFORE_STEPS,
    "commit_scores": _BEFORE_STEPS,
}  # fmt: skip

POINTS = {
    "pod": {**STATES, **COMMITS},
    "trainer_worker": TRAINER_CALLS,
    "trainer_shim": TRAINER_SHIM_CALLS,
    "rollout_worker": ROLLOUT_CALLS,
    "rollout_shim": ROLLOUT_SHIM_CALLS,
}


def every_fault_point() -> Iterator[Fault]:
    """Yields all fault points in a fixed order."""
    for role, names in POINTS.items():
        for name, steps in names.items():
            for step in steps:
                for when in ("before", "after"):
                    yield Fault(role, when, name, step)
