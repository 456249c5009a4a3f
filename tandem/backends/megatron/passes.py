"""The forward and backward passes of micro-batches through Megatron-Core's schedules, with a loss of Tandem's.

Attention of the local specification knows no packed sequences, so each sequence of a micro-batch is a row of its own, padded at its end: a causal mask keeps
padding out of every token's attention.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.kernels.api import TokenLogprobs
from tandem.model.head_outputs import HeadOutputs
from tandem.trainer.micro_batch import MicroBatch
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.step import Progress


class RowShape(NamedTuple):
    """``rows`` sequences of ``length`` tokens."""

    rows: int
    length: int


class Rows(NamedTuple):
    """A micro-batch as rows: ``tokens[B, L]``, ``positions[B, L]``, and ``predicting[R]``, the places of its predicting tokens in ``tokens`` as one run."""

    tokens: Tensor
    positions: Tensor
    predicting: Tensor


def row_shape(micro_batch: MicroBatch) -> RowShape:
    return RowShape(micro_batch.sequence_count, micro_batch.max_seqlen)


def as_rows(micro_batch: MicroBatch, shape: RowShape) -> Rows:
    """Returns ``micro_batch`` as rows of ``shape``, padded with token 0."""
    lengths = micro_batch.cu_seqlens.diff().long()
    row_of_token = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    places = row_of_token * shape.length + micro_batch.positions
    tokens = micro_batch.tokens.new_zeros(shape.rows * shape.length)
    tokens[places] = micro_batch.tokens
    positions = torch.arange(shape.length, device=tokens.device).expand(shape.rows, -1)
    return Rows(tokens.view(shape.rows, shape.length), positions, places[micro_batch.rows])


def shapes_of(micro_batches: Sequence[MicroBatch], ranks: Ranks, varies: bool) -> list[RowShape]:
    """Returns the shape of each micro-batch's rows: its own, or one for all where ranks exchange activations of one shape: the stages of a pipeline unless the
    shape ``varies``, and the ranks that gather the tokens of experts (``dispatcher``). Lengths are multiples of the tensor ranks, over which sequence
    parallelism divides them. Every rank calls it."""
    tensor, gathers = ranks.groups["tensor"].size, ranks.groups["expert"].size > 1 and dispatcher(ranks) == "allgather"
    own = [RowShape(rows, -(-length // tensor) * tensor) for rows, length in map(row_shape, micro_batches)]
    if (varies or ranks.groups["pipeline"].size == 1) and not gathers:
        return own
    most = RowShape(max(rows for rows, _ in own), max(length for _, length in own))
    if gathers:
        every = ranks.all_values(list(map(float, most)), "the shape of micro-batches")
        most = RowShape(*(int(max(column)) for column in zip(*every, strict=True)))
    return [most] * len(own)


def dispatcher(ranks: Ranks) -> Literal["alltoall", "allgather"]:
    """Returns Megatron's way of tokens to experts: all-to-all, or to all ranks where tensor ranks divide each expert, because all-to-all then gathers parts
    of unequal size, which gloo does not."""
    return "allgather" if ranks.groups["tensor"].size > 1 else "alltoall"


def head_outputs(logits: Tensor, rows: Rows, targets: Tensor, temperature: float, first: int, vocabulary: int) -> HeadOutputs:
    """Returns the log-probabilities of ``targets[R]`` from ``logits[B, L, V / tensor ranks]``, whose first column is token id ``first``. Ids from
    ``vocabulary`` on are padding, which has no probability."""
    own = logits.flatten(0, 1).index_select(0, rows.predicting)
    padding = first + own.shape[1] - vocabulary
    if padding > 0:
        is_padding = torch.arange(own.shape[1], device=own.device) >= own.shape[1] - padding
        own = own.masked_fill(is_padding, float("-inf"))
    at_temperature = own if temperature == 1.0 else own / temperature
    scaled = _logprobs(at_temperature, targets)
    raw = scaled if temperature == 1.0 else _logprobs(own, targets)
    return HeadOutputs(TokenLogprobs(raw, scaled, _entropy(at_temperature)))


def _logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    # It changes its argument in place.
    losses: Tensor = vocab_parallel_cross_entropy(logits.clone().unsqueeze(1), targets.unsqueeze(1))
    return -losses.squeeze(1)


@torch.no_grad()
def _entropy(logits: Tensor) -> Tensor:
    """Returns the entropy (nats) of each row's distribution over all tensor ranks: log Z - sum of p (x - m), where m is the maximum."""
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    most = logits.amax(dim=1)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    shifted = logits - most.unsqueeze(1)
    weights = shifted.exp()
    sums = torch.stack([weights.sum(dim=1), (weights * shifted.nan_to_num(neginf=0.0)).sum(dim=1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]


@dataclass
class InFlight:
    """Counts the micro-batches whose activations are in memory on this rank: ``most`` at once."""

    now: int = 0
    most: int = 0

    def watch(self, output: Tensor) -> None:
        """Counts a forward pass that gave ``output``, until its backward pass begins."""
        self.now += 1
        self.most = max(self.most, self.now)
        output.register_hook(self._left)  # type: ignore[no-untyped-call]

    def _left(self, _: Tensor) -> None:
        self.now -= 1


def numbered(micro_batches: Sequence[MicroBatch], shapes: Sequence[RowShape], surplus: int) -> Iterator[tuple[int, MicroBatch, Rows] | Tensor]:
    """Yields what a stage computes, one micro-batch at a time, and after them ``surplus`` rows of padding."""
    for number, (micro_batch, shape) in enumerate(zip(micro_batches, shapes, strict=True)):
        yield number, micro_batch, as_rows(micro_batch, shape)
    for _ in range(surplus):
        yield micro_batches[0].tokens.new_zeros(shapes[0])


Share = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""What Megatron asks of the logits: the loss, a number of tokens and metrics."""


def run_schedule(
    network: Sequence[Any], forward: Callable[[int, MicroBatch, Rows, Any], tuple[Tensor, Share]], micro_batches: Sequence[MicroBatch], ranks: Ranks,
    on_progress: Progress | None, *, forward_only: bool,
) -> None:  # fmt: skip
    """Runs ``forward(number, micro_batch, rows, stage)`` for every micro-batch and each of this rank's stages ``network``, and unless ``forward_only`` its
    backward pass, by the schedule that Megatron has for the mesh: 1F1B over the stages of a pipeline, interleaved if ranks have several. That one takes
    multiples of the pipeline's ranks, so rows of padding are added, which have no loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    shapes, stages, done = shapes_of(micro_batches, ranks, network[0].config.variable_seq_lengths), len(network), 0
    surplus = -len(micro_batches) % ranks.groups["pipeline"].size if stages > 1 else 0

    def forward_step(data: Iterator[tuple[int, MicroBatch, Rows] | Tensor], stage: Any) -> tuple[Tensor, Share]:
        nonlocal done
        given = next(data)
        if isinstance(given, Tensor):
            return stage(given, torch.arange(given.shape[1], device=given.device).expand_as(given), None), _no_loss
        computed = forward(*given, stage)
        done += 1
        if on_progress is not None and done % stages == 0:
            on_progress(done // stages, len(micro_batches))
        return computed

    data = [numbered(micro_batches, shapes, surplus) for _ in network]
    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=data if stages > 1 else data[0], model=list(network), num_microbatches=len(micro_batches) + surplus,
        seq_length=shapes[0].length, micro_batch_size=shapes[0].rows, forward_only=forward_only,
    )  # fmt: skip


def _no_loss(logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    # A sum, so that it has a backward pass as the others do.
    return logits.sum() * 0, torch.zeros((), dtype=torch.int, device=logits.device), {}
