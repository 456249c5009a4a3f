"""Every point of a run of the tiny recipe at which something can be killed.

The pod (the controller, and with it everything) has a point before and after each journal commit and each state
transition; a worker before and after each of its calls; a shim before and after each call that reaches it, its own
and those that it passes on. On a mesh each rank of the trainer has them, and those of the parts of an optimizer step and
of the writing of a checkpoint; each rank of the supervised fine-tuning has those of its phases. Written down from the
figure's cycle and the recipe's numbers, not taken from a run.
"""

from collections.abc import Iterable, Iterator, Mapping

from tandem.runtime.process.faults import Fault

STEPS = 6
EVERY = 2
"""The interval of evaluations and checkpoints, which also occur before the first and after the last step."""

Steps = Mapping[str, Iterable[int]]
"""The steps that have a point, by its name."""


def states(steps: int) -> Steps:
    before_steps, served, evaluated = range(steps), range(steps + 1), range(0, steps + 1, EVERY)
    return {
        "start": (0,), "checkpoint": evaluated, "offload": served, "convert": served, "register": served,
        "start_engine": (0,), "update_weight": served, "wait_rollout": served, "evaluate": evaluated,
        "rollout": before_steps, "keep_engine": before_steps, "onload": before_steps, "inference": before_steps,
        "train": before_steps,
    }  # fmt: skip


def commits(steps: int) -> Steps:
    evaluated = range(0, steps + 1, EVERY)
    return {
        "commit_checkpoint": evaluated, "commit_evaluation": evaluated, "commit_samples": range(steps), "commit_scores": range(steps),
    }  # fmt: skip


def trainer_calls(steps: int) -> Steps:
    before_steps, served = range(steps), range(steps + 1)
    return {
        "create_model": (0,), "load": (0,), "save": range(0, steps + 1, EVERY),
        "offload": served, "convert": served, "register": served,
        "onload": before_steps, "inference": before_steps, "train": before_steps,
        "finish_save": (steps,), "export": (steps,),
    }  # fmt: skip


def rollout_calls(steps: int) -> Steps:
    return {"start_engine": (0,), "update_weight": range(steps + 1), "rollout": range(steps + 1)}


def points_of_the_pod(steps: int, trainer: Iterable[str] = ("trainer_worker",)) -> dict[str, Steps]:
    """By role. ``trainer``: the roles of the trainer's ranks."""
    return {
        "pod": {**states(steps), **commits(steps)},
        **{role: trainer_calls(steps) for role in trainer},
        "trainer_shim": {**trainer_calls(steps), "start_worker": (0,), "allocate": (0,), "memory": range(steps)},
        "rollout_worker": rollout_calls(steps),
        "rollout_shim": {**rollout_calls(steps), "start_worker": (0,), "memory": range(steps + 1)},
    }


def every_fault_point() -> Iterator[Fault]:
    """In a fixed order."""
    return around(points_of_the_pod(STEPS))


def around(points: Mapping[str, Steps]) -> Iterator[Fault]:
    for role, names in points.items():
        for name, steps in names.items():
            for step in steps:
                for when in ("before", "after"):
                    yield Fault(role, when, name, step)


# -- on a mesh -----------------------------------------------------------------------------------------------------------

PARTS_OF_A_STEP = ("forward", "backward", "reduce", "optimizer")
WRITING = ("checkpoint_prepare", "checkpoint_write", "checkpoint_manifest", "checkpoint_verify", "checkpoint_commit")


def every_fault_point_of_a_mesh(ranks: int, steps: int, sft_steps: int) -> Iterator[Fault]:
    """In a fixed order. ``rankN``: of the supervised fine-tuning."""
    trainer = ["trainer_worker", *(f"trainer_rank{rank}" for rank in range(1, ranks))]
    yield from around(points_of_the_pod(steps, trainer))
    for rank in range(ranks):
        yield from parts_of_steps(trainer[rank], range(steps), range(0, steps + 1, EVERY))
        role, saved = f"rank{rank}", (0, sft_steps)
        yield from around({role: {"checkpoint": saved, "train": range(sft_steps)}})
        yield from parts_of_steps(role, range(sft_steps), saved)
        yield from (Fault(role, "before", "data", step) for step in range(1, sft_steps + 1))
        yield from (Fault(role, "before", "load", 0), Fault(role, "before", "export", sft_steps))


def parts_of_steps(role: str, steps: Iterable[int], saved: Iterable[int]) -> Iterator[Fault]:
    """The parts of ``steps``, and of the writing of the checkpoints of the steps ``saved``."""
    yield from (Fault(role, "before", name, step) for step in steps for name in PARTS_OF_A_STEP)
    yield from around({role: dict.fromkeys(WRITING, saved)})
    yield from (Fault(role, "after", name, step) for step in saved for name in ("checkpoint_stage", "checkpoint_prune"))


NAMED_ON_A_MESH = (
    "trainer_rank1:after:register:1",
    "trainer_rank3:before:register:2", "trainer_worker:after:save:2", "trainer_rank2:before:inference:1", "trainer_rank1:before:convert:2",
    "trainer_shim:before:train:1", "trainer_rank1:after:inference:1", "rollout_worker:after:update_weight:1", "pod:after:commit_scores:1",
    "rank2:before:load:0,trainer_rank2:before:load:0",
)  # fmt: skip
"""Points that are proved one by one."""
