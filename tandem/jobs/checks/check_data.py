"""Checks before a run on data starts: its model, its data, whether they belong together, and whether they fit on the machine."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from tandem.config.parallel import pods_of_a_replica
from tandem.config.pretrain import DataConfig, PretrainRecipe
from tandem.config.recipe import AnyRecipe
from tandem.data.logprob_files import reference_bytes
from tandem.data.shard_files import ShardFiles
from tandem.data.tokenizing.tokenize import TokenizedDataset
from tandem.data.tokenizing.tokenize_plan import tokenizer_fingerprint
from tandem.estimate.disk_bytes import offloaded_bytes, run_bytes_on_disk
from tandem.estimate.kept_checkpoints import keeper_bytes, keepers_bytes
from tandem.estimate.memory import host_bytes_beside_gpu
from tandem.estimate.processes import data_run_bytes, rank_process_bytes
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.rank_memory import machine_bytes, memory_by_stage, predict_rank_memory
from tandem.estimate.training_bytes import batch_bytes, checkpoint_bytes
from tandem.jobs.checks.check_counts import check_held_out
from tandem.jobs.checks.check_examples import check_demonstrations, check_examples
from tandem.jobs.checks.check_run import (
    check_disks,
    check_folder,
    check_model_on_mesh,
    check_offload,
    check_start_weights,
    check_targets,
    describe_offloaded,
    folder_to_check,
    warn_of_cores,
)
from tandem.jobs.checks.smallest_change import smallest_change
from tandem.jobs.data_run.draft_inputs import check_rollouts
from tandem.jobs.data_run.train_data import dataset_paths
from tandem.layout.mesh import describe
from tandem.layout.pipeline_stages import Span
from tandem.layout.placement import check_placement, mesh_of, pods_of_ranks
from tandem.layout.schedules import PipelineShape, published_bubble_share
from tandem.layout.shapes import ModelShapes, adapted_shapes
from tandem.model.huggingface.eagle3_config import read_eagle3_shapes
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.value_config import start_shapes
from tandem.planner.recipe_layout import draft_of, recipe_layout
from tandem.runtime.machine.available_memory import available_bytes
from tandem.runtime.machine.gpus import FIX, Device, check_gpu_memory, chosen_device, describe_gpus, least_room
from tandem.storage.files import open_storage
from tandem.types import RunError, UserError


def check_data_run(recipe: PretrainRecipe) -> list[str]:
    """Returns what the run will need, one line for each figure. Raises ``UserError`` or ``RunError`` for problems that show only in files
    and on the machine."""
    check_placement(recipe.parallel)
    device, here = chosen_device(recipe.machine, recipe.ranks_here), recipe.ranks_here
    check_offload(recipe.trainer, device)
    with ExitStack() as stack:
        folder = stack.enter_context(folder_to_check(recipe.model))
        shapes = start_shapes(folder, recipe.algorithm.value_head) if recipe.trains_values else read_shapes(folder, implemented_by=recipe.model.implemented_by)
        if recipe.model.path:
            check_start_weights(recipe.model.path, folder, shapes)
        shapes = adapted_shapes(shapes, recipe.trainer.lora)
        spans = check_model_on_mesh(shapes, recipe.parallel, recipe.trainer)
        if recipe.data.sequence_length > shapes.max_position_embeddings:
            raise UserError(
                f"'data.sequence_length' is {recipe.data.sequence_length}; the model has {shapes.max_position_embeddings} positions"
            )
        datasets = [(path, ShardFiles(open_storage(path))) for path in dataset_paths(recipe.data)]
        for path, files in datasets:
            files.check()
            _check_dataset(path, files.dataset, folder, shapes.vocab_size)
        if recipe.task is not None:
            lines = check_demonstrations(recipe.task, recipe.demonstrations, recipe.data, recipe.run, folder, recipe.learns_from_pairs)
        elif recipe.trains_draft:
            lines = _check_draft(recipe, shapes, datasets)
        elif recipe.learns_from_examples:
            lines = check_examples(recipe, datasets)
        else:
            lines = _describe_text(recipe.data, recipe.run.max_steps, datasets)
        parallel, tokens = recipe.parallel, recipe.most_tokens
        needs, free = data_run_needs(recipe, shapes, device), available_bytes(recipe.machine.memory_gib)
        if device == "cuda":
            check_gpu_memory(needs.gpu, here, _fix(recipe, shapes, device, free) or FIX)
            lines = [*lines, describe_gpus(here, needs.gpu)]
        if needs.host > free:
            fix = _fix(recipe, shapes, device, free) or "no other value of its keys is enough, so take a smaller model"
            raise RunError(
                f"this run needs {needs.host / 2**30:.2f} GiB{_for_ranks(recipe)} and {free / 2**30:.2f} GiB are available; {fix}, or give it more "
                "memory (machine.memory_gib)"
            )
        if recipe.data.held_out:
            each = recipe.sequences_each
            held_out = datasets[-1][1].dataset.documents // each if recipe.learns_from_examples else recipe.evaluation.sequences
            check_held_out(min(recipe.evaluation.sequences, held_out), each * recipe.data.sequence_length, parallel, free)
        draft = draft_of(recipe, shapes)
        # The head that a run begins with is in its folder too.
        written, models = (shapes, 1 + (recipe.model.create is not None)) if draft is None else (draft.head.trained, 2)
        disk = run_bytes_on_disk(written, recipe.trainer, recipe.checkpoint.keep, models=models)
        if recipe.has_reference:
            disk += sum(reference_bytes(files.dataset, recipe.trainer.dtype) for _, files in datasets)
        offloaded = offloaded_bytes(shapes, recipe.trainer, tokens, parallel)
        disk = check_disks(recipe.run.directory, recipe.trainer, disk, offloaded)
        check_folder("trainer.offload_folder", recipe.trainer.offload_folder)
        check_targets(recipe.checkpoint, recipe.registry)
        if recipe.pods.may_join:
            from tandem.pod.leadership import check_coordination
            from tandem.pod.start import check_joining

            check_joining(recipe)
            check_coordination(recipe.coordination, recipe.run.name or "run")
        return [
            *lines,
            f"predicted memory: {needs.host / 2**20:,.0f} MiB at the peak{_for_ranks(recipe)}",
            *([f"predicted checkpoints in memory: {needs.kept / 2**20:,.0f} MiB of them"] if needs.kept else []),
            *(warn_of_cores(here) if device == "cpu" else []),
            f"predicted disk: {disk / 2**20:,.0f} MiB in '{recipe.run.directory}'",
            *describe_offloaded(recipe.trainer, offloaded),
            *_describe_mesh(recipe),
            *_describe_pipeline(recipe, spans),
        ]


class Needs(NamedTuple):
    """Bytes of this machine's memory, and of each GPU (0: there is none). ``kept``: those of the memory that keepers of checkpoints take."""

    host: int
    gpu: int
    kept: int = 0


