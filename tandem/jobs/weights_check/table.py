"""The pairs of layouts that are checked together, and which of them this machine can hold."""

from collections.abc import Iterator

from tandem.config.recipe import Recipe
from tandem.estimate.processes import TRAINING_PROCESS_BYTES
from tandem.jobs.weights_check.layouts import LayoutPair, SleepLevel
from tandem.layout.parameters import parameter_count
from tandem.layout.shapes import ModelShapes
from tandem.runtime.machine.available_memory import available_bytes
from tandem.storage.disk_space import free_bytes
from tandem.types.dtypes import DTYPE_BYTES
from tandem.weight_transfer.manifest import segment_bytes
from tandem.weight_transfer.shared_memory import FOLDER

TRAINERS = (
    "", "data=2", "data=2,zero=1", "data=2,zero=2", "data=2,zero=3", "context=2", "tensor=2", "tensor=2,deterministic=false", "pipeline=2",
    "pipeline=2,schedule=interleaved,virtual_stages=2", "data=2,tensor=2,zero=1", "tensor=2,pipeline=2", "lora.rank=4", "tensor=2,lora.rank=4",
    "lora.rank=4,lora.quantization=nf4",
)  # fmt: skip
OF_EXPERTS = ("data=2,expert=2", "data=2,expert=2,zero=1")
"""More of ``TRAINERS`` for a mixture of experts."""
ROLLOUTS: tuple[tuple[str, SleepLevel], ...] = (
    ("", 0), ("", 1), ("", 2), ("workers=2", 0), ("tensor_parallel_size=2", 0), ("dtype=bfloat16", 2), ("quantization=int8", 2), ("quantization=fp8", 0),
    ("quantization=int4", 0), ("quantization=nf4+head", 0), ("tensor_parallel_size=2,quantization=int8,dtype=bfloat16", 0),
    ("weights=shared", 0), ("workers=2,weights=shared", 0), ("dtype=bfloat16,weights=shared", 0),
)  # fmt: skip
"""Settings and the level of sleep. Engines copy unless ``weights=shared``, which is a run's default for small models that are not quantized."""


def pairs_of(shapes: ModelShapes, trainer: str | None = None, rollout: str | None = None, sleep: SleepLevel | None = None) -> Iterator[LayoutPair]:
    """Yields every pair of the table, or those with what is given."""
    trainers = (*TRAINERS, *(OF_EXPERTS if shapes.experts is not None else ())) if trainer is None else (trainer,)
    rollouts = ROLLOUTS if rollout is None else ((rollout, 0), (rollout, 1), (rollout, 2))
    for own in trainers:
        for other, level in rollouts:
            if sleep is None or level == sleep:
                yield LayoutPair(own, other, level)


def why_not_held(recipe: Recipe, shapes: ModelShapes) -> str:
    """Returns why this machine cannot hold the pod of ``recipe`` with a model of ``shapes``, or nothing."""
    numbers, itemsize, segments = parameter_count(shapes), DTYPE_BYTES[recipe.trainer.dtype], 2 * segment_bytes(shapes, recipe.trainer.dtype)
    processes = recipe.parallel.world + recipe.rollout.engine_ranks
    # Weights, gradients and two moments, on each rank at most; an engine's weights and those that it has just read.
    needed = processes * TRAINING_PROCESS_BYTES + numbers * (recipe.parallel.world * (2 * itemsize + 8) + recipe.rollout.workers * 2 * itemsize) + segments
    if needed > (most := available_bytes(0.0)):
        return f"needs about {needed / 2**30:.1f} GiB of memory in {processes} processes, and {most / 2**30:.1f} GiB are available"
    if segments > (free := free_bytes(FOLDER)):
        return f"needs {segments / 2**20:,.0f} MiB in {FOLDER}, which has {free / 2**20:,.0f} MiB free"
    return ""
