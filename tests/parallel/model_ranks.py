"""One seeded model and batch, trained for some steps by one process or by the ranks of a mesh, and gathered for comparison."""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from ranks import Here

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.mesh import GroupName
from tandem.layout.shapes import ExpertShapes, ModelShapes, parameters
from tandem.layout.sharding import Cut, cut_slices, is_held
from tandem.model.decoder import Decoder, PackedContext
from tandem.model.huggingface import load_tensors, to_huggingface
from tandem.model.parallel import ModelParallel
from tandem.rl.algorithms.aggregate import counts_of
from tandem.rl.algorithms.cross_entropy import make_cross_entropy_loss
from tandem.runtime.communicator import Communicator
from tandem.trainer.micro_batch import MicroBatch, collate
from tandem.trainer.optimizer import AdamW
from tandem.trainer.parallel.placement import is_counted_here, placement, sum_partial_gradients
from tandem.trainer.step import predict
from tandem.types import TrainSequence

QWEN3 = ModelShapes("qwen3", 43, 32, 2, 4, 2, 16, 48, 128, True, qk_norm=True)
LLAMA = ModelShapes("llama", 43, 32, 2, 4, 4, 8, 48, 128, False, attention_bias=True, output_bias=True, mlp_bias=True)
QWEN3_MOE = ModelShapes("qwen3_moe", 43, 32, 2, 4, 2, 16, 48, 128, False, qk_norm=True, experts=ExpertShapes(6, 2, 24))
WINDOWED = replace(QWEN3, layer_windows=(5, None))
LEARNING_RATE = 1e-2


@dataclass(frozen=True)
class Case:
    """What is trained and how: ``lengths`` of the sequences of the global batch, dealt to the data ranks in turn; the tokens at
    ``masked`` of every 4 do not count."""

    shapes: ModelShapes
    dtype: Literal["float32", "float64"] = "float64"
    kernels: Literal["reference", "cpu"] = "reference"
    deterministic: bool = False
    sequence: bool = False
    lengths: tuple[int, ...] = (9, 2, 17, 5, 30, 3, 8)
    masked: int = 2
    temperature: float = 1.0
    steps: int = 3
    recompute: Literal["none", "full", "selective"] = "none"