def data_run_needs(recipe: PretrainRecipe, shapes: ModelShapes, device: Device) -> Needs:
    """Returns what the processes of a run on data need together on the machine of the run. Its ranks start there whatever
    ``parallel.ranks_per_node`` says; with pods that train, those of its own pod."""
    layout, ranks = recipe_layout(recipe, shapes, on_cpu=device == "cpu"), recipe.ranks_here
    nodes, keeps = max(recipe.parallel.nodes()) + 1, recipe.checkpoint.memory_every_steps > 0
    trained = shapes if layout.draft is None else layout.draft.head.trained
    size, world = checkpoint_bytes(trained, recipe.trainer), recipe.parallel.world
    kept = keepers_bytes(size, nodes, ranks) if keeps else 0
    if keeps and ranks < world:
        # Its keeper has the files of the ranks here, and of those of another machine.
        kept = keeper_bytes(2 * size * _largest_share(recipe, shapes, layout), 2 * ranks)
    beside = ranks * batch_bytes(recipe.data, recipe.parallel, recipe.sequences_each) + data_run_bytes(recipe.trainer, ranks) + kept
    if device == "cpu":
        return Needs(machine_bytes(shapes, layout, ranks) + beside, 0, kept)
    process = ranks * rank_process_bytes(recipe.trainer, layout.is_forked)
    return Needs(process + host_bytes_beside_gpu(trained, recipe.trainer) + beside, predict_rank_memory(shapes, layout).allocated, kept)


def _largest_share(recipe: PretrainRecipe, shapes: ModelShapes, layout: TrainingLayout) -> float:
    """Returns the largest part of a checkpoint that the ranks of one of several machines write: stages that machines divide are not of one size."""
    parallel, machines = recipe.parallel, recipe.pods.trainer_count
    over = pods_of_a_replica(parallel.data, parallel.pipeline, machines)
    if over == 1:
        return 1 / machines
    trained, each = [stage.gradients for stage in memory_by_stage(shapes, layout)], parallel.pipeline // over
    return max(sum(trained[first : first + each]) for first in range(0, len(trained), each)) / sum(trained) / parallel.data


