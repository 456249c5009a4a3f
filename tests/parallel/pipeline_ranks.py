"""Trains a seeded model on a seeded batch with the ranks of a pipeline, also on larger meshes, and with a plain loop in one process."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from model_ranks import LEARNING_RATE, Case, reduce, sequences_of, weights_of
from ranks import RankContext

from tandem.kernels import select
from tandem.layout.mesh import GroupName
from tandem.layout.pipeline_stages import stage_spans
from tandem.layout.schedules import PipelineShape, ScheduleName
from tandem.layout.sharding import ShardSpec
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface.model_folder import load_tensors, to_huggingface
from tandem.model.parallel.model_parallel import ModelParallel
from tandem.runtime.collectives.communicator import Communicator
from tandem.trainer.logprobs import infer
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import MicroBatch, collate
from tandem.trainer.offload.activations import ActivationOffload
from tandem.trainer.optimizers.make import make_optimizer
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.placement import is_tied_copy, placement
from tandem.trainer.step import predict


def is_counted_here(model: Decoder, name: str, groups: Mapping[GroupName, Communicator]) -> bool:
    """Returns whether this rank counts the gradient of ``name`` in the global norm, so that each element is counted once over all ranks."""
    if is_tied_copy(model, name):
        return False
    where = placement(model, name)
    return groups[where.replicas].rank == 0 and (where.tensor == "shard" or groups["tensor"].rank == 0)


def micro_batches_of(case: Case, bins: Any, data: tuple[int, int] = (0, 1)) -> list[MicroBatch]:
    """Returns all micro-batches, or the parts of a data-parallel rank: every rank has the same number, with a part of each."""
    every = sequences_of(case)
    chosen = [[i for place, i in enumerate(one) if place % data[1] == data[0]] for one in bins]
    return [collate([every[i] for i in one], getattr(torch, case.dtype)) for one in chosen if one]


def norm_of(squares: list[float], limit: float, model: Decoder) -> float:
    norm = math.sqrt(math.fsum(squares))
    for parameter in model.parameters():
        if parameter.grad is not None and norm > limit:
            parameter.grad.mul_(limit / norm)
    return norm


def named(model: Decoder, values: list[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    """Returns ``values``, one for each parameter, by Hugging Face name."""
    twin = Decoder(model.shapes, model.kernels, dtype=model.dtype, parallel=model.parallel, spans=model.spans)
    with torch.no_grad():
        for parameter, value in zip(twin.parameters(), values, strict=True):
            assert value is not None
            parameter.copy_(value)
    return {name: tensor.clone() for name, tensor in to_huggingface(twin)}


def alone(case: Case, bins: Any) -> dict[str, Any]:
    """Trains ``case`` in one process with a loop over the micro-batches."""
    model = Decoder(case.shapes, select(case.kernels, getattr(torch, case.dtype)), dtype=getattr(torch, case.dtype))
    load_tensors(model, weights_of(case.shapes).items())
    micro_batches, loss_of = micro_batches_of(case, bins), make_cross_entropy_loss(counts_of(sequences_of(case)))
    optimizer = make_optimizer(model, case.trainer)
    with torch.no_grad():
        logits = [model.logits(model(m.tokens, m.positions, PackedContext(m.cu_seqlens, m.max_seqlen))) for m in micro_batches]
    found: dict[str, Any] = {"logits": logits, "losses": [], "norms": [], "inferred": infer(model, micro_batches, 1.3)}
    for step in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for micro_batch in micro_batches:
            share = loss_of(predict(model, micro_batch, 1.0), micro_batch)
            share.loss.backward()
            total += share.loss.item()
        if step == 0:
            found["gradients"] = named(model, [p.grad for p in model.parameters()])
        squares = [p.grad.double().square().sum().item() for p in model.parameters() if p.grad is not None]
        found["norms"].append(norm_of(squares, case.trainer.max_grad_norm, model))
        optimizer.step(LEARNING_RATE)
        found["losses"].append(total)
    found["parameters"] = named(model, list(model.parameters()))
    return found


def train_pipeline(
    here: RankContext, case: Case, bins: Any, order: ScheduleName = "1f1b", virtual: int = 1, counts: tuple[int, ...] = (), folder: Path | None = None
) -> dict[str, Any]:
    """Trains ``case`` as one rank. Returns the parameters and gradients that this rank holds. ``folder``: for offloaded activations."""
    groups, ranks = here.groups, here.groups["pipeline"]
    spans = stage_spans(case.shapes, ranks.size * virtual, counts)
    own = [spans[s] for s in PipelineShape(ranks.size, 1, virtual).stages_of(ranks.rank)]
    cut = ShardSpec(groups["tensor"].rank, groups["tensor"].size, case.deterministic)
    parallel = ModelParallel(cut, groups["tensor"], groups["context"], groups["expert"], case.sequence)
    dtype = getattr(torch, case.dtype)
    model = Decoder(case.shapes, select(case.kernels, dtype), dtype=dtype, spans=own, parallel=parallel)
    model.recompute = case.recompute
    load_tensors(model, weights_of(case.shapes).items())
    pipeline = Pipeline(model, spans, ranks, order)
    pages = None if folder is None else ActivationOffload(model, folder, 0, in_flight_bytes=1 << 12, passes=ranks.size - ranks.rank)
    micro_batches = micro_batches_of(case, bins, (groups["data"].rank, groups["data"].size))
    loss_of = make_cross_entropy_loss(counts_of(sequences_of(case)))
    optimizer = make_optimizer(model, case.trainer)
    logits: list[torch.Tensor] = []

    def keep(hidden: torch.Tensor, micro_batch: MicroBatch, rows: torch.Tensor) -> torch.Tensor:
        logits.append(model.packed_logits(hidden, len(micro_batch.tokens)))
        return logits[-1]

    pipeline.forward(micro_batches, keep)
    inferred = pipeline.infer(micro_batches, 1.3)
    found: dict[str, Any] = {"logits": logits, "losses": [], "norms": [], "cut": cut, "inferred": inferred}
    for step in range(case.steps):
        optimizer.zero_grad()
        passed = pipeline.forward_backward(micro_batches, loss_of)
        found["stash"] = passed.max_in_flight_micro_batches
        if pipeline.has_tied_copy:
            assert model.embed_tokens.grad is not None
            model.embed_tokens.grad = pipeline.sum_tied_gradient(model.embed_tokens.grad)
        reduce(model, groups)
        if step == 0:
            found["gradients"] = named(model, [p.grad for p in model.parameters()])
        squares = [p.grad.double().square().sum().item() for n, p in model.named_parameters() if p.grad is not None and is_counted_here(model, n, groups)]
        squares = groups["world"].all_gather(torch.tensor([math.fsum(squares)], dtype=torch.float64), "the norm").view(-1).tolist()
        found["norms"].append(norm_of(squares, case.trainer.max_grad_norm, model))
        optimizer.step(LEARNING_RATE)
        loss = groups["data"].all_reduce(torch.tensor([passed.loss], dtype=torch.float64), "the loss").item()
        found["losses"].append(loss)
    found["parameters"] = named(model, list(model.parameters()))
    found["offloaded"] = 0 if pages is None else pages.written_bytes
    return found


def gather_ranks(found: list[dict[str, Any]], name: str) -> dict[str, torch.Tensor]:
    """Returns the tensors of all ranks by name. A tensor on several ranks must have the same bits on each."""
    together: dict[str, torch.Tensor] = {}
    for rank in found:
        for key, value in rank[name].items():
            assert key not in together or torch.equal(together[key], value), key
            together[key] = value
    return together
