"""One rank that trains a policy with GRPO on drawn samples: with DeepSpeed in its own environment, or with Tandem's trainer in ours.

``python deepspeed_ranks.py JSON``; the keys are those of ``Job``. Rank 0 writes ``result.pt`` in ``folder``: the metrics of every step, the weights by their
names at the end, and what was asked for.
"""

import json
import os
import random
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.mesh import Mesh, MeshShape
from tandem.rl.algorithms.batch import make_batch
from tandem.rl.algorithms.update import update_policy
from tandem.runtime.collectives.communicator import connect, join
from tandem.trainer.backend import TrainedState
from tandem.trainer.build import ReplicaSettings, build_replica
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rank_process import Rank, rank_alone
from tandem.types import Batch, FinishReason, Sample, Score, ScoreState, WeightVersion
from tandem.weight_transfer.convert import convert

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Job:
    """``model``: a Hugging Face folder. ``first`` to ``last``: the steps; before, the newest checkpoint of ``folder`` is loaded, and one is written after
    ``save_after``. ``poisoned``: the step whose advantages are infinite. ``epochs``: optimizer updates on each minibatch of two in a step."""

    model: str
    folder: str
    backend: str = "deepspeed"
    rank: int = 0
    world: int = 1
    stage: int = 1
    offload: str = "none"
    store: str = ""
    first: int = 0
    last: int = 20
    save_after: int = -1
    poisoned: int = -1
    epochs: int = 1
    recompute: str = "none"
    share_prompts: bool = False
    precision: str = "fp32"

    @property
    def trainer(self) -> TrainerConfig:
        return TrainerConfig(
            learning_rate=1e-3, warmup_steps=2, schedule="cosine", min_lr_ratio=0.1, weight_decay=0.1, micro_batch_tokens=40, max_grad_norm=0.5,
            offload=self.offload, recompute=self.recompute, share_prompts=self.share_prompts,
            precision=self.precision,  # type: ignore[arg-type]
        )  # fmt: skip


ALGORITHM = AlgorithmConfig(group_size=4, kl_coef=0.0)


def batch_of(step: int) -> Batch:
    """Three groups of four samples of random tokens and lengths, with random records and scores, one of them masked."""
    draw, samples, scores = random.Random(step), list[Sample](), list[Score]()
    for prompt in range(3):
        tokens = tuple(draw.randrange(30) for _ in range(5))
        for index in range(4):
            drawn = tuple(draw.randrange(30) for _ in range(draw.randint(1, 12)))
            logprobs = tuple(draw.uniform(-4, -2) for _ in drawn)
            version = (WeightVersion(0, step),) * len(drawn)
            samples.append(Sample(f"{step}/{prompt}/{index}", f"{prompt}", index, tokens, drawn, logprobs, logprobs, version, FinishReason.STOP, ""))
            is_masked = (prompt, index) == (1, 2)
            scores.append(Score(samples[-1].id, *((ScoreState.INFRASTRUCTURE_FAULT, None) if is_masked else (ScoreState.NUMBER, draw.uniform(-1, 1)))))
    return make_batch(step, samples, scores, ALGORITHM, 12, None, None)


def poisoned(batch: Batch) -> Batch:
    """``batch`` with an infinite advantage, whose gradient is not finite."""
    first = batch.sequences[0]
    return replace(batch, sequences=(replace(first, advantages=tuple(float("inf") * (mask or 1) for mask in first.loss_mask)), *batch.sequences[1:]))


def rank_of(job: Job) -> Rank:
    if job.world == 1:
        return rank_alone(Path(job.folder))
    store = dist.FileStore(job.store, job.world)
    mesh = Mesh(MeshShape(data=job.world), job.rank)
    saving = connect("checkpoints", job.rank, job.world, dist.PrefixStore("checkpoints/", store), CPU, 120.0)
    ranks = Ranks(mesh, join(mesh, store, CPU, 120.0, None, "127.0.0.1"))
    return Rank(ranks, Path(job.folder), saving, store=store, timeout_s=120.0)


def state_of(job: Job, rank: Rank) -> TrainedState:
    kernels = select("auto", torch.float32, CPU)
    zero = job.stage if job.backend == "deepspeed" or job.world > 1 else 0
    settings = ReplicaSettings(Path(job.model), Path(job.folder), job.trainer, ParallelConfig(data=job.world, zero=zero), 64)  # type: ignore[arg-type]
    if job.backend == "tandem":
        return ReplicaState(build_replica(settings, rank.ranks, kernels))
    from tandem.backends.deepspeed.build import build_deepspeed

    return build_deepspeed(settings, rank, kernels)


def published(state: TrainedState, ranks: Ranks) -> dict[str, Tensor]:
    """Every tensor as engines receive it: each part from the rank that owns it, read as it would be written to shared memory."""
    converted = convert(state)
    found = {tensor.name: torch.full(tensor.shape, float("nan")) for tensor in converted.tensors}
    for part in converted.own:
        tensor = converted.tensors[part.tensor]
        found[tensor.name][tensor.parts[part.part].offsets.slices] = part.read()
    for name, tensor in found.items():
        parts = ranks.world.all_gather(tensor.nan_to_num(nan=0.0), name)
        written = ranks.world.all_gather(torch.tensor(tensor.isnan().logical_not().sum()), f"{name}, elements")
        assert int(written.sum()) == tensor.numel(), f"{name}: {written.tolist()} of {tensor.numel()} elements are published"
        found[name] = parts.sum(0)
    return found


def main(job: Job) -> None:
    torch.set_num_threads(1)
    rank = rank_of(job)
    ranks, state, guard = rank.ranks, state_of(job, rank), GradScaler(job.trainer)
    checkpoints = ReplicaCheckpoints(Path(job.folder) / "checkpoints", 2, Path(job.model), state, guard, rank.saving, asynchronous=False)
    algorithm = replace(ALGORITHM, epochs=job.epochs, minibatches=min(2, job.epochs))
    rows, loaded = list[dict[str, float]](), checkpoints.load()
    assert (0 if loaded is None else loaded.step) == job.first, loaded
    start = published(state, ranks)
    for step in range(job.first, job.last):
        batch = poisoned(batch_of(step)) if step == job.poisoned else batch_of(step)
        result = update_policy(state.replica, batch, algorithm, job.trainer, total_steps=20, guard=guard)
        rows.append(result.metrics | {"updated": float(result.updated)})
        if step + 1 == job.save_after:
            checkpoints.save(job.save_after, {"steps": job.save_after})
            checkpoints.wait()
    every, whole = published(state, ranks), {name: value.clone() for name, value in state.replica.each_parameter()}
    if job.rank == 0:
        torch.save({"rows": rows, "weights": every, "start": start, "parameters": whole, "updates": state.replica.optimizer.updates}, f"{job.folder}/result.pt")
    ranks.world.barrier("end")


if __name__ == "__main__":
    main(Job(**json.loads(sys.argv[1])))
    sys.stdout.flush()
    # Threads of process groups may still wait for ranks that have ended.
    os._exit(0)
