"""Trains a seeded policy with GRPO on the same samples and scores, in one process or as a rank of any mesh."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from data_parallel_training import record_gradients
from model_ranks import LLAMA, Case, ranks_of, weights_of
from pipeline_ranks import named
from ranks import RankContext

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.kernels.mixed import in_precision
from tandem.layout.parameters import parameters
from tandem.layout.pipeline_stages import stage_spans
from tandem.layout.schedules import PipelineShape, ScheduleName
from tandem.layout.sharding import ShardSpec, shard_slices
from tandem.model.decoder import Decoder
from tandem.model.huggingface.model_folder import load_tensors
from tandem.rl.algorithms.batch import make_batch, train_sequence
from tandem.rl.algorithms.token_entropies import EntropyRecord
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.logprobs import infer_sequences, sequence_logprobs
from tandem.trainer.offload.activations import ActivationOffload
from tandem.trainer.parallel.pipeline import Pipeline
from tandem.trainer.parallel.replica import FrozenReplica, Replica, make_replica
from tandem.trainer.parallel.router_balance import make_balance
from tandem.trainer.parallel.zero_frozen import FrozenShards
from tandem.types import FinishReason, RoutedExperts, Sample, Score, ScoreState, WeightVersion

TEMPERATURE = 0.8


@dataclass(frozen=True)
class Policy:
    """A policy and how it is trained.

    ``case``: the model and its sharding. ``counts``: number of samples of each prompt. ``faults``: indices of the samples of each step that have
    no score. ``schedule``: (name, virtual stages) of a pipeline. ``offloaded``: keys of section ``trainer`` to set to ``nvme``. ``deviation``:
    standard deviation of the initial matrices."""

    case: Case
    algorithm: AlgorithmConfig = field(default_factory=lambda: AlgorithmConfig(kl_coef=0.1, tis_cap=2.0, clip_ratio_high=0.28))
    counts: tuple[int, ...] = (4, 4, 3)
    faults: tuple[int, ...] = (1, 8, 9)
    micro_batch_tokens: int = 40
    max_grad_norm: float = 1.0
    schedule: tuple[ScheduleName, int] = ("1f1b", 1)
    offloaded: tuple[str, ...] = ()
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    deviation: float = 0.25
    routed: bool = False
    """Samples have a recorded routing, which is random and not that of the policy's routers."""

    @property
    def trainer(self) -> TrainerConfig:
        return replace(
            self.case.trainer, micro_batch_tokens=self.micro_batch_tokens, max_grad_norm=self.max_grad_norm, precision=self.precision,
            router_balance_loss=self.case.balance_loss, router_bias_rate=self.case.bias_rate, loss_scale=2.0**10,
            **dict.fromkeys(self.offloaded, "nvme"),
        )  # fmt: skip


EACH_ONE = Policy(
    Case(LLAMA, "float32", "cpu", steps=3), AlgorithmConfig(minibatches=2, kl_coef=0.1), counts=(4,), faults=(), micro_batch_tokens=1,
    max_grad_norm=0.0,
)
"""Two sequences to a minibatch and each in a micro-batch of its own: two ranks then add what one process adds, in its order."""


def scored_samples(policy: Policy, step: int) -> tuple[list[Sample], list[Score]]:
    """Samples of random tokens and lengths, with random records and scores."""
    draw = random.Random(step)
    samples: list[Sample] = []
    for prompt, count in enumerate(policy.counts):
        tokens = tuple(draw.randrange(policy.case.shapes.vocab_size) for _ in range(draw.randint(1, 6)))
        for index in range(count):
            length = draw.randint(1, 14)
            logprobs = [tuple(draw.uniform(-5.0, -2.5) for _ in range(length)) for _ in range(2)]
            drawn = tuple(draw.randrange(policy.case.shapes.vocab_size) for _ in range(length))
            samples.append(
                Sample(f"{step}/{prompt}/{index}", f"{prompt}", index, tokens, drawn, *logprobs, (WeightVersion(0, step),), FinishReason.STOP, "")
            )
    if policy.routed:
        samples = [replace(sample, routed_experts=_random_routing(policy, sample)) for sample in samples]
    scores = [
        Score(sample.id, ScoreState.INFRASTRUCTURE_FAULT, None) if place in policy.faults else Score(sample.id, ScoreState.NUMBER, draw.uniform(-1, 1))
        for place, sample in enumerate(samples)
    ]
    return samples, scores


def _random_routing(policy: Policy, sample: Sample) -> RoutedExperts:
    """Returns different experts for every token and layer."""
    shapes, draw = policy.case.shapes, random.Random(sample.id)
    assert shapes.experts is not None
    number, each = shapes.experts.num_experts, shapes.experts.num_experts_per_tok
    places = shapes.num_hidden_layers * (len(sample.prompt_token_ids) + len(sample.token_ids) - 1)
    return RoutedExperts(shapes.num_hidden_layers, each, 1, bytes(expert for _ in range(places) for expert in draw.sample(range(number), each)))


