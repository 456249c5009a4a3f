"""The batch script of a run: what Slurm is asked for, and one command."""

import shlex
import sys
from pathlib import Path

from tandem.config.slurm import SlurmConfig


def batch_script(config: SlurmConfig, directory: Path, folder: Path, array: str = "") -> str:
    """Returns the script of the run in ``directory``, whose recipe names files from ``folder``. Both are shared by the nodes, as is this Python. ``array``: the
    indices of a job array, as in ``0-7%2``; then the runs are in the folders ``directory``-0, ``directory``-1 and so on."""
    output = f"{directory}-%a/logs/slurm-%A.out" if array else f"{directory}/logs/slurm-%j.out"
    job = {
        "job-name": f"tandem-{directory.name}", "chdir": str(folder), "output": output, "open-mode": "append", "signal": f"B:USR1@{config.signal_s}",
        **({"array": array} if array else {}),
    }  # fmt: skip
    first, *others = config.parts
    command = shlex.join([sys.executable, "-m", "tandem.cluster.launch.slurm.job", str(directory)]) + ('-"$SLURM_ARRAY_TASK_ID"' if array else "")
    return "\n".join([
        "#!/bin/bash",
        *(f"#SBATCH --{name}={_quoted(value)}" for name, value in job.items()),
        *_part(first),
        *(line for part in others for line in ("#SBATCH hetjob", *_part(part))),
        "",
        *config.setup,
        "# The run in place of this shell, so that Slurm's signals reach it.",
        f"exec {command}",
        "",
    ])  # fmt: skip


def _part(config: SlurmConfig) -> list[str]:
    """Returns the lines with what one part of a job asks for. Slurm takes over from the part before only some of it."""
    asked = {
        "nodes": str(config.nodes), "ntasks-per-node": "1",
        **{name.replace("_", "-"): str(value) for name in _ASKED if (value := getattr(config, name))},
    }  # fmt: skip
    flags = ["requeue" if config.requeue else "no-requeue", *(["exclusive"] if not config.cpus_per_task else [])]
    return [
        *(f"#SBATCH --{name}={_quoted(value)}" for name, value in asked.items()), *(f"#SBATCH --{flag}" for flag in flags),
        *(f"#SBATCH {_whole(option)}" for option in config.options),
    ]  # fmt: skip


_ASKED = ("partition", "time", "account", "qos", "cpus_per_task", "gpus_per_node", "mem", "constraint", "nodelist", "exclude", "reservation")


def _quoted(value: str) -> str:
    """Returns ``value`` as sbatch reads it, which takes quotation marks but no other form of a shell."""
    return f'"{value}"' if any(character in value for character in " #'") else value


def _whole(option: str) -> str:
    name, equals, value = option.partition("=")
    return f"{name}{equals}{_quoted(value)}"
