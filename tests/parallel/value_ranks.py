"""Trains a seeded value model on seeded returns, in one process or as a rank of any mesh."""

import random
from dataclasses import replace
from typing import Any

import torch
from model_ranks import LEARNING_RATE, sequences_of
from pipeline_ranks import named
from policy_ranks import Policy, _gradients_before_clipping, replica_of
from ranks import RankContext

from tandem.layout.sharding import ShardSpec
from tandem.trainer.logprobs import sequence_values
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.value import make_value_loss
from tandem.trainer.micro_batch import make_micro_batches
from tandem.trainer.packing import pack_shares
from tandem.trainer.step import train_step

CLIP = 0.3


def train_values(here: RankContext | None, policy: Policy) -> dict[str, Any]:
    """Trains the value model of ``policy.case`` towards random returns; the results are those of ``policy_ranks.train_policy``, with the values of the
    start, and those of its frozen copy, in place of log-probabilities."""
    torch.set_num_threads(1)
    replica, frozen = replica_of(policy, here, None)
    model, ranks, draw = replica.model, replica.ranks, random.Random(11)
    tensor, expert = ranks.groups["tensor"], ranks.groups["expert"]
    cut = ShardSpec(tensor.rank, tensor.size, policy.case.deterministic, expert.rank, expert.size)
    sequences = [
        replace(s, values=tuple(draw.uniform(-1, 1) for _ in s.token_ids), returns=tuple(draw.uniform(-1, 1) for _ in s.token_ids))
        for s in sequences_of(policy.case)
    ]
    inferred = [sequence_values(of, sequences, policy.micro_batch_tokens) for of in (replica, frozen)]
    found: dict[str, Any] = {"metrics": [], "tokens": [], "cut": cut, "biases": {}}
    found["logprobs"] = [torch.tensor(values, dtype=torch.float64) for by_id in inferred for values in by_id.values()]
    gradients = _gradients_before_clipping(replica)
    shares = pack_shares(sequences, ranks.data.size, policy.micro_batch_tokens)
    own = shares[ranks.data.rank]
    micro_batches = make_micro_batches(sequences, own, replica.passes(len(own), max(map(len, shares))), model.dtype, model.device)
    loss = make_value_loss(CLIP, "seq-mean-token-mean", counts_of(sequences))
    for _ in range(policy.case.steps):
        result = train_step(
            model, replica.optimizer, micro_batches, loss, LEARNING_RATE, sums=replica.sums, forward_backward=replica.forward_backward
        )
        found["metrics"].append(result.metrics)
        found["tokens"].append(0)
    with replica.whole():
        found["parameters"] = named(model, list(model.parameters()))
        found["gradients"] = named(model, [gradients[name] for name, _ in model.named_parameters()])
    return found


_alone: dict[Policy, dict[str, Any]] = {}


def values_by_one_process(policy: Policy) -> dict[str, Any]:
    """Returns the results of one process for ``policy``, computed once."""
    plain = replace(policy, case=replace(policy.case, deterministic=False, sequence=False, zero=0, recompute="none"))
    if plain not in _alone:
        _alone[plain] = train_values(None, plain)
    return _alone[plain]
