"""A draft head in training beside its target: what the trainer computes in the place of a ``Decoder``.

The training-time test of EAGLE-3 (Li et al., 2025, section 3.2). At position 0 of a draft the head reads the target's states of token t and token t + 1, and
learns the target's distribution after it. At position k it reads its own hidden states of the position before and the token t + 1 + k, as when it drafts; it
attends to the keys of position 0 up to token t and to its own of positions 1 to k.
"""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tandem.kernels.api import Kernels
from tandem.kernels.mixed import whole_precision
from tandem.kernels.softmax import softmax
from tandem.layout.eagle3 import Eagle3Shapes
from tandem.layout.pipeline_stages import whole
from tandem.layout.sharding import WHOLE
from tandem.model.attention import AttentionLayer, PackedContext, Rotation, attend_packed
from tandem.model.decoder import Decoder
from tandem.model.draft_target import DraftTarget, LastStates, TargetOutputs
from tandem.model.eagle3 import Eagle3Head
from tandem.model.eagle3_folder import eagle3_tensors
from tandem.model.head_outputs import DraftStep, HeadOutputs
from tandem.model.layer_weights import LayerWeights
from tandem.model.routing import ReplayCount


class DraftDecoder(Decoder):
    """A head of ``shapes`` trained for ``steps`` positions of a draft by ``target``, which is no part of its parameters and gets no gradient of it.

    ``target`` may be one rank's part of a model. Then the ranks compute it together, and one of them has the ``head``: on the others (``None``) there is no
    parameter (``trainer.parallel.draft_pipeline``)."""

    def __init__(self, shapes: Eagle3Shapes, head: Eagle3Head | None, target: Decoder, steps: int) -> None:
        nn.Module.__init__(self)
        self.head_shapes, self.head, self.steps = shapes, head, steps
        # In a tuple, so that it is no submodule.
        self._target = (target,)
        if head is not None and shapes.own_embedding:
            head.embed_tokens.requires_grad_(False)
        self.shapes = self.local = shapes.trained
        self.kernels, self.dtype = target.kernels, target.dtype
        self.positions = target.positions if head is None else min(head.positions, target.positions)
        self.group = self.parallel = self.router_balance = None
        self.shard_spec, self.spans = WHOLE, (whole(1),)
        self.lm_head = self.score = None
        self.around_layer, self.replay_count = None, ReplayCount()
        self.is_frozen = self._has_adapter = False
        self._packed = None

    @property
    def target(self) -> Decoder:
        return self._target[0]

    @property
    def device(self) -> torch.device:
        return self.target.device

    def frozen_tensors(self) -> list[Tensor]:
        """Returns the weights of the target."""
        return list(self.target.parameters())

    def huggingface_parameters(self) -> dict[str, Tensor]:
        """Returns a view of every trained parameter by its name in the head's folder."""
        names = dict(self.shapes.own_parameters)
        return {} if self.head is None else {name: tensor for name, tensor in eagle3_tensors(self.head).items() if name in names}

    def outputs(self, tokens: Tensor, positions: Tensor, context: PackedContext, rows: Tensor, targets: Tensor, temperature: float) -> HeadOutputs:
        """Returns ``of_target`` of a whole target."""
        assert self.head is not None
        target = DraftTarget(self.target, (whole(self.target.shapes.num_hidden_layers),), self.head_shapes)
        last = target.run(0, tokens, positions, context, None)
        assert isinstance(last, LastStates)
        read = target.outputs(last, len(tokens), rows, self.head.target_ids)
        assert read is not None
        return self.of_target(read, tokens, positions, context, rows)

    def of_target(self, read: TargetOutputs, tokens: Tensor, positions: Tensor, context: PackedContext, rows: Tensor) -> HeadOutputs:
        """Returns what the head gives at each position of a draft for the tokens whose distribution the target computes in the rows ``rows[R]``, which the
        loss counts."""
        head = self.head
        assert head is not None
        distribution, best, known = read.labels
        embedded = head.embedded(tokens) if read.embedded is None else read.embedded.to(head.dtype)
        places = torch.full((len(tokens),), -1, device=tokens.device).index_copy(0, rows, torch.arange(len(rows), device=tokens.device))
        lengths = [after - before for before, after in itertools.pairwise(context.cu_seqlens.tolist())]
        ends = torch.cat([torch.full((length,), end, device=tokens.device) for length, end in zip(lengths, context.cu_seqlens[1:].tolist(), strict=True)])
        state, attention = head.combined(read.states), _TestTimeAttention(head, context)
        own, made = torch.arange(len(tokens), device=tokens.device), list[DraftStep]()
        last = len(head.rotary_tables[0]) - 1
        for step in range(self.steps):
            label = own + step + 1
            following, is_there = label.minimum(ends - 1), label < ends
            x, state = head.run(embedded[following], (positions + step).clamp_max(last), state, attention)
            chosen = (is_there & (places[following] >= 0)).nonzero().squeeze(1)
            place = places[following[chosen]]
            values, agrees = checkpoint(self._compared, x.index_select(0, chosen), distribution, best, place, use_reentrant=False)
            made.append(DraftStep(values, agrees, torch.ones_like(values), known[place]))
        return HeadOutputs(of_draft=tuple(made))

    def _compared(self, x: Tensor, distribution: Tensor, best: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cross-entropies and agreements [N] of the head's logits of ``x[N, H]`` with the rows ``place[N]`` of ``DraftLabels``."""
        assert self.head is not None
        logits = self.head.logits(x).float()
        agrees = (self.head.target_ids[logits.detach().argmax(1)] == best[place]).float()
        return -(distribution[place] * logits.log_softmax(1)).sum(1), agrees


class _TestTimeAttention:
    """The attention of a head whose positions of a draft are run one after the other; see the module. Shared by the calls of one batch."""

    def __init__(self, head: Eagle3Head, context: PackedContext) -> None:
        self._kernels, self._context = head.kernels, context
        self._bounds = context.cu_seqlens.tolist()
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []

    def __call__(self, weights: LayerWeights, qkv: Tensor, rotated: tuple[Rotation, ...]) -> Tensor:
        layer = weights.attention
        positions, cos_sin, _ = rotated[layer.rotation]
        q, k, v = self._kernels.rope(qkv, positions, cos_sin, layer.heads, None, None, layer.eps)
        self._keys.append(k)
        self._values.append(v)
        if len(self._keys) == 1:
            return attend_packed(self._kernels, layer, q, k, v, self._context).flatten(1)
        parts = [self._of_sequence(layer, q, first, last) for first, last in itertools.pairwise(self._bounds)]
        return torch.cat(parts).to(q.dtype)

    def _of_sequence(self, layer: AttentionLayer, q: Tensor, first: int, last: int) -> Tensor:
        """Returns the attention's output [n, Hq D] of the rows ``first:last`` of one sequence."""
        query_heads, kv_heads, size = layer.heads
        count, groups, products = last - first, query_heads // kv_heads, whole_precision(self._kernels)
        later = torch.ones(count, count, dtype=torch.bool, device=q.device).triu(1)
        made = []
        for head in range(kv_heads):
            own = q[first:last, head * groups : (head + 1) * groups]
            keys, values = ([each[first:last, head] for each in every] for every in (self._keys, self._values))
            scores = _product(products, own.reshape(-1, size), keys[0]).view(count, groups, count).masked_fill(later.unsqueeze(1), float("-inf"))
            drafted = [(own * key.unsqueeze(1)).sum(2, keepdim=True) for key in keys[1:]]
            shares = softmax(torch.cat((scores, *drafted), dim=2) * layer.scale)
            mixed = _product(products, shares[..., :count].reshape(-1, count), values[0].t()).view(count, groups, size)
            for place, value in enumerate(values[1:], count):
                mixed = mixed + shares[..., place : place + 1] * value.unsqueeze(1)
            made.append(mixed)
        return torch.cat(made, dim=1).flatten(1)


def _product(kernels: Kernels, x: Tensor, weight: Tensor) -> Any:
    return kernels.linear(x.contiguous(), weight.contiguous(), None)
