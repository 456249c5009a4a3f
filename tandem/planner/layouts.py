"""Layouts that a model can be trained in: checked, completed and changed. Imports no torch."""

from dataclasses import replace

from tandem.config.parallel import ParallelConfig
from tandem.estimate.training.layout import TrainingLayout
from tandem.layout.mesh_check import check_layout
from tandem.layout.shapes import ModelShapes
from tandem.types.errors import UserError

MOST_GPUS = 1_000_000
MOST_BATCH_TOKENS = 2**40
"""A million times the largest batches that are published (16 million tokens)."""


def even_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Returns the layers of each stage, as equal as possible: the first and the last, which have the embedding and the head, get none of the surplus first."""
    each, surplus = divmod(layers, stages)
    inner = [*range(1, stages - 1), 0, stages - 1][:surplus] if stages > 1 else []
    return tuple(each + (stage in inner) for stage in range(stages))


def with_stages(parallel: ParallelConfig, layers: int) -> ParallelConfig:
    """Returns ``parallel`` with the layers of each stage and the schedule that its virtual stages need."""
    stages = parallel.pipeline * parallel.virtual_stages
    schedule = "interleaved" if parallel.virtual_stages > 1 else "1f1b"
    return replace(parallel, schedule=schedule, pipeline_layers=even_layers(layers, stages) if parallel.pipeline > 1 else ())  # type: ignore[arg-type]


def check_training_layout(shapes: ModelShapes, layout: TrainingLayout, gpus: int) -> None:
    """Raises ``UserError`` for a layout that does not exist: axes that are no mesh of ``gpus``, ranks that do not divide the model, a batch that they do not
    divide."""
    parallel = layout.parallel
    for name, value in (
        ("tp", parallel.tensor), ("pp", parallel.pipeline), ("dp", parallel.data), ("cp", parallel.context), ("ep", parallel.expert),
        ("virtual-pp", parallel.virtual_stages), ("micro-batch", layout.micro_batch),
    ):  # fmt: skip
        if value < 1:
            raise UserError(f"--{name} is {value}; it must be at least 1")
    if parallel.world != gpus:
        raise UserError(
            f"--tp {parallel.tensor} x --pp {parallel.pipeline} x --cp {parallel.context} x --dp {parallel.data} are {parallel.world:,} GPUs, and --gpus is "
            f"{gpus:,}; change one of them" + _fitting_data(parallel, gpus)
        )
    if not 1 <= layout.expert_imbalance <= parallel.expert:
        raise UserError(f"--expert-imbalance is {layout.expert_imbalance:g}; it must be from 1 to --ep = {parallel.expert}, where one rank has all tokens")
    if parallel.data * parallel.context % parallel.expert:
        raise UserError(f"--ep is {parallel.expert}; it must divide --dp x --cp = {parallel.data * parallel.context}")
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        raise UserError(f"--virtual-pp is {parallel.virtual_stages} with --pp 1; virtual stages interleave a pipeline of 2 ranks or more")
    check_batch(layout.sequence, layout.global_batch)
    if layout.sequence % parallel.context:
        raise UserError(f"--cp is {parallel.context}, which does not divide --seq {layout.sequence}")
    if layout.global_batch % (parallel.data * layout.micro_batch):
        raise UserError(
            f"--global-batch is {layout.global_batch}; it must be a multiple of --dp x --micro-batch = {parallel.data * layout.micro_batch}"
        )
    try:
        check_layout(shapes, parallel, repeats_heads=True)
    except UserError as error:
        raise UserError(_in_flags(str(error))) from None


def check_gpus(gpus: int) -> None:
    if not 1 <= gpus <= MOST_GPUS:
        raise UserError(f"--gpus is {gpus}; it must be from 1 to {MOST_GPUS:,}")


def check_batch(sequence: int, global_batch: int) -> None:
    """Raises ``UserError`` for a batch that is too large to be meant."""
    if sequence < 1 or global_batch < 1:
        name, value = ("seq", sequence) if sequence < 1 else ("global-batch", global_batch)
        raise UserError(f"--{name} is {value}; it must be at least 1")
    if sequence * global_batch > MOST_BATCH_TOKENS:
        raise UserError(
            f"--global-batch {global_batch:,} x --seq {sequence:,} are {sequence * global_batch:,} tokens in a step; the largest that are published have about "
            "16 million: lower one of them"
        )


def _fitting_data(parallel: ParallelConfig, gpus: int) -> str:
    others = parallel.tensor * parallel.pipeline * parallel.context
    return f" (--dp {gpus // others} fits)" if gpus % others == 0 else ""


def _in_flags(message: str) -> str:
    for key, flag in (
        ("parallel.virtual_stages", "--virtual-pp"), ("parallel.tensor", "--tp"), ("parallel.pipeline", "--pp"), ("parallel.expert", "--ep"),
        ("parallel.context", "--cp"), ("parallel.data", "--dp"),
    ):  # fmt: skip
        message = message.replace(f"'{key}'", flag).replace(key, flag)
    # Sizes that are given by flag have no family.
    return message.replace("this model model", "the model")
