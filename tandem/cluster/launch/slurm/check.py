"""What is asked of Slurm before a run is placed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.cluster.launch.several_nodes import section
from tandem.cluster.launch.slurm.commands import check_gpus, check_nodelist, check_place, try_script
from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.load import build
from tandem.config.recipe import AnyRecipe
from tandem.config.slurm import SlurmConfig


def check(recipe: AnyRecipe, directory: Path, folder: Path, array: str = "") -> None:
    """Raises ``UserError`` for what the cluster does not have, or would refuse. Nothing is made."""
    config = recipe.slurm
    check_place(config.partition, config.nodes)
    check_nodelist(config.nodelist, config.nodes)
    check_gpus(config.partition, config.gpus_per_node, config.nodes)
    try_script(batch_script(config, directory, folder, array))


def nodes_of(data: Mapping[str, Any]) -> tuple[int, str]:
    """Returns how many nodes a recipe asks Slurm for, and the key that says so."""
    return build(SlurmConfig, section(data, "slurm"), "slurm").nodes, "slurm.nodes"