def _fix(recipe: PretrainRecipe, shapes: ModelShapes, device: Device, free: int) -> str:
    """Returns the smallest change with which the run fits; empty without one."""
    room = least_room(recipe.ranks_here) if device == "cuda" else 0

    def fits(changed: AnyRecipe) -> bool:
        assert isinstance(changed, PretrainRecipe)
        needs = data_run_needs(changed, shapes, device)
        return needs.host <= free and needs.gpu <= room

    return smallest_change(recipe, fits)


def _for_ranks(recipe: PretrainRecipe) -> str:
    here = "1 rank that starts" if recipe.ranks_here == 1 else f"{recipe.ranks_here} ranks that start"
    return "" if recipe.parallel.world == 1 else f" for the {here} on this machine"


def _describe_text(data: DataConfig, max_steps: int, datasets: Sequence[tuple[str, ShardFiles]]) -> list[str]:
    train = datasets[: len(data.train)]
    total = sum(files.dataset.tokens for _, files in train)
    asked = max_steps * data.global_batch_size * data.sequence_length
    marked = [f"'{path}' has a loss mask, which pretraining ignores" for path, files in train if files.dataset.has_masks]
    return [f"data: {total:,} tokens in {len(train)} datasets", f"asked for: {asked:,} tokens, {asked / total:.2f} epochs", *marked]


def _describe_mesh(recipe: PretrainRecipe) -> list[str]:
    shape, machines = mesh_of(recipe.parallel), recipe.pods.trainer_count
    return describe(shape, recipe.parallel.nodes()) if machines == 1 else describe(shape, pods_of_ranks(shape, machines), "machine")


def _describe_pipeline(recipe: PretrainRecipe, spans: Sequence[Span]) -> list[str]:
    parallel = recipe.parallel
    if parallel.pipeline == 1:
        return []
    tokens = recipe.step_tokens // parallel.data
    shape = PipelineShape(parallel.pipeline, -(-tokens // recipe.trainer.micro_batch_tokens), parallel.virtual_stages)
    layers = ", ".join(str(span.stop - span.start) for span in spans)
    return [
        f"pipeline: stages of {layers} layers, {parallel.schedule}, about {shape.micro_batches} micro-batches a step: "
        f"{published_bubble_share(shape):.0%} of the ranks' time is bubble; lower trainer.micro_batch_tokens for less"
    ]


def _check_draft(recipe: PretrainRecipe, shapes: ModelShapes, datasets: Sequence[tuple[str, ShardFiles]]) -> list[str]:
    """Returns what a draft head will learn from. Raises ``UserError`` for rollouts or a head that do not belong to the model."""
    for path, files in datasets:
        if files.dataset.pairs:
            raise UserError(f"'{path}' has preference pairs, and algorithm.name is 'draft'; make it with 'tandem tokenize', or with its --examples")
    if (size := recipe.algorithm.draft_vocab_size) > shapes.vocab_size:
        raise UserError(f"'algorithm.draft_vocab_size' is {size} and the model has {shapes.vocab_size} tokens; give at most as many, or 0")
    if (folder := recipe.algorithm.init_from) and (given := read_eagle3_shapes(folder)).layer.vocab_size != shapes.vocab_size:
        raise UserError(f"'algorithm.init_from' names '{folder}', a head of {given.layer.vocab_size} tokens, and the model has {shapes.vocab_size}")
    lines = _describe_text(recipe.data, recipe.run.max_steps, datasets) if recipe.data.train else []
    return [*lines, *check_rollouts(recipe.data, shapes.vocab_size)]


def _check_dataset(path: str, dataset: TokenizedDataset, folder: Path, vocab_size: int) -> None:
    if dataset.vocab_size > vocab_size:
        raise UserError(f"'{path}' was tokenized with {dataset.vocab_size} ids and the model has {vocab_size}; they do not belong together")
    if (folder / "tokenizer.json").is_file() and dataset.tokenizer != tokenizer_fingerprint(folder):
        raise UserError(f"'{path}' was tokenized with another tokenizer than the model's; tokenize it again with the model's own")
