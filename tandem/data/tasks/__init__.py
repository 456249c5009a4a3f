"""The tasks that a model can learn, and the function that makes a task from its section of the recipe."""

from tandem.config.task import VERIFIERS, TaskConfig
from tandem.data.tasks.addition import addition_task
from tandem.data.tasks.base import Demonstration, Task, TaskItem
from tandem.data.tasks.dataset import dataset_task
from tandem.data.tasks.programs import programs_task
from tandem.data.tasks.reasoning_gym import ReasoningGymTask
from tandem.data.tasks.sort import sort_task
from tandem.data.tasks.verifiers_task import verifiers_task

__all__ = ["Demonstration", "Task", "TaskItem", "make_task"]


def make_task(config: TaskConfig, seed: int) -> Task:
    """Returns the task that ``config`` names. Raises ``UserError`` for a file or dataset that cannot be used."""
    config.check()
    if config.name == "sort":
        return sort_task(config, seed)
    if config.name == "addition":
        return addition_task(config, seed)
    if config.name == "programs":
        return programs_task(config, seed)
    if config.name == "dataset":
        return dataset_task(config, seed)
    if config.name.startswith(VERIFIERS):
        return verifiers_task(config, seed)
    return ReasoningGymTask(config, seed)
