"""Mixtures of experts (Shazeer et al., 2017): a router sends each token to a few of many MLPs.

Tokens are sorted by expert, so that each expert multiplies all of its tokens at once. A token's bits do not depend on the routing of other
tokens: its gates are a function of its own row, a row of a grouped product has the bits of a separate product, and the outputs of its
experts are added in the order of its gates.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.kernels.api import Kernels, Routing, gate_of, sum_in_order
from tandem.kernels.mixed import whole_precision
from tandem.kernels.softmax import softmax
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.shapes import Activation
from tandem.model.attention import logistic
from tandem.model.parallel.expert_parallel import on_their_ranks
from tandem.model.quantization.mxfp4 import pack_exactly
from tandem.model.quantization.scheme import Scheme, pack_groups
from tandem.model.routing import Route, Selection
from tandem.runtime.collectives.communicator import Communicator


class Experts(nn.Module):
    """The parameters of one layer's mixture of E experts, of which this rank holds ``held``: ``router[E, H]``, ``gate_up_proj[held, 2 F,
    H]`` (an expert's rows of gate, then those of up) and ``down_proj[held, N, I]``, [held, H, F] if the model is not sharded. Packing drops
    the last two and keeps the router. ``shared_gate[1, H]``: of the shared experts, if they have one; ``choice_bias[E]``: of sigmoid routing.
    ``router_bias[E]``, ``gate_up_bias[held, 2 F]`` and ``down_bias[held, N]`` if they have biases. ``activation``: of the gates. ``adds_bias``: this rank adds
    the last (see ``ExpertBiases``). ``stored``: until the decoder is packed, the two packed as a quantized checkpoint has them."""

    gate_up_proj: nn.Parameter | None
    down_proj: nn.Parameter | None

    def __init__(
        self, shapes: ExpertShapes, hidden: int, dtype: torch.dtype, device: torch.device, down: tuple[int, int] | None = None,
        held: int | None = None, activation: Activation = "silu", adds_bias: bool = True,
    ) -> None:
        super().__init__()
        self.shapes, self.hidden, self.held = shapes, hidden, held or shapes.num_experts
        self.activation, self.adds_bias = activation, adds_bias
        self.down = down or (hidden, shapes.intermediate_size)
        self.router = nn.Parameter(torch.empty(shapes.num_experts, hidden, dtype=dtype, device=device))
        self.choice_bias = None if shapes.sigmoid is None else nn.Parameter(torch.empty(shapes.num_experts, dtype=dtype, device=device))
        self.shared_gate = nn.Parameter(torch.empty(1, hidden, dtype=dtype, device=device)) if shapes.shared_gate else None
        empty = lambda *sizes: nn.Parameter(self.router.new_empty(*sizes)) if shapes.biased else None
        self.router_bias = empty(shapes.num_experts)
        self.gate_up_bias, self.down_bias = empty(self.held, 2 * shapes.intermediate_size), empty(self.held, self.down[0])
        self.stored: tuple[Any, Any] | None = None
        self.allocate()

    @property
    def is_plain(self) -> bool:
        return self.gate_up_proj is not None and self.down_proj is not None

    def allocate(self) -> None:
        """Allocates plain, uninitialised matrices."""
        count, inner = self.held, self.shapes.intermediate_size
        self.gate_up_proj = nn.Parameter(self.router.new_empty(count, 2 * inner, self.hidden))
        self.down_proj = nn.Parameter(self.router.new_empty(count, *self.down))

    def pack(self, kernels: Kernels, scheme: Scheme | None = None, in_mxfp4: bool = False) -> "ExpertLayer":
        """Returns the layer with packed matrices, as ``stored`` or rounded under ``scheme``, and drops the plain ones. ``in_mxfp4``: they are kept in codes
        of 4 bits as long as these are exact."""
        assert self.gate_up_proj is not None and self.down_proj is not None
        if self.stored is not None:
            gate_up, down = self.stored
        else:
            pack = lambda weights: (pack_exactly(kernels, weights) if in_mxfp4 else None) or pack_groups(kernels, weights, scheme)
            gate_up, down = pack(self.gate_up_proj), pack(self.down_proj)
        self.drop()
        plain = whole_precision(kernels)
        shared_gate = None if self.shared_gate is None else plain.pack(self.shared_gate)
        router = plain.pack(self.router if self.selection is None else wide(self.router))
        return self.with_matrices(router, gate_up, down, shared_gate)

    def with_matrices(self, router: Any, gate_up: Any, down: Any, shared_gate: Any) -> "ExpertLayer":
        """Returns the layer with plain or packed matrices."""
        biases = None
        if self.router_bias is not None and self.gate_up_bias is not None and self.down_bias is not None:
            biases = ExpertBiases(self.router_bias, self.gate_up_bias, self.down_bias, self.adds_bias)
        each, normalised = self.shapes.num_experts_per_tok, self.shapes.normalised
        return ExpertLayer(router, gate_up, down, each, normalised, shared_gate, self.selection, biases, self.activation)

    @property
    def selection(self) -> Selection | None:
        """How experts are chosen, if not as those of the largest probabilities."""
        if self.shapes.softmax is not None:
            return Selection(self.shapes.softmax, None)
        return None if self.shapes.sigmoid is None or self.choice_bias is None else Selection(self.shapes.sigmoid, self.choice_bias)

    def drop(self) -> None:
        """Drops the plain matrices, for a decoder that has packed ones from elsewhere."""
        self.gate_up_proj = self.down_proj = self.stored = None

    def plain(self) -> "ExpertLayer":
        """Returns the layer over the parameters themselves."""
        return self.with_matrices(self.router, self.gate_up_proj, self.down_proj, self.shared_gate)


def wide(x: Tensor) -> Tensor:
    """Returns ``x`` in at least fp32, in which routers with sigmoid scores multiply, as in transformers."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class ExpertBiases(NamedTuple):
    """The biases of a mixture: of its router [E], and of each expert's matrices [held, 2 F] and [held, N]. ``adds_down``: this rank adds the last; of partial
    products that are summed, one does, which then has its gradient."""

    router: Tensor
    gate_up: Tensor
    down: Tensor
    adds_down: bool = True


class ExpertLayer(NamedTuple):
    """A mixture in the form that the forward pass uses: plain tensors, or packed weights."""

    router: Any
    gate_up: Any
    down: Any
    num_experts_per_tok: int
    normalised: bool
    shared_gate: Any = None
    selection: Selection | None = None
    biases: ExpertBiases | None = None
    activation: Activation = "silu"

    def route(self, kernels: Kernels) -> Route:
        """Returns how the router chooses."""
        return kernels.route if self.selection is None else self.selection.route


def gated(kernels: Kernels, layer: ExpertLayer, x: Tensor, shared: Tensor) -> Tensor:
    """Returns what the shared experts computed for ``x[T, H]``, times the sigmoid of their gate, if they have one."""
    if layer.shared_gate is None:
        return shared
    plain = whole_precision(kernels)
    multiply: Any = plain.linear if isinstance(layer.shared_gate, Tensor) else plain.linear_packed
    logits: Tensor = multiply(x, layer.shared_gate, None)
    return (shared * logistic(logits)).to(shared.dtype)


def mixture(
    kernels: Kernels, layer: ExpertLayer, x: Tensor, router_logits: list[Tensor] | None = None,
    before_down: Callable[[Tensor], Tensor] | None = None, ranks: Communicator | None = None,
    route: Route | None = None,
) -> Tensor:
    """Computes ``x[T, H]`` -> [T, H] through each token's experts. ``router_logits``: a list that receives the [T, E] of this layer;
    ``before_down``: applied to the input of ``down``. ``ranks``: those that the experts are sharded over. ``route``: replaces the kernels'
    own."""
    is_packed = not isinstance(layer.gate_up, Tensor)
    grouped: Any = kernels.grouped_linear_packed if is_packed else kernels.grouped_linear
    # Small differences decide which experts a token is routed to, so the router never runs in mixed precision.
    plain = whole_precision(kernels)
    router: Any = plain.linear_packed if is_packed else plain.linear
    read, weight = x, layer.router
    if layer.selection is not None:
        # Converted here, because only while the layer runs is the weight sure to be there; a packed one has been.
        read, weight = wide(x), weight if is_packed else wide(weight)
    biases, gate = layer.biases, gate_of(kernels, layer.activation)
    logits = router(read, weight, None if biases is None else biases.router)
    if router_logits is not None:
        router_logits.append(logits)
    routing = (route or layer.route(kernels))(logits, layer.num_experts_per_tok, layer.normalised)

    def compute(rows: Tensor, bounds: Tensor) -> Tensor:
        both: Tensor = grouped(rows, layer.gate_up, bounds)
        inner = gate(both if biases is None else with_biases(both, biases.gate_up, bounds))
        out: Tensor = grouped(inner if before_down is None else before_down(inner), layer.down, bounds)
        if biases is None:
            return out
        return with_biases(out, biases.down if biases.adds_down else biases.down * 0.0, bounds)

    rows = dispatched(x, routing, layer.num_experts_per_tok)
    is_divided = ranks is not None and ranks.size > 1
    rows = on_their_ranks(rows, routing.bounds, ranks, compute) if ranks is not None and is_divided else compute(rows, routing.bounds)
    returned = rows.index_select(0, routing.inverse).view(len(x), layer.num_experts_per_tok, rows.shape[1])
    weighted = returned.to(routing.gates.dtype) * routing.gates.unsqueeze(-1)
    return sum_in_order(weighted.unbind(1)).to(x.dtype)


def with_biases(rows: Tensor, biases: Tensor, bounds: Tensor) -> Tensor:
    """Returns ``rows[R, N]``, those from ``bounds[g]`` to ``bounds[g + 1]`` plus ``biases[G, N][g]``."""
    if torch.is_grad_enabled() and (rows.requires_grad or biases.requires_grad):
        return _Biases.apply(rows, biases, bounds)  # type: ignore[no-any-return]
    return _plus_biases(rows, biases, bounds)


def _plus_biases(rows: Tensor, biases: Tensor, bounds: Tensor) -> Tensor:
    groups = torch.arange(len(biases), device=rows.device).repeat_interleave(bounds.diff(), output_size=len(rows))
    return rows + biases.to(rows.dtype).index_select(0, groups)


class _Biases(torch.autograd.Function):
    """The gradient of a group's bias is the sum of that of its rows, in order: no atomic addition."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, biases: Tensor, bounds: Tensor) -> Tensor:
        ctx.save_for_backward(bounds)
        ctx.dtype = biases.dtype
        return _plus_biases(rows, biases, bounds)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (bounds,) = ctx.saved_tensors
        summed = torch.segment_reduce(wide(grad).contiguous(), "sum", lengths=bounds.diff(), axis=0, initial=0.0)
        return grad, summed.to(ctx.dtype), None


def load_balancing_loss(router_logits: Sequence[Tensor], num_experts_per_tok: int) -> Tensor:
    """Returns the loss of equations 4 to 6 of Switch Transformers (Fedus et al., 2021) over the layers' ``router_logits[T, E]``, extended
    to several experts per token: E times the sum over experts of the share of tokens of an expert times its mean probability. Equals
    ``num_experts_per_tok`` for an even load; only the probabilities carry gradient."""
    probabilities = torch.cat([softmax(wide(logits)) for logits in router_logits])
    num_experts = probabilities.shape[1]
    experts = probabilities.detach().sort(dim=-1, descending=True, stable=True).indices[:, :num_experts_per_tok]
    share = torch.bincount(experts.reshape(-1), minlength=num_experts) / len(probabilities)
    return num_experts * (share * probabilities.mean(0)).sum()


def dispatched(x: Tensor, routing: Routing, each: int) -> Tensor:
    """Returns each token's row once for each of its experts, sorted by expert."""
    if x.requires_grad and torch.is_grad_enabled():
        return _Dispatch.apply(x, routing.order, routing.inverse, each)  # type: ignore[no-any-return]
    return x.index_select(0, routing.order // each)


class _Dispatch(torch.autograd.Function):
    """Repeats rows by expert; the gradient is summed in the order of the gates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, each: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.each = each
        return x.index_select(0, order // each)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        places = grad.index_select(0, inverse).view(-1, ctx.each, grad.shape[1])
        return sum_in_order(places.unbind(1)), None, None, None
