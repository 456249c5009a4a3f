"""Checks before a run of any job starts. Checks of one kind of job are in ``check_rl``, ``check_data`` and ``check_examples``."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.model import ModelConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.registry import RegistryConfig
from tandem.config.trainer import TrainerConfig
from tandem.layout.expert_balance import check_balance
from tandem.layout.mesh_check import check_layout
from tandem.layout.pipeline_stages import Span, spans_of
from tandem.layout.shapes import ModelShapes
from tandem.model.huggingface.hub import hub_model
from tandem.model.huggingface.weight_files import check_weights
from tandem.model.model_source import found_model
from tandem.model.new_model import folder_without_weights
from tandem.model.quantization.formats import read_format
from tandem.model_registry.open import open_registry
from tandem.runtime.machine.gpus import Device
from tandem.runtime.process.processes import available_cores
from tandem.storage.disk_space import free_bytes
from tandem.storage.files import open_storage
from tandem.storage.reachable import check_reachable
from tandem.types import RunError, UserError


@contextlib.contextmanager
def folder_to_check(model: ModelConfig) -> Iterator[Path]:
    """Yields the folder of the model that a run starts from, without weights if the run creates it. Raises ``UserError`` where it does not exist."""
    if model.create is not None:
        with folder_without_weights(model.create) as folder:
            yield folder
        return
    folder = found_model(model.path or "")
    if not folder.is_dir():
        raise UserError(f"'model.path' is '{folder}', which is not a folder; give a local Hugging Face folder, or OWNER/NAME of a model of the Hub")
    yield folder


def check_start_weights(name: str, folder: Path, shapes: ModelShapes) -> None:
    """Raises ``UserError`` where the weights in ``folder``, of the model that a recipe calls ``name``, are quantized, or do not match its ``config.json``, of
    ``shapes``. The files of a model of the Hub were seen there, and may not be here for a dry run."""
    if shapes.transformers is None and read_format(folder) is not None:
        raise UserError(f"model '{folder}' is quantized, which only the engine supports; use the float checkpoint")
    if hub_model(name) is None:
        check_weights(folder, shapes)


def check_model_on_mesh(shapes: ModelShapes, parallel: ParallelConfig, trainer: TrainerConfig) -> Sequence[Span]:
    """Returns the layers of each pipeline stage. Raises ``UserError`` where the model cannot be divided over the mesh."""
    # Beside Megatron-Core, Tandem's own networks are not trained, and one that is not may have a key-value head on several ranks.
    check_layout(shapes, parallel, repeats_heads=trainer.backend == "megatron")
    check_balance(shapes, trainer)
    return spans_of(parallel, shapes)


def check_offload(trainer: TrainerConfig, device: Device) -> None:
    """Raises ``UserError`` where a run on GPUs offloads weights or activations, which only the CPU supports; moments can be offloaded on both."""
    for name in ("offload_parameters", "offload_activations"):
        if device == "cuda" and getattr(trainer, name) != "none":
            instead = "shard the weights with parallel.zero 3" if name == "offload_parameters" else "set trainer.recompute to full"
            raise UserError(
                f"'trainer.{name}' is '{getattr(trainer, name)}', which is supported on the CPU only, and this run uses a GPU; set it to none and "
                f"{instead}, or set machine.device to cpu"
            )


def check_storage(key: str, url: str) -> None:
    """Raises ``UserError`` or ``RunError`` where the storage at ``url``, which the recipe names at ``key``, cannot be used. Empty: there is none."""
    if url:
        storage = open_storage(url, create=True)
        try:
            check_reachable(storage)
        except RunError as error:
            raise RunError(f"'{key}': {error}, or leave the key empty") from None


def check_targets(checkpoint: CheckpointConfig, registry: RegistryConfig) -> None:
    """Raises ``UserError`` or ``RunError`` where checkpoints can be neither uploaded nor registered as asked."""
    check_folder("checkpoint.local_directory", checkpoint.local_directory)
    check_folder("checkpoint.memory_directory", checkpoint.memory_directory)
    check_storage("checkpoint.upload", checkpoint.upload)
    if registry.is_on:
        open_registry(registry, create=True).close()


def check_disk(directory: Path, needed: int, fix: str = "make room, lower checkpoint.keep or set run.directory") -> None:
    """Raises ``RunError`` where the disk of ``directory``, which need not exist yet, has fewer than ``needed`` bytes free."""
    if (free := free_bytes(directory)) < needed:
        raise RunError(f"this run needs up to {needed / 2**20:,.0f} MiB on the disk of '{directory}' and {free / 2**20:,.0f} MiB are free; {fix}")


def check_disks(directory: str, trainer: TrainerConfig, needed: int, offloaded: int) -> int:
    """Checks the disks of a run's ``directory``, which needs ``needed`` bytes, and of ``trainer.offload_folder`` (empty: the same folder), which needs
    ``offloaded``. Returns the bytes in ``directory``."""
    here = needed if trainer.offload_folder else needed + offloaded
    check_disk(Path(directory), here)
    if trainer.offload_folder:
        check_disk(Path(trainer.offload_folder), offloaded, "make room, or name another 'trainer.offload_folder'")
    return here


def describe_offloaded(trainer: TrainerConfig, offloaded: int) -> list[str]:
    """Returns a line on the disk space of offloaded state; none without."""
    if trainer.offload_folder:
        return [f"offloaded: {offloaded / 2**20:,.0f} MiB in '{trainer.offload_folder}'"]
    return [f"of them offloaded: {offloaded / 2**20:,.0f} MiB"] if offloaded else []


def check_folder(key: str, folder: str) -> None:
    """Raises ``UserError`` where ``folder``, which the recipe names at ``key`` (empty: there is none), is no folder and cannot be made one, or cannot be
    written."""
    if not folder:
        return
    existing = next(path for path in (Path(folder), *Path(folder).absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        why = "cannot be written" if existing.is_dir() else "is not a folder"
        raise UserError(f"'{key}' is '{folder}', and '{existing}' {why}; name a folder on a disk that can be written")


def warn_of_cores(ranks: int) -> list[str]:
    """Returns a warning with the expected slowdown where this machine has more ``ranks`` than cores, else an empty list."""
    cores = available_cores()
    if ranks <= cores:
        return []
    shared = "1 core" if cores == 1 else f"{cores} cores"
    return [
        f"warning: {ranks} ranks share {shared}: a step takes about {ranks / cores:.1f} times as long as with a core for each rank, and longer where they "
        f"wait for each other; lower 'parallel' to {cores} {'rank' if cores == 1 else 'ranks'} or fewer for speed"
    ]