@dataclass
class Trained:
    """Whole tensors by Hugging Face name. ``logits``: of the first step's batch by global sequence; ``losses``, ``norms``: a step
    each; ``gradients``: of the first step, before clipping."""

    logits: dict[int, torch.Tensor]
    logprobs: dict[int, torch.Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def sequences_of(case: Case) -> list[TrainSequence]:
    draw = random.Random(5)
    found = []
    for number, length in enumerate(case.lengths):
        mask = (0.0, *(float(i % 4 != case.masked) for i in range(1, length)))
        found.append(TrainSequence(f"{number}", tuple(draw.randrange(case.shapes.vocab_size) for _ in range(length)), 1, mask))
    return found


def weights_of(shapes: ModelShapes) -> dict[str, torch.Tensor]:
    """Random whole weights in which no number is special."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) * (0.1 if len(shape) == 1 else 0.25) + name.endswith("norm.weight")
        for name, shape in parameters(shapes)
    }


def build(case: Case, groups: Mapping[GroupName, Communicator] | None) -> Decoder:
    parallel = None
    if groups is not None:
        cut = Cut(groups["tensor"].rank, groups["tensor"].size, case.deterministic, groups["expert"].rank, groups["expert"].size)
        parallel = ModelParallel(cut, groups["tensor"], groups["context"], groups["expert"], case.sequence)
    dtype = getattr(torch, case.dtype)
    model = Decoder(case.shapes, select(case.kernels, dtype), dtype=dtype, parallel=parallel)
    model.recompute = case.recompute
    load_tensors(model, weights_of(case.shapes).items())
    return model


def train(here: Here | None, case: Case) -> Trained:
    """``case`` on this rank, or in one process where there is none."""
    torch.set_num_threads(1)
    groups = None if here is None else here.groups
    model = build(case, groups)
    data = (0, 1) if groups is None else (groups["data"].rank, groups["data"].size)
    every = sequences_of(case)
    own = list(range(len(every)))[data[0] :: data[1]]
    micro_batch = collate([every[i] for i in own], getattr(torch, case.dtype))
    loss_of = make_cross_entropy_loss(counts_of(every))
    optimizer = AdamW(model.named_parameters(), TrainerConfig(learning_rate=LEARNING_RATE, dtype=case.dtype, weight_decay=0.01))
    logits, logprobs = by_sequence(model, micro_batch, own, case)
    trained = Trained(logits, logprobs, [], [], {}, {})
    for step in range(case.steps):
        optimizer.zero_grad()
        share = loss_of(predict(model, micro_batch, case.temperature), micro_batch)
        share.loss.backward()
        if groups is None:
            trained.losses.append(share.loss.item())
        else:
            reduce(model, groups)
            trained.losses.append(groups["data"].all_reduce(share.loss.detach().view(1), "the loss").item())
        if step == 0:
            trained.gradients = whole(model, {name: p.grad for name, p in model.named_parameters()}, groups)
        trained.norms.append(clip(model, optimizer, groups))
        optimizer.step(LEARNING_RATE)
    trained.parameters = whole(model, dict(model.named_parameters()), groups)
    return trained


def by_sequence(model: Decoder, micro_batch: MicroBatch, own: list[int], case: Case) -> tuple[dict[int, Any], dict[int, Any]]:
    with torch.no_grad():
        hidden = model(micro_batch.tokens, micro_batch.positions, PackedContext(micro_batch.cu_seqlens, micro_batch.max_seqlen))
        logits = model.packed_logits(hidden, len(micro_batch.tokens)).split(micro_batch.cu_seqlens.diff().tolist())
        found = predict(model, micro_batch, case.temperature)
        rows = micro_batch.sequence_of_row
        stacked = torch.stack((found.raw, found.scaled, found.entropy))
        return dict(zip(own, logits, strict=True)), {i: stacked[:, rows == place] for place, i in enumerate(own)}


def reduce(model: Decoder, groups: Mapping[GroupName, Communicator]) -> None:
    sum_partial_gradients(model)
    for name, parameter in model.named_parameters():
        ranks = groups[placement(model, name).replicas]
        assert parameter.grad is not None, name
        parameter.grad = ranks.all_reduce(parameter.grad, "a gradient")


def clip(model: Decoder, optimizer: AdamW, groups: Mapping[GroupName, Communicator] | None) -> float:
    squares = [
        p.grad.double().square().sum().item()
        for name, p in model.named_parameters()
        if p.grad is not None and (groups is None or is_counted_here(model, name, groups))
    ]
    if groups is not None:
        squares = groups["world"].all_gather(torch.tensor([math.fsum(squares)], dtype=torch.float64), "the norm").view(-1).tolist()
    norm = math.sqrt(math.fsum(squares))
    for parameter in model.parameters():
        if parameter.grad is not None and norm > optimizer.max_grad_norm:
            parameter.grad.mul_(optimizer.max_grad_norm / norm)
    return norm


def whole(
    model: Decoder, values: Mapping[str, torch.Tensor | None], groups: Mapping[GroupName, Communicator] | None
) -> dict[str, torch.Tensor]:
    """``values`` (one for each parameter) by Hugging Face name, whole where ``groups`` hold parts of them."""
    twin = Decoder(model.shapes, model.kernels, dtype=model.embed_tokens.dtype, parallel=model.parallel)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            value = values[name]
            assert value is not None, name
            parameter.copy_(value)
    own = {name: tensor.clone() for name, tensor in to_huggingface(twin)}
    if groups is None:
        return own
    found = {name: torch.full(shape, math.nan, dtype=model.embed_tokens.dtype) for name, shape in parameters(model.shapes)}
    tensor, expert = groups["tensor"], groups["expert"]
    for expert_rank in range(expert.size):
        for rank in range(tensor.size):
            cut = Cut(rank, tensor.size, model.cut.deterministic, expert_rank, expert.size)
            for name, tensor_of_all in found.items():
                if is_held(model.shapes, name, cut):
                    part = cut_slices(model.shapes, name, tuple(tensor_of_all.shape), cut)
                    is_own = (expert_rank, rank) == (expert.rank, tensor.rank)
                    sent = (own[name] if is_own else tensor_of_all[part]).clone(memory_format=torch.contiguous_format)
                    tensor.broadcast(sent, rank, "gathering")
                    expert.broadcast(sent, expert_rank, "gathering")
                    tensor_of_all[part] = sent
    return found


def distance(found: Mapping[Any, torch.Tensor], wanted: Mapping[Any, torch.Tensor]) -> float:
    """Norm of the difference over the norm, over all tensors together."""
    assert found.keys() == wanted.keys()
    difference = math.fsum((found[name] - wanted[name]).double().square().sum().item() for name in wanted)
    return math.sqrt(difference / math.fsum(value.double().square().sum().item() for value in wanted.values()))


_alone: dict[Case, Trained] = {}


def by_one(case: Case) -> Trained:
    """What one process has for ``case``, once."""
    plain = replace(case, deterministic=False, sequence=False)
    if plain not in _alone:
        _alone[plain] = train(None, plain)
    return _alone[plain]


def check(found: list[Trained], wanted: Trained) -> None:
    """Raise ``AssertionError`` where a rank has something else than ``wanted``."""
    is_float32 = next(iter(wanted.parameters.values())).dtype == torch.float32
    close = 1e-6 if is_float32 else 1e-10
    for rank in found:
        assert distance(rank.logits, {i: wanted.logits[i] for i in rank.logits}) < close
        assert distance(rank.logprobs, {i: wanted.logprobs[i] for i in rank.logprobs}) < close
        assert distance(rank.gradients, wanted.gradients) < close
        for values, others in ((rank.losses, wanted.losses), (rank.norms, wanted.norms)):
            assert all(abs(a - b) <= (1e-5 if is_float32 else 1e-10) * abs(b) for a, b in zip(values, others, strict=True))
        if is_float32:
            furthest = max((rank.parameters[name] - wanted.parameters[name]).abs().max().item() for name in wanted.parameters)
            assert furthest < 0.1 * LEARNING_RATE
        else:
            assert distance(rank.parameters, wanted.parameters) < close
    assert {i for rank in found for i in rank.logits} == set(wanted.logits)