def replica_of(policy: Policy, here: RankContext | None, folder: Path | None) -> tuple[Replica, FrozenReplica]:
    """Returns the policy and a frozen reference, whose matrices are smaller, so that no comparison of the two turns on rounding."""
    case, ranks = policy.case, ranks_of(here, policy.case)
    stages, (order, virtual) = ranks.groups["pipeline"], policy.schedule
    spans = stage_spans(case.shapes, stages.size * virtual) if stages.size > 1 else None
    own = () if spans is None else [spans[s] for s in PipelineShape(stages.size, 1, virtual).stages_of(stages.rank)]
    dtype = getattr(torch, case.dtype)

    def model(size: float) -> Decoder:
        found = Decoder(case.shapes, select(case.kernels, dtype), dtype=dtype, parallel=ranks.model_parallel(), spans=own)
        weights = weights_of(case.shapes).items()
        load_tensors(found, ((name, w * (size * policy.deviation / 0.25) if w.ndim > 1 else w) for name, w in weights))
        found.kernels = in_precision(found.kernels, policy.precision, found.device)
        return found

    def pipeline(of: Decoder) -> Pipeline | None:
        return None if spans is None else Pipeline(of, spans, stages, order)

    actor, reference = model(1.0), model(0.97).requires_grad_(False)
    actor.recompute, actor.router_balance = case.recompute, make_balance(actor, policy.trainer, ranks)
    replica = make_replica(actor, policy.trainer, ranks, case.zero, pipeline(actor), folder)
    assert (replica.paged is not None, replica.pages_weights) == ("offload" in policy.offloaded, "offload_parameters" in policy.offloaded)
    if folder is not None and "offload_activations" in policy.offloaded:
        ActivationOffload(actor, folder, 0, in_flight_bytes=1 << 12, passes=(stages.size - stages.rank) * virtual)
    stages_of_reference = pipeline(reference)
    shards = FrozenShards(reference.requires_grad_(True), ranks, is_filled=True) if case.zero == 3 and ranks.world.size > 1 else None
    return replica, FrozenReplica(ranks, reference, stages_of_reference, shards)


def train_policy(here: RankContext | None, policy: Policy, folder: Path | None = None) -> dict[str, Any]:
    """Trains ``policy`` for its steps on this rank, or in one process. Returns ``gradients`` of the first update before clipping and
    ``parameters``, both this rank's shards by Hugging Face name, with their shard spec ``cut``."""
    torch.set_num_threads(1)
    (replica, reference), algorithm = replica_of(policy, here, folder), policy.algorithm
    model, ranks, guard = replica.model, replica.ranks, GradScaler(policy.trainer)
    tensor, expert = ranks.groups["tensor"], ranks.groups["expert"]
    found: dict[str, Any] = {"metrics": [], "tokens": [], "entropies": []}
    found |= {"cut": ShardSpec(tensor.rank, tensor.size, policy.case.deterministic, expert.rank, expert.size)}
    gradients = {} if policy.offloaded else _gradients_before_clipping(replica)
    for step in range(policy.case.steps):
        samples, scores = scored_samples(policy, step)
        sequences = [train_sequence(sample) for sample in samples]
        if step == 0:
            found["logprobs"] = infer_sequences(replica, sequences, policy.micro_batch_tokens, TEMPERATURE)
        known = sequence_logprobs(reference, sequences, policy.micro_batch_tokens) if algorithm.needs_reference else None
        batch, entropies = make_batch(step, samples, scores, algorithm, 14, known), EntropyRecord()
        result = update_policy(replica, batch, algorithm, policy.trainer, temperature=TEMPERATURE, guard=guard, entropies=entropies)
        found["entropies"].append(entropies.take(batch.sequences, ranks.world, model.device))
        found["metrics"].append(result.metrics)
        found["tokens"].append(result.tokens)
    with replica.whole():
        found["parameters"] = named(model, list(model.parameters()))
        if gradients:
            found["gradients"] = named(model, [gradients[name] for name, _ in model.named_parameters()])
    found["biases"] = {} if model.router_balance is None else model.router_balance.state()
    return found


def _gradients_before_clipping(replica: Replica) -> dict[str, torch.Tensor]:
    """Returns a mapping that is filled with the gradients by name before the first clipping."""
    if replica.sums is not None:
        return record_gradients(replica.sums)
    found: dict[str, torch.Tensor] = {}
    clip = replica.optimizer.clip

    def keep(scale: float = 1.0) -> float:
        if not found:
            found.update({name: p.grad.clone() for name, p in replica.model.named_parameters() if p.grad is not None})
        return clip(scale)

    replica.optimizer.clip = keep  # type: ignore[method-assign]
    return found


_alone: dict[Policy, dict[str, Any]] = {}


def by_one_process(policy: Policy) -> dict[str, Any]:
    """Returns the results of one process for ``policy`` with everything in memory, computed once."""
    plain = replace(policy, case=replace(policy.case, deterministic=False, sequence=False, zero=0, recompute="none"), schedule=("1f1b", 1), offloaded=())
    if plain not in _alone:
        _alone[plain] = train_policy(None, plain)
    return _alone[plain]


def gather_shards(found: list[dict[str, Any]], kind: str, policy: Policy) -> dict[str, torch.Tensor]:
    """Returns the whole tensors from the shards of all ranks. Raises ``AssertionError`` if two ranks differ in the same shard."""
    shapes = dict(parameters(policy.case.shapes))
    whole: dict[str, torch.Tensor] = {}
    held: dict[tuple[Any, ...], torch.Tensor] = {}
    for rank in found:
        for name, part in rank[kind].items():
            at = shard_slices(policy.case.shapes, name, shapes[name], rank["cut"])
            assert torch.equal(held.setdefault((name, str(at)), part), part), (kind, name)
            whole.setdefault(name, torch.full(shapes[name], torch.nan, dtype=part.dtype))[at] = part
    assert whole.keys() == shapes.keys() and all(bool(value.isfinite().all()) for value in whole.values())
    return whole
