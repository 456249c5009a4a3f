"""What is asked of Slurm before a run is placed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem.cluster.launch.several_nodes import section
from tandem.cluster.launch.slurm.commands import check_gpus, check_nodelist, check_place, try_script
from tandem.cluster.launch.slurm.script import batch_script
from tandem.config.load import build
from tandem.config.recipe import ON_DATA, AnyRecipe, Recipe
from tandem.config.slurm import SlurmConfig
from tandem.types import UserError


def check(recipe: AnyRecipe, directory: Path, folder: Path, array: str = "") -> None:
    """Raises ``UserError`` for what the cluster does not have, or would refuse. Nothing is made."""
    config = recipe.slurm
    if config.rollout.nodes:
        _check_kinds(recipe, array)
    for key, part in zip(("slurm", "slurm.rollout"), config.parts, strict=False):
        check_place(part.partition, part.nodes, key)
        check_nodelist(part.nodelist, part.nodes, key)
        check_gpus(part.partition, part.gpus_per_node, part.nodes, key)
    # The parts of a job have no node in common.
    if config.rollout.nodes and config.parts[0].partition == config.parts[1].partition:
        check_place(config.partition, config.all_nodes, "slurm", f"slurm.nodes and slurm.rollout.nodes are {config.all_nodes} together")
    try_script(batch_script(config, directory, folder, array))


def _check_kinds(recipe: AnyRecipe, array: str) -> None:
    """Raises ``UserError`` for a run that cannot have nodes which do not train."""
    config = recipe.slurm
    if array:
        raise UserError("'slurm.rollout.nodes' is set with --array, and Slurm has no arrays of heterogeneous jobs; set it to 0, or start the runs one by one")
    assert isinstance(recipe, Recipe), "a run on data was refused for these nodes"
    pods = recipe.pods
    able = pods.count + config.nodes - 1
    if pods.trainer_count > able:
        raise UserError(
            f"'pods.trainer_count' is {pods.trainer_count}, and {able} pods of the run can train: nodes of slurm.rollout draw samples alone; raise slurm.nodes"
        )
    if recipe.cluster.spares and pods.trainer_count > pods.count:
        raise UserError(
            f"'cluster.spares' is {recipe.cluster.spares} with slurm.rollout and pods.trainer_count {pods.trainer_count}: a spare that draws samples could "
            "have the place of a pod that trains; set cluster.spares to 0"
        )


def nodes_of(data: Mapping[str, Any]) -> tuple[int, str]:
    """Returns how many nodes a recipe asks Slurm for, and the key that says so. Raises ``UserError`` for those that would have nothing to do."""
    config = build(SlurmConfig, section(data, "slurm"), "slurm")
    if config.rollout.nodes and section(data, "algorithm").get("name") in ON_DATA:
        raise UserError(f"'slurm.rollout.nodes' is {config.rollout.nodes}, and a run on data draws no samples; set it to 0, and raise slurm.nodes")
    return config.all_nodes, "slurm.nodes + slurm.rollout.nodes" if config.rollout.nodes else "slurm.nodes"
