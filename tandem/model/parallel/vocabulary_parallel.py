"""Log-probabilities with a head whose rows are sharded over tensor-parallel ranks (Shoeybi et al., 2019, section 3)."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem.kernels.api import Kernels, TokenLogprobs
from tandem.kernels.mixed import head_kernels
from tandem.kernels.reference_dtype import soft_cap_slope
from tandem.kernels.reference_logprobs import HeadGradients
from tandem.layout import lm_head as sizes
from tandem.model.parallel.collective_ops import gathered_columns, gathered_head, joined_rows
from tandem.model.parallel.model_parallel import ModelParallel, training_collectives
from tandem.runtime.collectives.communicator import Communicator


class Head(NamedTuple):
    """``weight[n, H]``: this rank's rows of the head, from token id ``first`` on, of ``size`` in total; every rank but the last holds
    ``part``. ``cap``: the soft cap of the logits (``None``: without)."""

    weight: Tensor
    first: int
    part: int
    size: int
    cap: float | None = None


def shared_logprobs(
    kernels: Kernels, parallel: ModelParallel, hidden: Tensor, head: Head, rows: Tensor, targets: Tensor, temperature: float, tokens: int
) -> TokenLogprobs:
    """Computes ``Decoder.token_logprobs`` of a batch of ``tokens`` whose final hidden states are sharded over the ranks of ``parallel``.
    Each context rank takes the rows of its own run."""
    bounds, rank = parallel.bounds(tokens), parallel.context.rank
    first, last = bounds[rank], bounds[rank + 1]
    # With one context rank, which has all rows, no device synchronization is needed to count them.
    edges = [0, len(rows)] if parallel.context.size == 1 else torch.searchsorted(rows, torch.tensor(bounds, device=rows.device)).tolist()
    mine = slice(edges[rank], edges[rank + 1])
    states = gathered_hidden(parallel, hidden, last - first).index_select(0, rows[mine] - first)
    if parallel.tensor.size == 1:
        own = kernels.token_logprobs(states, head.weight, targets[mine], temperature, head.cap)
    else:
        own = vocabulary_logprobs(kernels, parallel, states, head, targets[mine], temperature)
    if parallel.context.size == 1:
        return own
    return _joined(own, [after - before for before, after in itertools.pairwise(edges)], parallel.context, temperature)


def shared_logits(kernels: Kernels, parallel: ModelParallel, hidden: Tensor, head: Head, tokens: int) -> Tensor:
    """Returns the logits [tokens, V] of the whole batch, on every rank."""
    bounds, rank = parallel.bounds(tokens), parallel.context.rank
    own = _own_logits(kernels, gathered_hidden(parallel, hidden, bounds[rank + 1] - bounds[rank]), head)
    if parallel.tensor.size > 1:
        own = gathered_columns(own, parallel.tensor, "logits", partial=False)[:, : head.size]
    if parallel.context.size == 1:
        return own
    return joined_rows(own, [end - start for start, end in itertools.pairwise(bounds)], parallel.context, "logits")


def first_rank_logits(kernels: Kernels, parallel: ModelParallel, hidden: Tensor, head: Head) -> Tensor | None:
    """Returns the logits [R, V] of the whole ``hidden[R, H]`` on the first tensor-parallel rank, ``None`` on the others. No gradient."""
    parts = parallel.tensor.gather(_own_logits(kernels, hidden, head), 0, "logits")
    return torch.cat(parts, dim=1)[:, : head.size] if parts else None


def _own_logits(kernels: Kernels, hidden: Tensor, head: Head) -> Tensor:
    """Returns the logits of this rank's rows of the head, and zeros up to its ``part``."""
    own = head_kernels(kernels).linear(hidden, head.weight, None)
    own = own if head.cap is None else kernels.soft_cap(own, head.cap)
    return own if own.shape[1] == head.part else F.pad(own, (0, head.part - own.shape[1]))


def gathered_hidden(parallel: ModelParallel, hidden: Tensor, tokens: int) -> Tensor:
    """Returns the hidden states of all ``tokens`` of this context rank under sequence parallelism. The gradient of the result is
    partial."""
    return training_collectives(parallel, tokens).leave(hidden)


