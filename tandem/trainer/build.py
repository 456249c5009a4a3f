"""Builds one rank's part of a model and its optimizer from a Hugging Face folder, for every kind of job."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tandem.config.implementation import OWN, Implementation
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.estimate.training.layout import layout_of_trainer
from tandem.estimate.training.rank_memory import saved_by_stage
from tandem.kernels.api import Kernels
from tandem.kernels.mixed import in_precision
from tandem.layout.eagle3 import EMBEDDING
from tandem.layout.pipeline_stages import own_spans, spans_of
from tandem.model.decoder import Decoder
from tandem.model.draft_decoder import DraftDecoder
from tandem.model.drawn import new_adapter
from tandem.model.eagle3_folder import load_eagle3
from tandem.model.huggingface.eagle3_config import read_eagle3_of
from tandem.model.huggingface.model_config import read_shapes
from tandem.model.huggingface.model_folder import load_tensors, read_held, unfilled_model
from tandem.model.huggingface.weight_files import tensor_names
from tandem.model.value_folder import new_head
from tandem.trainer.checkpoint.model_state import parts_of
from tandem.trainer.checkpoint.replica_state import ReplicaState, fill_parts
from tandem.trainer.offload.activations import ActivationOffload
from tandem.trainer.optimizers.make import offload_folder
from tandem.trainer.parallel.draft_pipeline import DraftPipeline, has_head
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.replica import FrozenReplica, Replica, make_replica
from tandem.trainer.parallel.router_balance import make_balance
from tandem.trainer.parallel.zero_frozen import FrozenShards
from tandem.types import UserError
from tandem.types.kv_cache import KVCacheDtype


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Settings of ``build_replica``.

    ``start``: the Hugging Face folder. ``directory``: the run's folder, for offloaded state. ``most_tokens``: the largest micro-batch, in
    tokens. ``kv_cache_dtype``: the dtype that attention rounds keys and values to, as the rollout's KV cache does.
    ``context``: the tokens of the run's longest sequence (0: the model's own). ``head_seed``: draws a value head beside the language-model head (``None``:
    there is none). ``seed``: draws the adapter of ``trainer.lora``. ``implemented_by``: who computes the model.
    ``draft``: the folder of a draft head that is trained beside the model, which stays as it is, and the positions of its drafts (``None``: the model is
    trained)."""

    start: Path
    directory: Path
    trainer: TrainerConfig
    parallel: ParallelConfig
    most_tokens: int
    kv_cache_dtype: KVCacheDtype = "auto"
    head_seed: int | None = None
    seed: int = 0
    context: int = 0
    implemented_by: Implementation = OWN
    draft: tuple[Path, int] | None = None

    def tensors(self, model: Decoder) -> Iterator[tuple[str, Tensor]]:
        """Yields what ``model`` starts with."""
        yield from read_held(self.start, model)
        if model.shapes.lora is not None:
            yield from new_adapter(model.shapes, self.seed)
        if self.head_seed is not None:
            yield from new_head(self.start, model.shapes.value_head, self.head_seed)


def build_replica(settings: ReplicaSettings, ranks: Ranks, kernels: Kernels) -> Replica:
    """Returns this rank's part of the actor with its optimizer. Raises ``UserError`` if the folder does not hold the model."""
    trainer, parallel = settings.trainer, settings.parallel
    # Weights are read straight into the file or into this rank's part, because the whole model may not fit in memory.
    is_filled = trainer.offload_parameters != "nvme" and (parallel.zero < 3 or ranks.world.size == 1)
    model: Decoder
    pipeline: Pipeline | DraftPipeline | None
    model, pipeline = load_network(settings, ranks, kernels, is_filled) if settings.draft is None else load_draft(settings, ranks, kernels, *settings.draft)
    model.router_balance = make_balance(model, trainer, ranks)
    model.recompute = trainer.recompute
    replica = make_replica(model, trainer, ranks, parallel.zero, pipeline, settings.directory, is_filled=is_filled)
    if trainer.offload_activations == "nvme":
        stage = ranks.groups["pipeline"].rank
        passes = parallel.pipeline - stage
        expected = saved_by_stage(model.shapes, layout_of_trainer(trainer, parallel, settings.most_tokens))[stage] // passes
        ActivationOffload(model, offload_folder(trainer, settings.directory), expected, passes=passes)
    if not is_filled:
        with _named(settings.start):
            ReplicaState(replica).fill(settings.tensors(model))
    return replica


