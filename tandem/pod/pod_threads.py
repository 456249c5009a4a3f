"""The threads of the processes of a pod."""

from tandem.config.recipe import AnyRecipe, Recipe
from tandem.runtime.process.processes import threads_of


def pod_threads(recipe: AnyRecipe) -> int:
    """Returns the threads of a pod's trainer and of its rollout, which take turns unless the rollout is one step ahead."""
    return threads_of(recipe.machine, at_once=2 if isinstance(recipe, Recipe) and recipe.rollout.max_staleness else 1)


def rank_threads(recipe: AnyRecipe) -> int:
    """Returns the threads of each rank of the trainer, which divide those of a worker with the other ranks of this machine."""
    return max(1, pod_threads(recipe) // recipe.ranks_here)
