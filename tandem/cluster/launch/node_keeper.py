"""The keeper of checkpoints of a node, owned by the launcher's own process there, which stays when the run's first node is lost. The run's folder says where it
is, to the pods of the node and to the next controller."""

import logging
from pathlib import Path
from typing import Any

from tandem.config.recipe import AnyRecipe
from tandem.pod.weights_between_pods import tls_arguments
from tandem.runtime.rpc.calls import CallError
from tandem.runtime.rpc.credentials import read_credential
from tandem.trainer.checkpoint.memory.keeper_process import KeeperProcess
from tandem.trainer.checkpoint.memory.launched_keepers import keeper_path, remove_keeper, write_keeper
from tandem.types import RunError, UserError

logger = logging.getLogger(__name__)


def keeps_checkpoints(recipe: AnyRecipe) -> bool:
    """Returns whether the nodes of a run keep checkpoints in memory for each other."""
    return bool(recipe.checkpoint.memory_every_steps) and recipe.pods.may_join


class NodeKeeper:
    """The keeper of node ``name`` for the run of ``recipe`` in ``directory``, which answers at ``host``. It ends with the thread that calls ``look``, if not by
    ``close``."""

    def __init__(self, directory: Path, recipe: AnyRecipe, name: str, host: str) -> None:
        self.path = keeper_path(directory, name)
        self._directory, self._facts, self._trouble = directory, dict[str, Any](), ""
        pods, kept_in = recipe.pods, recipe.checkpoint.memory_directory
        self._process = KeeperProcess(
            name, directory, read_credential(Path(pods.credential_file)), host=host, tls=tls_arguments(pods)[1:], kept_in=kept_in, run=directory.name
        )

    def look(self) -> bool:
        """Starts it where it does not run: where it has died, its checkpoints are lost, and the next ones are kept again. Returns whether it runs."""
        try:
            self._facts = self._process.start()
            write_keeper(self._directory, self._facts)
        except (CallError, UserError, RunError, OSError) as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                logger.warning("keeps no checkpoints in memory: %s", error)
            return False
        return True

    def close(self) -> None:
        self._process.forget()
        self._process.close()
        if self._facts:
            remove_keeper(self._directory, self._facts)
