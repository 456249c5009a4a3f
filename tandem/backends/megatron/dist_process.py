"""Runs ``dist_checkpoint`` in the environment of the Megatron sidecar. Imports no torch."""

import json
import os
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tandem.backends.environment import python_of, tandem_path
from tandem.types import UserError


@dataclass(frozen=True, slots=True)
class Task:
    """``write``: from the Hugging Face folder ``model`` to the new folder ``checkpoint``, as of training step ``iteration``. ``read``: the other way, into
    ``model``, which has the ``config.json``."""

    action: Literal["write", "read"]
    model: str
    checkpoint: str
    iteration: int = 0


def run_task(task: Task, scratch: Path) -> None:
    """Runs ``task`` to its end. ``scratch``: a folder for the path of the process. Raises ``UserError`` with its last line if it fails."""
    command = [str(python_of("megatron")), "-m", "tandem.backends.megatron.dist_checkpoint", json.dumps(asdict(task))]
    # Megatron writes in processes that it forks, in which threads that OpenMP had before would be waited for without end.
    environment = {**os.environ, "PYTHONPATH": tandem_path(scratch), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise UserError(lines[-1] if lines else f"the process of the Megatron sidecar ended with status {done.returncode}")
