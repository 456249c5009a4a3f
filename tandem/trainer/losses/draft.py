"""The loss of an EAGLE-3 draft head (Li et al., 2025, section 3.2): the cross-entropy to the target's distribution at every position of a draft."""

import itertools
import math
import operator
from collections.abc import Mapping, Sequence

import torch

from tandem.model.head_outputs import HeadOutputs
from tandem.trainer.losses.aggregate import GlobalCounts, weighted_sum
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.step import Loss, LossShare

DECAY = 0.8
"""The weight of a position of a draft, relative to that of the one before it (as in the code of the paper)."""
AGREED, COUNTED = "draft/agreed", "draft/counted"
"""Prefixes of sums by position: tokens at which the head's most probable token is the target's, and all of them."""


def make_draft_loss(counts: GlobalCounts, name: str) -> Loss:
    """Returns a loss, which is the metric ``name`` too: the sum over the positions of a draft, each with its weight, of the mean cross-entropy over the counted
    tokens of the global batch. A token that the target would not take from the head's vocabulary teaches nothing, and counts as one that the head misses."""

    def loss(outputs: HeadOutputs, rows: MicroBatch) -> LossShare:
        assert outputs.of_draft is not None
        total, sums = torch.zeros((), dtype=torch.float64, device=rows.tokens.device), {}
        for position, step in enumerate(outputs.of_draft):
            weights = step.mask.double() * step.known.double()
            total = total + DECAY**position * weighted_sum(step.cross_entropy, weights) / counts.tokens
            sums[f"{AGREED}/{position}"] = step.agrees.double().sum()
            sums[f"{COUNTED}/{position}"] = step.mask.double().sum()
        return LossShare(total, {name: total.detach(), **sums}, {})

    return loss


def with_acceptance(metrics: Mapping[str, float]) -> dict[str, float]:
    """Returns ``metrics`` with ``draft/acceptance/K`` in the place of the sums by position: the share of tokens at position K at which the head's most probable
    token is the target's, as greedy decoding accepts it; and with the ``draft/acceptance_length`` that they come to."""
    kept = {name: value for name, value in metrics.items() if not name.startswith((AGREED, COUNTED))}
    counts = {name.rpartition("/")[2]: value for name, value in metrics.items() if name.startswith(COUNTED)}
    rates = {position: metrics[f"{AGREED}/{position}"] / max(count, 1.0) for position, count in counts.items()}
    length = acceptance_length([rates[position] for position in sorted(rates, key=int)])
    return kept | {f"draft/acceptance/{position}": rate for position, rate in rates.items()} | {"draft/acceptance_length": length}


def acceptance_length(rates: Sequence[float]) -> float:
    """Returns the mean number of tokens of a step of greedy speculative decoding, the model's own among them (the acceptance length of EAGLE's papers, the mean
    acceptance length of vLLM): 1 + a_0 + a_0 a_1 + ..., where the token at position k is accepted at the rate a_k after those before it."""
    return 1.0 + math.fsum(itertools.accumulate(rates, operator.mul))
