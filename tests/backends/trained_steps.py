"""Trains a model on random batches as one rank of a mesh, with the trainer that is asked for: ``python trained_steps.py JSON``.

It runs in this environment or in that of a sidecar, and writes to ``out``: the metrics of each step, the weights before and after them in the parts that an
engine would be sent, log-probabilities after them, and the largest number of micro-batches in flight.
"""

import json
import math
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tandem.config.algorithm import AlgorithmConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.mesh import Mesh, MeshShape
from tandem.pod.actor import build_state
from tandem.rl.algorithms.update import update_policy
from tandem.runtime.collectives.communicator import connect, join
from tandem.trainer.backend import TrainedState
from tandem.trainer.build import ReplicaSettings
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.logprobs import infer_sequences
from tandem.trainer.micro_batch import collate
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.rank_process import Rank, rank_alone
from tandem.trainer.step import LossShare
from tandem.types import Batch, TrainSequence

DEADLINE_S = 300.0
TEMPERATURE = 0.8


def make_batch(step: int, vocabulary: int, count: int = 10) -> Batch:
    """Returns sequences of random lengths, as a model draws them that is close to uniform, so that ratios stay near 1; some tokens are masked."""
    draw = random.Random(step)
    sequences = []
    for index in range(count):
        prompt, length = draw.randint(1, 9), draw.randint(1, 14)
        before, counts = (0.0,) * prompt, tuple(float(draw.random() > 0.15) for _ in range(length))
        columns = [before + tuple(-math.log(vocabulary) + draw.uniform(-0.2, 0.2) for _ in range(length)) for _ in range(3)]
        tokens = tuple(draw.randrange(vocabulary) for _ in range(prompt + length))
        advantages = before + (draw.uniform(-2, 2),) * length
        sequences.append(TrainSequence(f"{step}/{index}", tokens, prompt, before + counts, advantages, *columns, weight_step=step))
    return Batch(step, tuple(sequences), length_constant=14)


def make_rank(mesh: Mesh, given: dict[str, Any]) -> Rank:
    folder = Path(given["run"])
    if mesh.shape.world == 1:
        return rank_alone(folder)
    store = dist.FileStore(given["rendezvous"], mesh.shape.world)
    groups = join(mesh, store, torch.device("cpu"), DEADLINE_S, hostname="127.0.0.1")
    saving = connect("checkpoints", mesh.rank, mesh.shape.world, dist.PrefixStore("checkpoints/", store), torch.device("cpu"), DEADLINE_S)
    return Rank(Ranks(mesh, groups), folder, saving, store=store, timeout_s=DEADLINE_S)


def published(state: TrainedState) -> list[tuple[str, tuple[int, ...], tuple[int, ...], torch.Tensor]]:
    return [(shard.name, shard.offsets.start, shard.offsets.stop, shard.read().detach().clone()) for shard in state.weight_shards()]


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    mesh, backend = Mesh(MeshShape(**given["shape"]), given["rank"]), given["backend"]
    rank = make_rank(mesh, given)
    trainer = TrainerConfig(backend=backend, learning_rate=1e-4, weight_decay=0.1, micro_batch_tokens=40, max_grad_norm=0.5, **given["trainer"])
    parallel = ParallelConfig(**asdict(mesh.shape), zero=given["zero"], **given["parallel"])
    state = build_state(ReplicaSettings(Path(given["model"]), rank.directory, trainer, parallel, 100), rank, select("reference"))
    replica, guard = state.replica, GradScaler(trainer)
    checkpoints = ReplicaCheckpoints(rank.directory / "checkpoints", 3, Path(given["model"]), state, guard, rank.saving, asynchronous=False)
    before, loaded = published(state), checkpoints.load()
    metrics, algorithm, vocabulary = list[dict[str, float]](), AlgorithmConfig(kl_coef=0.1), replica.model.shapes.vocab_size
    for step in range(0 if loaded is None else loaded.step, given["steps"]):
        result = update_policy(replica, make_batch(step, vocabulary), algorithm, trainer, temperature=TEMPERATURE, guard=guard)
        metrics.append(dict(result.metrics))
        if step + 1 in given["save_at"]:
            checkpoints.save(step + 1, {"steps": step + 1})
    after, sequences = published(state), make_batch(1000, vocabulary).sequences
    logprobs = [values.tolist() for values in infer_sequences(replica, sequences, 40, 0.7)]
    passes = [collate([sequence]) for sequence in sequences[:6]]
    done = replica.forward_backward(passes, lambda outputs, micro_batch: LossShare((outputs.logprobs.scaled * 0).sum(), {}, {}))
    checkpoints.close()
    torch.save(
        {"before": before, "after": after, "metrics": metrics, "logprobs": logprobs, "in_flight": done.max_in_flight_micro_batches}, given["out"]
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
    # Threads of the process groups may still wait for ranks that have ended.
    os._exit(0)
