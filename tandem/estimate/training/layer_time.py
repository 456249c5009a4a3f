"""Seconds of one layer, and of the head, on one GPU, by what they are spent on. Imports no torch."""

import math
from dataclasses import dataclass, fields
from typing import NamedTuple

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.training.attention import Attention, attention_seconds, kernel_rates
from tandem.estimate.training.collectives import all_to_all_seconds, gather_seconds
from tandem.estimate.training.data_parallel import hidden_seconds
from tandem.estimate.training.efficiency import Efficiency
from tandem.estimate.training.host import expert_kernels, expert_waits, gap_seconds, kernels_of_layer
from tandem.estimate.training.layout import TrainingLayout
from tandem.estimate.training.linear_attention import BACKWARD, WIDE_BYTES, chunked_flops, moved_bytes
from tandem.estimate.training.memory_bound import (
    ALIGNED,
    EAGER_NORM,
    FUSED_LOGITS,
    FUSED_NORM,
    GATED,
    HALF_LOGITS,
    LOGITS,
    QUANTISED,
    ROUTED,
    Moved,
    layer_bytes,
)
from tandem.estimate.training.products import RESULT_BYTES, product_seconds
from tandem.layout.expert_shapes import ExpertShapes
from tandem.layout.linear_attention import LinearAttention
from tandem.layout.shapes import ModelShapes

ACTIVATION_BYTES = 2
"""Of an element that ranks exchange, in 16 bits."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Seconds by what they are spent on; of communication, those that nothing hides. ``host``: that the GPU waits for kernels of its experts."""

    products: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    tensor: float = 0.0
    expert: float = 0.0
    context: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        return float(sum(getattr(self, each.name) for each in fields(self)))

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __mul__(self, times: float) -> "Seconds":
        return Seconds(*(getattr(self, each.name) * times for each in fields(self)))


@dataclass(frozen=True, slots=True)
class Passes:
    """A micro-batch through layers; ``recomputed``: what the backward pass computes a second time; ``kernels``: that the host starts."""

    forward: Seconds
    backward: Seconds
    recomputed: Seconds = Seconds()
    kernels: float = 0.0

    @property
    def seconds(self) -> float:
        return self.forward.total + self.backward.total + self.recomputed.total

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(self.forward + other.forward, self.backward + other.backward, self.recomputed + other.recomputed, self.kernels + other.kernels)

    def __mul__(self, times: float) -> "Passes":
        return Passes(self.forward * times, self.backward * times, self.recomputed * times, self.kernels * times)


NO_PASSES = Passes(Seconds(), Seconds())