def build_frozen(settings: ReplicaSettings, ranks: Ranks, kernels: Kernels) -> FrozenReplica:
    """Builds this rank's part of a model that is never updated."""
    is_sharded = settings.parallel.zero == 3 and ranks.world.size > 1
    settings = replace(settings, trainer=replace(settings.trainer, lora=None))
    model, pipeline = load_network(settings, ranks, kernels, is_filled=not is_sharded)
    if not is_sharded:
        return FrozenReplica(ranks, model.requires_grad_(False), pipeline)
    shards = FrozenShards(model, ranks, is_filled=False)
    shards.reserve()
    parts = parts_of(model)
    shards.reshard()
    with _named(settings.start):
        fill_parts(model, parts, read_held(settings.start, model), shards.fill)
    return FrozenReplica(ranks, model, pipeline, shards)


@contextlib.contextmanager
def _named(start: Path) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(f"model '{start}': {error}") from None


def load_network(settings: ReplicaSettings, ranks: Ranks, kernels: Kernels, is_filled: bool) -> tuple[Decoder, Pipeline | None]:
    """Returns this rank's part of the network in the trainer's precision, and the pipeline that it is a stage of (``None``: it is whole). ``is_filled``: with
    its weights. Raises ``UserError`` if the folder does not hold the model."""
    parallel, stages = settings.parallel, ranks.groups["pipeline"]
    spans = spans_of(parallel, read_shapes(settings.start, "any", settings.implemented_by))
    model = unfilled_model(
        settings.start, kernels, dtype=getattr(torch, settings.trainer.dtype), device=ranks.device, parallel=ranks.model_parallel(),
        spans=own_spans(parallel, spans, stages.rank), heads="any", value_head="none" if settings.head_seed is None else "token",
        lora=settings.trainer.lora, implemented_by=settings.implemented_by,
    )  # fmt: skip
    model.use_context(settings.context or model.positions)
    if is_filled:
        with _named(settings.start):
            load_tensors(model, settings.tensors(model))
    model.kernels = in_precision(kernels, settings.trainer.precision, model.device)
    model.kv_cache_dtype = settings.kv_cache_dtype
    return model, Pipeline(model, spans, stages, parallel.schedule) if stages.size > 1 else None


def load_draft(
    settings: ReplicaSettings, ranks: Ranks, kernels: Kernels, folder: Path, steps: int
) -> tuple[DraftDecoder, DraftPipeline | None]:
    """Returns the head in ``folder`` beside this rank's part of the model of ``settings``, which stays as it is; as ``_beside``."""
    target, pipeline = load_network(settings, ranks, kernels, is_filled=True)
    return _beside(target.requires_grad_(False), pipeline, ranks, folder, steps, settings.context)


def _beside(
    target: Decoder, pipeline: Pipeline | None, ranks: Ranks, folder: Path, steps: int, context: int
) -> tuple[DraftDecoder, DraftPipeline | None]:
    """Returns the head in ``folder`` beside this rank's part of ``target``, if it has the head, and how the ranks compute both together (``None``: each does
    alone). ``pipeline``: that of the target."""
    tensor, stages, head = ranks.groups["tensor"], ranks.groups["pipeline"], None
    shapes = read_eagle3_of(folder, target.shapes, own_embedding=EMBEDDING in tensor_names(folder))
    if has_head(ranks):
        head = load_eagle3(folder, target.kernels, target.shapes, dtype=target.dtype, device=target.device)
        head.use_context(context)
    model = DraftDecoder(shapes, head, target, steps)
    if tensor.size == stages.size == 1:
        return model, None
    return model, DraftPipeline(model, pipeline or Pipeline(target, target.spans, stages), ranks)


def build_draft(target: Replica, folder: Path, steps: int, trainer: TrainerConfig, context: int) -> Replica:
    """Returns the draft head in ``folder``, trained with the settings ``trainer`` beside the model of ``target``, which goes on learning by itself. Arguments
    as of ``ReplicaSettings``. Raises ``UserError`` as ``load_eagle3``."""
    assert not isinstance(target.pipeline, DraftPipeline)
    model, pipeline = _beside(target.model, target.pipeline, target.ranks, folder, steps, context)
    return make_replica(model, trainer, target.ranks, pipeline=pipeline)
