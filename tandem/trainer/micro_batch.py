"""Builds the flat, unpadded tensors of one forward and backward pass from sequences.

Tokens that cannot change the loss are not computed: sequences without a counted token are left out, tokens after the last one that predicts
a counted token are dropped, and only counted rows go through the head."""

import itertools
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from tandem.kernels.reference_dtype import compute_dtype
from tandem.kernels.trained_layers import Beginnings
from tandem.model.attention import PackedContext
from tandem.model.shared_prompts import SharedPrompts
from tandem.trainer.beginnings import beginnings_of
from tandem.trainer.prefix_tree import PrefixTree
from tandem.types import RoutedExperts, TrainSequence

Number = TypeVar("Number", int, float)
Bin = tuple[int, ...]
"""The sequences of one micro-batch, by index."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """T tokens of S sequences, R of which predict a counted token.

    ``tokens[T]``, ``positions[T]`` int64; ``cu_seqlens[S + 1]`` int32 and ``max_seqlen`` mark the sequences.
    ``rows[R]`` int64: which of the T hidden states predict, ascending; ``targets[R]`` int64: what they predict. ``prompts``: where sequences share what
    they begin with, ``cu_seqlens`` marks what they attend to, and a shared token predicts several targets.
    ``mask``, ``advantages``, ``rollout_logprobs`` (raw), ``sampling_logprobs``, ``reference_logprobs`` (``None``: no KL), ``old_logprobs``
    (``None``: the rollout's), ``values`` and ``returns`` have R entries in the dtype of log-probabilities, fp32 for a model in 16 bits.
    ``sequence_of_row[R]`` int64; ``sequence_mask_sums[S]``: the sum of each sequence's whole loss mask; ``margins[S]``: of
    preference pairs. ``ids``: of the S sequences. ``off_policy[R]`` bool: which targets older weights drew (``None``: none). ``routed_experts[T, layers, k]``
    int16: the experts that the tokens are sent to (``None``: the routers choose). ``beginnings``: what the sequences begin with in common, where that was
    looked for and is much."""

    ids: tuple[str, ...]
    tokens: Tensor
    positions: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    targets: Tensor
    mask: Tensor
    advantages: Tensor
    rollout_logprobs: Tensor
    sampling_logprobs: Tensor
    reference_logprobs: Tensor | None
    old_logprobs: Tensor | None
    values: Tensor
    returns: Tensor
    sequence_of_row: Tensor
    sequence_mask_sums: Tensor
    margins: Tensor
    off_policy: Tensor | None = None
    prompts: SharedPrompts | None = None
    routed_experts: Tensor | None = None
    beginnings: Beginnings | None = None

    @property
    def sequence_count(self) -> int:
        return len(self.ids)

    @property
    def context(self) -> PackedContext:
        """How the tokens attend to each other."""
        return PackedContext(self.cu_seqlens, self.max_seqlen, self.prompts, self.routed_experts, beginnings=self.beginnings)

    @property
    def own_rows(self) -> Tensor:
        """Returns [S + 1] int32: sequence s has the tokens ``own_rows[s]:own_rows[s + 1]``."""
        return self.cu_seqlens if self.prompts is None else self.prompts.query_start


def forward_tokens(sequence: TrainSequence) -> int:
    """Returns how many tokens of ``sequence`` must go through the network: all before its last counted token; 0 if none is counted."""
    mask = sequence.loss_mask
    if mask and mask[-1] != 0:
        return len(mask) - 1
    return next((index for index in range(len(mask) - 1, 0, -1) if mask[index] != 0), 0)


def counted_indices(sequence: TrainSequence) -> Sequence[int]:
    """Returns the indices of the counted tokens of ``sequence``, ascending."""
    length, mask, prompt = forward_tokens(sequence), sequence.loss_mask, sequence.prompt_length
    # If all tokens count, as in pretraining, or all of a completion, a range makes slicing cheap; a GPU would wait for a loop over tokens.
    every = range(1 if prompt == 0 or any(mask[:prompt]) else prompt, length + 1)
    return every if 0 not in mask[every.start : every.stop] else [i for i in every if mask[i] != 0]


def collate(
    sequences: Sequence[TrainSequence],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    old_logprobs: Mapping[str, Sequence[float]] | None = None,
    share_prompts: bool = False,
    finds_beginnings: bool = False,
) -> MicroBatch:
    """Returns one micro-batch of ``sequences``, each of which has a counted token, for a model of ``dtype``.

    ``old_logprobs``: one entry per token by sequence id, if the trainer computed them itself. ``share_prompts``: what sequences begin with in common,
    the prompt of a group at least, is in the batch once, with the first of them. ``finds_beginnings``: the batch says what that is,
    where it has every token. Raises ``ValueError`` for a sequence whose fields are inconsistent."""
    tokens: list[int] = []
    positions: list[int] = []
    bounds, rows, row_tokens, sequence_of_row, off_policy = [0], list[int](), list[int](), list[int](), list[int]()
    columns: dict[str, list[float]] = {
        name: [] for name in ("mask", "advantages", "rollout", "sampling", "reference", "old", "values", "returns")
    }
    with_reference = all(s.reference_logprobs is not None for s in sequences)
    routings: list[Tensor] = []
    tree = PrefixTree() if share_prompts else None
    query_start, attended = [0], list[int]()
    if any(s.routed_experts is not None for s in sequences) and any(s.routed_experts is None for s in sequences):
        raise ValueError("some sequences of a micro-batch have a recorded routing and others have none")
    for number, sequence in enumerate(sequences):
        length = forward_tokens(sequence)
        _check(sequence, length)
        counted = counted_indices(sequence)
        # The first ``own`` tokens are rows of earlier sequences; the row of position p is ``start + p`` for the others.
        before = [] if tree is None else tree.add(sequence.token_ids[:length])
        own = len(before)
        start = len(tokens) - own
        tokens += sequence.token_ids[own:length]
        positions += range(own, length)
        bounds.append(bounds[-1] + length)
        query_start.append(len(tokens))
        path = range(start, start + length) if not before else [*before, *range(start + own, start + length)]
        if tree is not None:
            attended += path
        rows += path[counted.start - 1 : counted.stop - 1] if isinstance(counted, range) else [path[i - 1] for i in counted]
        _take(row_tokens, sequence.token_ids, counted)
        sequence_of_row += [number] * len(counted)
        _take(columns["mask"], sequence.loss_mask, counted)
        _take(columns["advantages"], sequence.advantages, counted)
        _take(columns["rollout"], sequence.rollout_logprobs, counted)
        _take(columns["sampling"], sequence.sampling_logprobs, counted)
        _take(columns["values"], sequence.values, counted)
        _take(columns["returns"], sequence.returns, counted)
        _take(off_policy, sequence.off_policy, counted)
        if sequence.routed_experts is not None:
            routings.append(_routing(sequence.routed_experts)[own:length])
        if with_reference:
            _take(columns["reference"], sequence.reference_logprobs or (), counted)
        if old_logprobs is not None:
            _take(columns["old"], old_logprobs[sequence.id], counted)

    def whole(values: list[int]) -> Tensor:
        return on_device(_tensor(array("q", values), torch.int64), device)

    def real(values: Sequence[float]) -> Tensor:
        return on_device(_tensor(array("d", values), compute_dtype(dtype)), device)

    return MicroBatch(
        ids=tuple(s.id for s in sequences),
        tokens=whole(tokens),
        positions=whole(positions),
        cu_seqlens=on_device(torch.tensor(bounds, dtype=torch.int32), device),
        max_seqlen=max(after - before for before, after in itertools.pairwise(bounds)),
        rows=whole(rows),
        targets=whole(row_tokens),
        mask=real(columns["mask"]),
        advantages=real(columns["advantages"]),
        rollout_logprobs=real(columns["rollout"]),
        sampling_logprobs=real(columns["sampling"]),
        reference_logprobs=real(columns["reference"]) if with_reference else None,
        old_logprobs=real(columns["old"]) if old_logprobs is not None else None,
        values=real(columns["values"]),
        returns=real(columns["returns"]),
        sequence_of_row=whole(sequence_of_row),
        sequence_mask_sums=real([sum(s.loss_mask) for s in sequences]),
        margins=real([s.margin for s in sequences]),
        off_policy=whole(off_policy).bool() if any(s.off_policy for s in sequences) else None,
        prompts=_prompts(attended, query_start, device) if len(attended) > len(tokens) else None,
        routed_experts=on_device(torch.cat(routings), device) if routings else None,
        beginnings=beginnings_of([s.token_ids[: forward_tokens(s)] for s in sequences]) if finds_beginnings and not share_prompts else None,
    )


def _routing(routed: RoutedExperts) -> Tensor:
    """Returns the ids of experts [tokens, layers, k] int16."""
    given = {1: torch.uint8, 2: torch.int16}[routed.item_bytes]
    return torch.frombuffer(bytearray(routed.data), dtype=given).to(torch.int16).view(-1, routed.layers, routed.experts_per_token)


def _prompts(attended: list[int], query_start: list[int], device: torch.device | str) -> SharedPrompts:
    """Returns the ``SharedPrompts`` of the rows ``attended``, on ``device``."""
    return SharedPrompts(on_device(_tensor(array("q", attended), torch.int64), device), on_device(torch.tensor(query_start, dtype=torch.int32), device))


def _tensor(values: "array[int] | array[float]", dtype: torch.dtype) -> Tensor:
    """Does ``torch.tensor(values, dtype=dtype)``, three times as fast because the elements are not inspected one by one."""
    given = {"q": torch.int64, "d": torch.float64}[values.typecode]
    return torch.frombuffer(values, dtype=given).to(dtype, copy=True) if values else torch.empty(0, dtype=dtype, device="cpu")


def on_device(x: Tensor, device: torch.device | str) -> Tensor:
    """Copies the host tensor ``x`` to ``device``; to a GPU through pinned memory, without blocking."""
    return x.pin_memory().to(device, non_blocking=True) if torch.device(device).type == "cuda" else x


def blank(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> MicroBatch:
    """Returns a micro-batch of one token that predicts nothing, for a rank without data in a pass that all ranks must take part in."""
    none, real = torch.empty(0, dtype=torch.int64, device=device), torch.empty(0, dtype=compute_dtype(dtype), device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    bounds = torch.tensor([0, 1], dtype=torch.int32, device=device)
    sums = torch.ones(1, dtype=real.dtype, device=device)
    return MicroBatch(("blank",), zero, zero, bounds, 1, none, none, real, real, real, real, real, real, real, real, none, sums, torch.zeros_like(sums))


def make_micro_batches(
    sequences: Sequence[TrainSequence], bins: Sequence[Bin], passes: int, dtype: torch.dtype, device: torch.device | str,
    old_logprobs: Mapping[str, Sequence[float]] | None = None, share_prompts: bool = False, finds_beginnings: bool = False,
) -> list[MicroBatch]:
    """Returns a micro-batch for each of ``bins`` (indices of ``sequences``), and blank ones up to ``passes`` in all."""
    made = [collate([sequences[i] for i in chosen], dtype, device, old_logprobs, share_prompts, finds_beginnings) for chosen in bins]
    return made + [blank(dtype, device)] * (passes - len(made))


def _take(column: list[Number], values: Sequence[Number], indices: Sequence[int]) -> None:
    """Appends ``values`` at ``indices`` to ``column``, or zeros if there are no values."""
    if not values:
        column.extend([0] * len(indices))
    elif isinstance(indices, range):
        column += values[indices.start : indices.stop]
    else:
        column += [values[i] for i in indices]


def _check(sequence: TrainSequence, counted: int) -> None:
    length = len(sequence.token_ids)
    for name in ("loss_mask", "advantages", "rollout_logprobs", "sampling_logprobs", "reference_logprobs", "values", "returns", "off_policy"):
        values = getattr(sequence, name)
        if values is not None and len(values) != length and (len(values) > 0 or name == "loss_mask"):
            raise ValueError(f"sequence '{sequence.id}': {name} has {len(values)} entries for {length} tokens")
    routed = sequence.routed_experts
    if routed is not None and routed.tokens != length - 1:
        raise ValueError(f"sequence '{sequence.id}': routed_experts has {routed.tokens} entries for the {length - 1} tokens before its last")
    if sequence.loss_mask[0] != 0:
        raise ValueError(f"sequence '{sequence.id}': loss_mask counts token 0, which is never predicted")
    if counted == 0:
        raise ValueError(f"sequence '{sequence.id}' has no counted token; leave it out of the micro-batch")