def vocabulary_logprobs(
    kernels: Kernels, parallel: ModelParallel, hidden: Tensor, head: Head, targets: Tensor, temperature: float
) -> TokenLogprobs:
    """Computes ``Kernels.token_logprobs`` over the tensor ranks; ``hidden[R, H]`` and ``targets[R]`` are whole.

    With deterministic sharding each rank takes some of the R rows to the whole head, gathered for this; the results have the bits of one
    rank. Otherwise each takes all rows to its own shard, and maxima and sums over the vocabulary are reduced."""
    ranks = parallel.tensor
    if parallel.shard_spec.deterministic:
        whole = gathered_head(head.weight, head.part, head.size, ranks, "rows of the head")
        bounds = [len(hidden) * rank // ranks.size for rank in range(ranks.size + 1)]
        mine = slice(bounds[ranks.rank], bounds[ranks.rank + 1])
        own = kernels.token_logprobs(hidden[mine], whole, targets[mine], temperature, head.cap)
        return _joined(own, [end - start for start, end in itertools.pairwise(bounds)], ranks, temperature)
    raw, scaled, entropy = _VocabularyLogprobs.apply(hidden, head.weight, targets, temperature, head.first, ranks, kernels, head.cap)
    return TokenLogprobs(raw, raw if temperature == 1 else scaled, entropy)


def _joined(own: TokenLogprobs, counts: list[int], ranks: Communicator, temperature: float) -> TokenLogprobs:
    """Concatenates every rank's rows, on all ranks."""
    raw = joined_rows(own.raw, counts, ranks, "log-probabilities")
    scaled = raw if temperature == 1 else joined_rows(own.scaled, counts, ranks, "log-probabilities")
    return TokenLogprobs(raw, scaled, joined_rows(own.entropy, counts, ranks, "entropies"))


class _VocabularyLogprobs(torch.autograd.Function):
    """Computes logits chunk by chunk, and again in the backward pass, which needs no communication."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, first: int, ranks: Communicator, kernels: Kernels,
        cap: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        compute = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        own = targets - first
        held = (own >= 0) & (own < len(weight))
        own = own.clamp(0, len(weight) - 1)
        temperatures = (1.0,) if temperature == 1 else (1.0, temperature)
        parts = torch.empty(len(temperatures), 4, len(hidden), dtype=compute, device=hidden.device)
        for rows in sizes.row_chunks(len(hidden), len(weight), sizes.FORWARD_LOGITS):
            logits = _capped(kernels, kernels.linear(hidden[rows], weight, None), cap)
            parts[:, :, rows] = _row_sums(logits.to(compute), own[rows], held[rows], temperatures)
        largest = ranks.all_gather(parts[:, 0], "largest logits").amax(0)
        rescale = torch.exp(parts[:, 0] - largest).unsqueeze(1)
        sums = ranks.all_reduce(torch.cat((parts[:, 1:3] * rescale, parts[:, 3:]), dim=1), "sums over the vocabulary")
        normaliser = largest + sums[:, 0].log()
        logprobs = sums[:, 2] - normaliser
        entropy = normaliser[-1] - sums[-1, 1] / sums[-1, 0]
        ctx.save_for_backward(hidden, weight, own, held, normaliser)
        ctx.temperatures, ctx.kernels, ctx.compute, ctx.cap = temperatures, kernels, compute, cap
        ctx.mark_non_differentiable(entropy)
        return logprobs[0], logprobs[-1] if temperature != 1 else logprobs.new_empty(0), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, own, held, normaliser = ctx.saved_tensors
        gradients = HeadGradients(hidden, weight, ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        for rows in sizes.row_chunks(len(hidden), len(weight), sizes.BACKWARD_LOGITS):
            logits = _capped(ctx.kernels, ctx.kernels.linear(hidden[rows], weight, None), ctx.cap).to(ctx.compute)
            slope = None if ctx.cap is None else soft_cap_slope(logits, ctx.cap)
            total: Tensor | None = None
            for place, divisor in enumerate(ctx.temperatures):
                of_rows = (grads[place][rows] / divisor).unsqueeze(1)
                # Each step reuses the previous step's memory; the last temperature uses that of the logits.
                scaled = logits if place == len(ctx.temperatures) - 1 else logits.clone()
                grad = scaled.div_(divisor).sub_(normaliser[place, rows].unsqueeze(1)).exp_().neg_().mul_(of_rows)
                grad.scatter_add_(1, own[rows].unsqueeze(1), of_rows * held[rows].unsqueeze(1))
                total = grad if total is None else total.add_(grad)
            assert total is not None
            gradients.add(total if slope is None else total.mul_(slope), rows)
            del logits, slope, scaled, grad, total
        return *gradients.result(), None, None, None, None, None, None


def _capped(kernels: Kernels, logits: Tensor, cap: float | None) -> Tensor:
    return logits if cap is None else kernels.soft_cap(logits, cap)


def _row_sums(logits: Tensor, own: Tensor, held: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Returns for each temperature and row of this rank's ``logits[R, n]``: the largest logit, the sum of exponentials, the sum of
    exponentials times logits, and the target's logit (0 if ``held[R]`` says that another rank has it): [temperatures, 4, R]."""
    statistics = []
    for divisor in temperatures:
        scaled = logits if divisor == 1 else logits / divisor
        largest = scaled.amax(1)
        weights = (scaled - largest.unsqueeze(1)).exp_()
        chosen = scaled.gather(1, own.unsqueeze(1)).squeeze(1).masked_fill(~held, 0.0)
        # 0 times -inf must be 0: a token of probability 0 adds nothing to the entropy.
        expected = scaled.clamp_min(torch.finfo(scaled.dtype).min).mul_(weights).sum(1)
        statistics.append(torch.stack((largest, weights.sum(1), expected, chosen)))
    return torch.stack(statistics)
