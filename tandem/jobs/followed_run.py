"""What a server needs to serve the weights of a run while it trains."""

import time
from collections.abc import Callable
from pathlib import Path

from tandem.config.recipe import Recipe
from tandem.jobs.prepare import read_recipe
from tandem.jobs.run_files import rl_start_folder
from tandem.runtime.coordination.open import store_address
from tandem.runtime.process.program import program
from tandem.runtime.records.run_lock import lock_holder
from tandem.serving.settings import FollowedRun, FollowMode
from tandem.types import UserError

LOOK_S = 0.5


def followed_run(directory: Path, mode: FollowMode, say: Callable[[str], None]) -> tuple[Path, FollowedRun, str]:
    """Returns the folder of the model that the reinforcement learning of the run in ``directory`` starts from, for which it waits, the run as a server follows
    it, and the dtype of its weights. Raises ``UserError`` for a folder that is not a run, and a run that has ended."""
    recipe = read_recipe(directory)
    if not isinstance(recipe, Recipe):
        raise UserError(f"'{directory}' is a run on data, which publishes no weights while it trains; serve one of its checkpoints or its model")
    if recipe.trainer.lora is not None:
        raise UserError(f"'{directory}' trains an adapter (trainer.lora), and --follow serves whole weights in this version; serve its checkpoints")
    if (directory / "model").is_dir() and lock_holder(directory) is None:
        raise UserError(f"the run in '{directory}' has ended; serve its model: {program()} serve {directory / 'model'}")
    folder = rl_start_folder(recipe, directory)
    if not folder.is_dir():
        say(f"waiting for '{folder}', the model that the run begins its reinforcement learning with")
    while not folder.is_dir():
        time.sleep(LOOK_S)
    return folder, FollowedRun(store_address(recipe.coordination, directory), mode), recipe.trainer.dtype
