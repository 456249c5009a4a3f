"""A plan as a recipe that ``tandem train`` runs, on this machine or as a job of Slurm or Kubernetes. Imports no torch."""

from typing import Any, Literal

import yaml

from tandem.config.load import read_yaml
from tandem.config.parallel import pods_of_a_replica
from tandem.config.recipe import ON_DATA
from tandem.planner.automatic import CHOSEN
from tandem.planner.plan import named
from tandem.planner.request import own_recompute
from tandem.planner.score import Score
from tandem.types.errors import UserError

Target = Literal["recipe", "slurm", "kubernetes"]



def emitted(score: Score, target: Target, recipe: str | None, model: str | None) -> str:
    """Returns the YAML of a recipe with the layout of ``score``: ``recipe`` with its sections changed, or one that pretrains ``model``. Raises ``UserError``
    for a layout whose replicas, or in training on data their stages, do not divide over the trainer pods of the nodes."""
    data = read_yaml(recipe) if recipe is not None else _new_recipe(score, model)
    kept = {key: value for key, value in data.get("parallel", {}).items() if key not in ("layout", *CHOSEN)}
    data["parallel"] = {**kept, **parallel_section(score)}
    if target != "recipe" and _nodes(score) > 1:
        data["pods"] = {**data.get("pods", {}), "trainer_count": _trainer_pods(score, data.get("algorithm", {}).get("name") in ON_DATA)}
    data["trainer"] = {**data.get("trainer", {}), **trainer_section(score)}
    command = f"tandem train FILE{'' if target == 'recipe' else f' --on {target}'}"
    if target == "slurm":
        data["slurm"] = {**data.get("slurm", {}), "nodes": _nodes(score), "gpus_per_node": str(_gpus_of_node(score))}
    if target == "kubernetes":
        data["kubernetes"] = {**data.get("kubernetes", {}), "nodes": _nodes(score), "gpus": _gpus_of_node(score)}
    predicted = f"{score.step_seconds:.3g} s a step, {score.memory.total / 2**30:.1f} GiB a GPU"
    lines = [f"# {named(score)} on {score.layout.gpus} x {score.hardware.name}: predicted {predicted}.", f"# Run it: {command}"]
    return "\n".join(lines) + "\n" + yaml.safe_dump(data, sort_keys=False)


def parallel_section(score: Score) -> dict[str, Any]:
    """Returns the section ``parallel`` of a recipe for a layout, without what is at its default."""
    parallel = score.layout.parallel
    section: dict[str, Any] = {"data": parallel.data}
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(parallel, name) > 1:
            section[name] = getattr(parallel, name)
    if parallel.pipeline > 1:
        section |= {"schedule": parallel.schedule, "virtual_stages": parallel.virtual_stages, "pipeline_layers": list(parallel.pipeline_layers)}
    if parallel.tensor > 1 and not parallel.sequence_parallel:
        section["sequence_parallel"] = False
    section["zero"] = parallel.zero
    return section


def trainer_section(score: Score) -> dict[str, Any]:
    """Returns the keys of the section ``trainer`` that a layout decides."""
    layout = score.layout
    section: dict[str, Any] = {
        "precision": layout.precision, "recompute": own_recompute(layout.recompute), "micro_batch_tokens": layout.micro_batch * layout.sequence,
    }  # fmt: skip
    return section if layout.offload == "none" else {**section, "offload": layout.offload}


def _new_recipe(score: Score, model: str | None) -> dict[str, Any]:
    return {
        "algorithm": {"name": "pretrain"},
        "model": {"path": model or "MODEL_FOLDER"},
        "data": {
            "train": [{"path": "TOKENIZED_FOLDER"}], "sequence_length": score.layout.sequence, "global_batch_size": score.layout.global_batch,
        },
        "run": {"max_steps": 1000},
    }  # fmt: skip


def _trainer_pods(score: Score, is_on_data: bool) -> int:
    """Returns the pods that train, one on each node."""
    parallel, nodes = score.layout.parallel, _nodes(score)
    over = pods_of_a_replica(parallel.data, parallel.pipeline, nodes)
    if not over or (over > 1 and not is_on_data):
        stages = " or, with --pp, whole stages of one" if is_on_data else ""
        raise UserError(
            f"a pod for each of {nodes} nodes trains whole data-parallel replicas{stages}, and --dp {parallel.data} does not divide over them; choose a --dp "
            "that does"
        )
    return nodes


def _gpus_of_node(score: Score) -> int:
    return min(score.hardware.gpus_per_node, score.layout.gpus)


def _nodes(score: Score) -> int:
    return -(-score.layout.gpus // score.hardware.gpus_per_node)