class Shape(NamedTuple):
    """``batch`` products of ``rows`` tokens with a matrix of ``columns`` x ``inner``. ``is_chance``: ``rows`` is a mean of tokens by chance."""

    rows: int
    columns: int
    inner: int
    batch: int = 1
    is_chance: bool = False


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """Predicts layers of ``shapes`` in ``layout`` on ``hardware``."""

    shapes: ModelShapes
    layout: TrainingLayout
    hardware: Hardware
    given: Efficiency

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a context-parallel rank."""
        return max(1, self.layout.micro_batch * self.layout.sequence // self.layout.parallel.context)

    def layer(self, window: int | None, experts: ExpertShapes | None, linear: LinearAttention | None = None) -> Passes:
        """Returns the passes of a layer with ``window`` (``None``: full attention) or ``linear`` attention, and ``experts`` (``None``: a plain MLP)."""
        tensor = self.layout.parallel.tensor
        hidden = self.shapes.hidden_size
        *into, output = self.shapes.attention_matrices if linear is None else linear.matrices(hidden)
        shapes = [Shape(self.tokens, _part(each.outputs, tensor) if each.by_head else each.outputs, each.inputs) for each in into]
        shapes.append(Shape(self.tokens, hidden, _part(output.inputs, tensor)))
        rows, of_experts = self.tokens, list[Shape]()
        if experts is None:
            inner = _part(self.shapes.intermediate_size, tensor)
            shapes += [Shape(rows, (self.shapes.mlp_matrices - 1) * inner, hidden), Shape(rows, hidden, inner)]
        else:
            inner, rows = _part(experts.intermediate_size, self.layout.expert_tensor), self._expert_rows(experts)
            local = max(1, experts.num_experts // self.layout.expert_ranks)
            each, is_chance = max(1, rows // local), self.layout.experts_as != "padded"
            of_experts = [Shape(each, 2 * inner, hidden, local, is_chance), Shape(each, hidden, inner, local, is_chance)]
            shapes += [Shape(self.tokens, experts.num_experts, hidden), *of_experts]
            if experts.shared_intermediate_size:
                shared = _part(experts.shared_intermediate_size, tensor)
                shapes += [Shape(self.tokens, 2 * shared, hidden), Shape(self.tokens, hidden, shared)]
        forward, backward = self._products(shapes, self.layout.precision)
        attention = self._attention(window) if linear is None else self._recurrence(linear)
        moved = self._memory_bound(rows, inner, shapes, of_experts, experts, linear)
        tensor_forward, tensor_backward = self._tensor_seconds(forward, experts)
        exchange = (0.0, 0.0)
        if experts is not None:
            sent = self._expert_seconds(experts)
            # Behind the pass of another micro-batch in the other direction.
            hidden_by = [a + b + c for a, b, c in zip((forward, backward), attention, moved, strict=True)] if self.layout.overlaps_experts else [0.0, 0.0]
            exchange = hidden_seconds(sent, hidden_by[1], self.given), hidden_seconds(sent, hidden_by[0], self.given)
        host = (0.0, 0.0) if experts is None else expert_waits(self.layout, of_experts[0].batch, self._products(of_experts, self.layout.precision))
        if linear is None:
            context_s = self._context_seconds()
            context = max(0.0, context_s - attention.forward), max(0.0, 2 * context_s - attention.backward)
        else:
            context = (self._heads_for_tokens_seconds(linear),) * 2
        forward_s = Seconds(forward, attention.forward, moved.forward, tensor_forward, exchange[0], context[0], host[0])
        backward_s = Seconds(backward, attention.backward, moved.backward, tensor_backward, exchange[1], context[1], host[1])
        kernels = (4 if self.layout.recompute == "full" else 3) * kernels_of_layer(self.layout, len(shapes) - len(of_experts), has_experts=bool(of_experts))
        if of_experts:
            kernels += sum(expert_kernels(self.layout, of_experts[0].batch))
        return Passes(forward_s, backward_s, self._recomputed(forward_s), kernels)

    def head(self) -> Passes:
        """Returns the passes of the language-model head and the loss."""
        columns = _part(self.shapes.head_rows, self.layout.parallel.tensor)
        # Recipes in fp8 keep the head in bf16.
        precision = "bf16" if self.layout.precision == "fp8" else self.layout.precision
        forward, backward = self._products([Shape(self.tokens, columns, self.shapes.hidden_size)], precision)
        bytes_each = FUSED_LOGITS if self.layout.fused_loss else LOGITS if self.layout.loss_precision == "fp32" else HALF_LOGITS
        gathered = 0.0
        if self.layout.whole_vocabulary and self.layout.parallel.tensor > 1:
            columns, moved = self.shapes.head_rows, float(ACTIVATION_BYTES * self.tokens * self.shapes.head_rows)
            gathered = gather_seconds(self.hardware, self.layout.parallel.tensor, 1, moved, self.given)
            bytes_each += 2 * ACTIVATION_BYTES
        moved = bytes_each * self.tokens * columns / (self.hardware.memory_bandwidth * self.given.memory)
        return Passes(Seconds(forward, memory_bound=moved / 2, tensor=gathered), Seconds(backward, memory_bound=moved / 2))

    def _expert_rows(self, experts: ExpertShapes) -> int:
        """Returns the tokens of the experts of the expert-parallel rank with the most: of n ranks that get their tokens by chance, about sqrt(2 ln n) standard
        deviations more than on average."""
        mean = self.tokens * experts.num_experts_per_tok * self.layout.expert_tensor // self.layout.parallel.tensor
        if self.layout.experts_as == "padded":
            return mean
        return round((mean + math.sqrt(2 * math.log(self.layout.expert_ranks) * mean)) * self.layout.expert_imbalance)

    @property
    def _token_ranks(self) -> int:
        """Ranks that divide the tokens of the residual stream."""
        return self.layout.parallel.tensor if self.layout.shares_tokens else 1

    def _products(self, shapes: list[Shape], precision: str) -> tuple[float, float]:
        """Returns the seconds of ``shapes`` forward, and of both products of each backward: the gradient of its input and of its weights."""

        def seconds(rows: int, columns: int, inner: int, count: int, result_bytes: float = RESULT_BYTES, *, is_chance: bool = False) -> float:
            return product_seconds(self.hardware, precision, rows, columns, inner, self.given, count, result_bytes, is_chance=is_chance)

        # The gradient of a weight is added to the sum of the step, which is read and written.
        added = 2.0 * self.layout.gradient_bytes
        forward = sum(seconds(e.rows, e.columns, e.inner, e.batch, is_chance=e.is_chance) for e in shapes)
        backward = sum(seconds(e.rows, e.inner, e.columns, e.batch, is_chance=e.is_chance) for e in shapes)
        backward += sum(seconds(e.columns, e.inner, e.rows, e.batch, added) for e in shapes)
        return forward, backward

    def _attention(self, window: int | None) -> Attention:
        layout, tensor = self.layout, self.layout.parallel.tensor
        heads = _part(self.shapes.num_attention_heads, tensor)
        queries = max(1, layout.sequence // layout.parallel.context)
        # Of its two products one sums over a head of keys, one returns a head of values.
        head_dim = (self.shapes.query_size + self.shapes.attended_size) // (2 * self.shapes.num_attention_heads)
        if layout.trainer is not None and self.shapes.latent is not None:
            head_dim = self.shapes.latent.absorbed_size // 2
        return attention_seconds(
            self.hardware, layout.precision, layout.micro_batch, queries, layout.sequence, window, heads, head_dim, layout.attention_kernel,
            self.given,
        )  # fmt: skip

    def _recurrence(self, linear: LinearAttention) -> Attention:
        """Returns the seconds of the gated delta rule in chunks, at the rate of attention in an older generation of kernels: its products are as small."""
        forward, backward = kernel_rates(self.hardware, "flash2", "bf16" if self.layout.precision == "fp8" else self.layout.precision)
        flops, start = self.tokens * chunked_flops(linear) / (self.layout.parallel.tensor * self.given.products), self.given.kernel_s
        return Attention(flops / forward + start, BACKWARD * flops / backward + start)

    def _memory_bound(
        self, rows: int, inner: int, products: list[Shape], of_experts: list[Shape], experts: ExpertShapes | None, linear: LinearAttention | None
    ) -> Moved:
        """Returns the seconds of elementwise kernels, forward and backward."""
        hidden, tensor = self.shapes.hidden_size, self.layout.parallel.tensor
        latent = self.shapes.latent
        rotated = self.shapes.query_size + self.shapes.key_value_size
        if latent is not None:
            # Rotation of a part of the queries and of one key, and the assembly of the keys of all heads from both their parts.
            rotated = self.shapes.num_attention_heads * latent.qk_rope_head_dim + self.shapes.key_value_size
        rotary = rotated / tensor if linear is None else 0.0
        gated = self.shapes.gated_mlp or experts is not None
        norms = float(len(self.shapes.layer_norms)) + (0.0 if latent is None else (latent.q_lora_rank + latent.kv_lora_rank) / hidden)
        moved = layer_bytes(self.tokens, self.tokens / self._token_ranks, hidden, rotary, 0, gated, self.layout.fused_elementwise, norms)
        own = (0.0, 0.0)
        if linear is not None:
            own = moved_bytes(linear)
        elif self.shapes.attention_gate:
            own = (GATED[0] * float(self.shapes.attended_size), GATED[1] * float(self.shapes.attended_size))
        moved = Moved(*(m + self.tokens * each / tensor for m, each in zip(moved, own, strict=True)))
        if self.shapes.qk_norm and linear is None:
            # A norm of every head of queries and keys.
            of_heads = (self.shapes.query_size + self.shapes.key_value_size) / tensor
            moved = Moved(*(m + n * self.tokens * of_heads for m, n in zip(moved, FUSED_NORM if self.layout.fused_elementwise else EAGER_NORM, strict=True)))
        activated = rows * inner + (0 if experts is None else self.tokens * experts.shared_intermediate_size / tensor)
        of_mlp = layer_bytes(1, 0, hidden, 0, activated, gated, self.layout.fused_elementwise)
        routed, cast, in_fp8 = 0.0, 0.0, self.layout.precision == "fp8"
        if experts is not None:
            bytes_each = ROUTED[self.layout.expert_dispatch] + (ALIGNED if in_fp8 and self.layout.experts_as != "padded" else 0)
            routed = bytes_each * rows * hidden / (1 if self.layout.whole_experts else self._token_ranks)
        if in_fp8:
            cast = QUANTISED[self.layout.fp8_scaling] * sum(each.batch * each.rows * each.inner for each in products)
        memory = self.hardware.memory_bandwidth * self.given.memory
        local = of_experts[0].batch if of_experts else 0
        gaps = gap_seconds(self.layout, len(products) - len(of_experts), local, self.given.kernel_s)
        return Moved(*((moved[i] + of_mlp[i] + routed + cast) / memory + gaps[i] for i in (0, 1)))

    def _expert_seconds(self, experts: ExpertShapes) -> float:
        """Returns the seconds of sending tokens to their experts and back."""
        moved = ACTIVATION_BYTES * self.tokens * self.shapes.hidden_size / self._token_ranks
        copies, layout = experts.num_experts_per_tok, self.layout
        moved *= layout.expert_imbalance
        return 2 * all_to_all_seconds(
            self.hardware, layout.expert_ranks, layout.expert_tensor, moved, self.given, copies, once=layout.expert_dispatch == "once"
        )

    def _tensor_seconds(self, products: float, experts: ExpertShapes | None) -> tuple[float, float]:
        """Returns the exposed seconds of both passes: an all-reduce after attention and one after the MLP, or the all-gather and reduce-scatter that they are
        made of; with sequence parallelism the backward pass gathers the inputs of two products once more. ``products``: the seconds of the products
        forward, which those of the gradients of the weights take again. Ranks that divide the tokens send them to ``experts`` as they are; where they
        divide the experts too, they gather what each of them got, and scatter the sums, with nothing to hide behind (Megatron-Core,
        ``MoEAlltoAllTokenDispatcher``)."""
        tensor = self.layout.parallel.tensor
        if tensor == 1:
            return 0.0, 0.0
        forward, backward = self._dense_tensor_seconds(products)
        if experts is None or not self.layout.shares_tokens:
            return forward, backward
        arrived = ACTIVATION_BYTES * self.tokens * experts.num_experts_per_tok * self.shapes.hidden_size
        gathered = gather_seconds(self.hardware, self.layout.expert_tensor, 1, arrived * self.layout.expert_imbalance, self.given)
        # Attention has half of them; a shared expert has the other half.
        kept = 1.0 if experts.shared_intermediate_size else 0.5
        return kept * forward + 2 * gathered, kept * backward + 2 * gathered

    def _dense_tensor_seconds(self, products: float) -> tuple[float, float]:
        """Returns ``_tensor_seconds`` of a layer with a plain MLP."""
        tensor, hides = self.layout.parallel.tensor, self.layout.hidden_tensor_communication
        if self.layout.copies_collectives:
            # Autograd keeps what was gathered; in fp8 the inputs of products are cast before (torchtitan, docs/float8.md).
            forward, backward = 2 * self._copied_seconds(self.layout.product_bytes) + 2 * self._copied_seconds(), 4 * self._copied_seconds()
            return forward, backward
        elements = self.tokens * self.shapes.hidden_size
        sums = gather_seconds(self.hardware, tensor, 1, ACTIVATION_BYTES * elements, self.given)
        # Transformer Engine (pytorch/module/layernorm_linear.py) casts the input of a product before it is gathered, in both passes; sums have 16 bits.
        input_bytes = ACTIVATION_BYTES if self.layout.trainer else min(self.layout.product_bytes, ACTIVATION_BYTES)
        inputs = gather_seconds(self.hardware, tensor, 1, input_bytes * elements, self.given) if self.layout.shares_tokens else sums
        forward, backward = 2 * inputs + 2 * sums, (4 if self.layout.shares_tokens else 2) * inputs + 2 * sums
        if hides == "none":
            return forward, backward
        if hides == "backward":
            # The all-gather of a gradient before the first product of a pair has nothing to hide behind.
            exposed = 2 * inputs if self.layout.shares_tokens else 0.0
            return forward, exposed + hidden_seconds(backward - exposed, products, self.given)
        # Of as many parts as ranks, the first waits for its input or the last for its output.
        first = 1 / tensor
        return tuple(first * each + hidden_seconds((1 - first) * each, by, self.given) for each, by in ((forward, products), (backward, 2 * products)))  # type: ignore[return-value]

    def _copied_seconds(self, bytes_each: int = ACTIVATION_BYTES) -> float:
        """Returns the seconds of gathering or scattering an activation, and of reading and writing it once more."""
        moved = float(bytes_each * self.tokens * self.shapes.hidden_size)
        copied = 2 * moved / (self.hardware.memory_bandwidth * self.given.memory)
        return gather_seconds(self.hardware, self.layout.parallel.tensor, 1, moved, self.given) + copied

    def _context_seconds(self) -> float:
        """Returns the seconds of gathering the keys and values of all context-parallel ranks, which attention to the parts that have arrived hides."""
        parallel = self.layout.parallel
        moved = ACTIVATION_BYTES * self.layout.micro_batch * self.layout.sequence * 2 * self.shapes.key_value_size / parallel.tensor
        return gather_seconds(self.hardware, parallel.context, parallel.tensor, moved, self.given)

    def _heads_for_tokens_seconds(self, linear: LinearAttention) -> float:
        """Returns the seconds of the two all-to-alls that give each context-parallel rank all tokens of some heads of linear attention, in fp32."""
        own, parallel = linear.of_one_rank(self.layout.parallel.tensor), self.layout.parallel
        there, back = (WIDE_BYTES * self.tokens * numbers for numbers in (own.mixed_size + 2 * own.num_value_heads, own.value_size))
        return sum(all_to_all_seconds(self.hardware, parallel.context, parallel.tensor, float(moved), self.given) for moved in (there, back))

    def _recomputed(self, forward: Seconds) -> Seconds:
        recompute = self.layout.recompute
        if recompute == "full":
            return forward
        if recompute == "none":
            return Seconds()
        if not self.layout.fused_attention:
            return Seconds(attention=forward.attention)
        if self.layout.parallel.zero == 3:
            # Selective recomputation of single operations, as stacks of fully sharded data parallelism do it: every other product, and what is elementwise.
            return Seconds(products=forward.products / 2, memory_bound=forward.memory_bound)
        return Seconds()


def _part(size: int, ranks: int) -> int:
    return max(1, -(-size // ranks))
