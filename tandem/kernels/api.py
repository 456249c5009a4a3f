"""The interface of a set of kernels: the arithmetic of a decoder, and nothing else.

There are three sets: ``tandem.kernels.reference`` (plain torch, any dtype and device), ``tandem.kernels.cpu`` (C++, fp32) and
``tandem.kernels.triton`` (CUDA; fp32, bf16 and fp16). Shapes: T tokens of a flat batch, S sequences, H hidden, D head size, Hq and Hkv
query and key-value heads, N blocks.

The invariance law: the bits of a result for one token depend on that token, its absolute position and the tokens before it in its own
sequence, never on the number of other rows, on chunking, on the block table or on the thread count (for the reference kernels: at a fixed
thread count, since torch may split products differently at another).
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tandem.kernels.kv_dtype import is_scaled, stored_size
from tandem.kernels.quantized import PackedParts, PackedQuantized, QuantizedWeight
from tandem.layout.shapes import Activation
from tandem.types.kv_cache import BLOCK_TOKENS as BLOCK_TOKENS


class PackedWeight(NamedTuple):
    """A linear weight in its kernel's layout. ``data`` belongs to the kernel set; ``rows`` x ``columns`` is the shape [N, K] of the plain
    weight."""

    data: Tensor
    rows: int
    columns: int


class PackedGroups(NamedTuple):
    """The weights of G groups in the layout of ``grouped_linear_packed``; each plain one is ``rows`` x ``columns``, and ``data[g]`` is
    group g's, which need not lie right behind those of group g - 1."""

    data: Tensor
    rows: int
    columns: int


class Routing(NamedTuple):
    """The routing of T tokens in a mixture of E experts. ``gates[T, k]``, the largest first, and ``experts[T, k]`` int64. Sorted by expert,
    the rows ``bounds[e]:bounds[e + 1]`` (int64 [E + 1]) are expert e's; row i there is index ``order[i]`` of the flat [T k], and index j is
    in row ``inverse[j]``. Only the gates carry gradient."""

    gates: Tensor
    experts: Tensor
    bounds: Tensor
    order: Tensor
    inverse: Tensor


class KVLayer(NamedTuple):
    """One layer's KV cache. ``keys[N, Hkv, D, BLOCK_TOKENS]`` (a block's keys are transposed, so that one vector register holds one
    component of BLOCK_TOKENS keys), ``values[N, Hkv, BLOCK_TOKENS, D]``, with pairs of 4-bit codes D / 2; for codes also their fp32 scales ``key_scales`` and
    ``value_scales`` [N, Hkv, BLOCK_TOKENS] (see ``kv_dtype``)."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the cache; the first axis of each is the block."""
        return [tensor for tensor in self if tensor is not None]


class LatentLayer(NamedTuple):
    """One layer's compressed cache of latent attention (``latent_cache``): ``rows[N, BLOCK_TOKENS, D]``, which are keys and values at once; for 8-bit codes
    also their fp32 ``scales[N, BLOCK_TOKENS]``."""

    rows: Tensor
    scales: Tensor | None = None

    def tensors(self) -> list[Tensor]:
        """Returns all tensors of the cache; the first axis of each is the block."""
        return [tensor for tensor in self if tensor is not None]


class StateLayer(NamedTuple):
    """What one layer with linear attention keeps of R sequences, a row for each, however long they are: ``matrices[R, Hv, Dk, Dv]``, and
    ``inputs[R, K - 1, C]``, the last inputs of its convolution. It has no blocks."""

    matrices: Tensor
    inputs: Tensor

    def tensors(self) -> list[Tensor]:
        """Returns the tensors whose first axis is the block: none."""
        return []


CacheLayer = KVLayer | LatentLayer | StateLayer


class DeltaStates(NamedTuple):
    """The states of S sequences: sequence s's are ``matrices[R, Hv, Dk, Dv]`` at ``rows[s]`` (int64), and zero if it is ``fresh[s]`` (bool). ``kept[T]`` int64:
    the row to which the state after each token is copied, -1 for none (``None``: none of them)."""

    matrices: Tensor
    rows: Tensor
    fresh: Tensor
    kept: Tensor | None = None


class TokenLogprobs(NamedTuple):
    """Per predicted token: ``raw[T]`` (temperature 1), ``scaled[T]`` (at the requested temperature; the same tensor if that is 1) and the
    ``entropy[T]`` of the scaled distribution, in nats. ``entropy`` carries no gradient."""

    raw: Tensor
    scaled: Tensor
    entropy: Tensor


class SampledRows(NamedTuple):
    """One sampled token per row: ``tokens[R]`` int64, their ``raw[R]`` log-probability (temperature 1, unfiltered; the bits of
    ``logits_logprobs``) and their ``sampling[R]`` log-probability in the distribution they were drawn from."""

    tokens: Tensor
    raw: Tensor
    sampling: Tensor


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The sequences and cache slots of the tokens of an engine's flat batch.

    ``query_start[S + 1]`` int32: sequence s's new tokens are rows ``query_start[s]:query_start[s + 1]``, and they are the last of its
    ``context_lens[s]`` (int32) tokens. ``block_tables[S, B]`` int32. ``slots[T]`` int64: the slot of each new token's key and value,
    ``block * BLOCK_TOKENS + offset``. ``state_rows[S]`` int64: the rows of the sequences in every ``StateLayer`` (``None``: the model has none).
    ``kept_states[2, K]`` int64: the tokens after which states are copied to a further row, and these rows (``None``: none).
    """

    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slots: Tensor
    state_rows: Tensor | None = None
    kept_states: Tensor | None = None


class Kernels(Protocol):
    """The set of kernels that a model computes with. All but ``pack``, ``packed_rows``, ``pack_quantized``, ``linear_packed``, ``gated_mlp_packed``,
    ``pack_groups``, ``pack_quantized_groups``, ``grouped_linear_packed``, ``rope_to_cache``, ``paged_attention``, ``logits_logprobs`` and ``sample_rows`` are
    differentiable in their floating tensors."""

    name: str
    multiplies_coded_groups: bool
    """Whether they have ``pack_quantized_groups``."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes ``x[T, K] @ weight[N, K].T + bias[N]`` -> [T, N]. Same bits as ``linear_packed`` of the same weight."""
        ...

    def pack(self, weight: Tensor) -> PackedWeight:
        """Copies ``weight[N, K]`` into the kernel's own layout."""
        ...

    def packed_rows(self, rows: Tensor, weight: PackedWeight) -> Tensor:
        """Returns the rows ``rows[T]`` (int64) of the plain weight [N, K], as an embedding looks them up in a table that is the head too: [T, K]. Raises
        ``IndexError`` for a row that it does not have. No gradient."""
        ...

    def pack_elements(self, weight: PackedWeight, rows: Tensor, columns: Tensor, values: Tensor) -> bool:
        """Replaces the elements ``[rows, columns]`` (int64 [C]) of a packed weight by ``values`` [C], as packing the whole again would; returns ``False``,
        and changes nothing, where that would change other elements too."""

    def pack_quantized(self, weight: QuantizedWeight) -> PackedQuantized:
        """Converts a quantized weight to the kernel's own layout, for ``linear_packed``."""
        ...

    def unpack_quantized(self, weight: PackedQuantized) -> Tensor:
        """Returns the fp32 weight [N, K] that ``linear_packed`` multiplies with; not of a product in integers."""
        ...

    def linear_packed(
        self, x: Tensor, weight: PackedWeight | PackedQuantized | PackedParts, bias: Tensor | None
    ) -> Tensor:
        """Does ``linear`` with weights that are used many times between changes, and with quantized ones. No gradient."""
        ...

    def gated_mlp_packed(
        self, x: Tensor, gate_up: PackedWeight, gate_up_bias: Tensor | None, down: PackedWeight, down_bias: Tensor | None, activation: Activation = "silu"
    ) -> Tensor:
        """Computes ``linear_packed`` by gate_up [2 F, H], the ``gate_of`` the activation and ``linear_packed`` by down [H, F], with their bits: [T, H] ->
        [T, H]. No gradient."""
        ...

    def grouped_linear(self, x: Tensor, weight: Tensor, bounds: Tensor) -> Tensor:
        """Computes ``linear`` with a weight for each of G groups: rows ``bounds[g]:bounds[g + 1]`` of ``x[R, K]`` times ``weight[G, N,
        K][g]`` -> [R, N]. ``bounds[G + 1]`` int64 starts at 0 and ends at R. A row has the bits of ``linear`` with its group's weight."""
        ...

    def route(self, logits: Tensor, experts_per_token: int, normalised: bool) -> Routing:
        """Selects the experts with the largest probabilities under ``softmax(logits[T, E])``, in at least fp32; ties go to the lowest ids.
        ``normalised`` gates are divided by their sum, which is taken in their order."""
        ...

    def pack_groups(self, weight: Tensor) -> PackedGroups:
        """Copies ``weight[G, N, K]`` into the kernel's own layout."""
        ...

    def pack_quantized_groups(self, weights: Sequence[QuantizedWeight]) -> PackedQuantized:
        """Does ``pack_groups`` for quantized weights that differ in nothing but their numbers and ``order``, and stay in their codes."""
        ...

    def grouped_linear_packed(self, x: Tensor, weight: PackedGroups | PackedParts | PackedQuantized, bounds: Tensor) -> Tensor:
        """Does ``grouped_linear`` with weights that are used many times between changes, or with several of the same groups, whose outputs are put side by
        side. With quantized ones a group has the bits of ``linear_packed`` with its own. No gradient."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, centred: bool = False) -> Tensor:
        """Computes ``weight * x / sqrt(mean(x^2) + eps)`` over the last axis of [T, H] (Zhang and Sennrich, 2019). ``centred``: of x minus its mean, which is
        LayerNorm without a bias (Ba et al., 2016). ``weight`` [H], or [G, H] of which row t is multiplied with ``weight[t % G]``: T is a multiple of G."""
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, centred: bool = False) -> tuple[Tensor, Tensor]:
        """Returns ``(rms_norm(x + residual), x + residual)``, both [T, H]."""
        ...

    def rope(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits ``qkv[T, (Hq + 2 Hkv) D]`` into ``q[T, Hq, D]``, ``k[T, Hkv, D]``, ``v[T, Hkv, D]``, norms q and k per head if norms are
        given, and rotates them (Su et al., 2021; halves, as in Llama).

        ``heads`` is (Hq, Hkv, D). ``cos_sin[P, D]`` fp32 contains cos in the first half of a row and sin in the second, and is indexed by
        absolute position.
        """
        ...

    def rope_to_cache(
        self, qkv: Tensor, positions: Tensor, cos_sin: Tensor, heads: tuple[int, int, int],
        q_norm: Tensor | None, k_norm: Tensor | None, eps: float, cache: KVLayer, slots: Tensor,
    ) -> Tensor:
        """Does ``rope``, but writes k and v to their slots of the cache; returns ``q[T, Hq, D]``. No gradient."""
        ...

    def round_kv(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Rounds the keys or values ``x[T, Hkv, D]`` as a cache of ``dtype`` does: to the bits that ``paged_attention`` sees after
        ``rope_to_cache``. The gradient is straight-through."""
        ...

    def packed_attention(
        self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float, window: int | None,
        query_start: Tensor | None = None, cap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:
        """Computes causal attention within each of the sequences marked by ``cu_seqlens[S + 1]`` int32 -> [T, Hq, D]; positions start at 0
        in each. A query at position p attends to keys ``max(0, p - window + 1) .. p``. Same bits as ``paged_attention``. ``query_start[S + 1]``
        int32: sequence s has queries at its last positions only, the rows ``query_start[s]:query_start[s + 1]`` of ``q`` and of the result. ``cap``: the
        scores, scaled, are replaced by ``cap tanh(score / cap)`` (``None``: they are not). ``sinks[Hq]``: a score of each head that joins the softmax's
        denominator, as of a key without a value (Xiao et al., 2023). ``v`` may have fewer
        numbers a head than ``k``, as in latent attention; so does the result."""
        ...

    def paged_attention(
        self, q: Tensor, cache: KVLayer, batch: PagedBatch, scale: float, window: int | None, cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Computes causal attention of an engine's new tokens over the cache -> [T, Hq, D]. No gradient."""
        ...

    def latent_attention(self, q: Tensor, cache: LatentLayer, batch: PagedBatch, scale: float, value_size: int) -> Tensor:
        """Computes causal attention of an engine's new tokens ``q[T, Hq, D]`` over a compressed cache, whose rows are the keys of all heads, and the first
        ``value_size`` numbers of each its value -> [T, Hq, value_size]. Same bits as ``packed_attention`` with one key-value head. No gradient."""
        ...

    def gated_delta_rule(
        self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None = None
    ) -> Tensor:
        """Computes the gated delta rule (``kernels.gated_delta``) of ``q, k[T, Hk, Dk]``, ``v[T, Hv, Dv]``, ``decay, beta[T, Hv]`` within each of the sequences
        marked by ``bounds[S + 1]`` -> [T, Hv, Dv]; each query and key serves Hv / Hk value heads, one behind the other. ``states``: where sequences go on from,
        and where their new states are written, without gradient (``None``: all begin)."""
        ...

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Computes ``silu(gate_up[:, :F]) * gate_up[:, F:]``: [T, 2 F] -> [T, F] (Shazeer, 2020)."""
        ...

    def gelu_mul(self, gate_up: Tensor) -> Tensor:
        """Does ``silu_mul`` with GELU in its approximation by tanh (Hendrycks and Gimpel, 2016)."""
        ...

    def clamped_swiglu_mul(self, gate_up: Tensor) -> Tensor:
        """Computes ``g sigmoid(1.702 g) (u + 1)`` of ``gate_up[T, 2 F]`` with g its first half, up to 7, and u its second, between -7 and 7: [T, F], as in
        gpt-oss (OpenAI, 2025)."""
        ...

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """Computes ``cap tanh(x / cap)`` of ``x[T, N]``, in at least fp32."""
        ...

    def token_logprobs(self, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, cap: float | None = None) -> TokenLogprobs:
        """Returns the log-probabilities of ``targets[T]`` int64 under ``softmax(linear(hidden[T, H], weight[V, H]))``; with a ``cap`` under that of the
        logits' ``soft_cap``. ``raw`` has the bits of ``logits_logprobs``.

        Forward and backward hold a chunk of the logits [T, V] at a time, of the size given by ``layout.lm_head``; on CPU all of them are
        kept for the backward pass if they are few. The size of a chunk changes no bit of the outputs nor, except for Triton, of the
        gradients."""
        ...

    def logits_logprobs(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Computes ``log_softmax(logits[T, V])[t, targets[t]]`` -> [T]. No gradient."""
        ...

    def sample_rows(
        self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
    ) -> SampledRows:
        """Samples one token from each row of ``logits[R, V]`` (biases and penalties already applied).

        Per row: ``temperature[R]`` fp32 (0: greedy, the lowest id among equals, ``sampling`` 0), ``top_k[R]`` int64 (0: off), ``top_p[R]``
        fp32 (1: off), ``min_p[R]`` fp32 (0: off), ``uniform[R]`` float64 in [0, 1). The semantics are vLLM's: temperature first, then
        min-p, top-k and top-p, each applied to the result of the previous one; among equal logits the lowest ids are kept. The token is the
        first, in id order, whose cumulative probability exceeds ``uniform``. No gradient."""
        ...


_GATES: dict[Activation, str] = {"silu": "silu_mul", "gelu_pytorch_tanh": "gelu_mul", "clamped_swiglu": "clamped_swiglu_mul"}


def gate_of(kernels: Kernels, activation: Activation) -> Callable[[Tensor], Tensor]:
    """Returns the gate of an MLP: [T, 2 F] -> [T, F]."""
    gate: Callable[[Tensor], Tensor] = getattr(kernels, _GATES[activation])
    return gate


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns zeros that on a CPU use memory, and the time to write it, only for the pages that are touched, of 2 MiB where the system has huge
    ones: it provides new pages as zeros. A pool that is never full never uses its full size."""
    count = math.prod(shape)
    if device.type != "cpu" or not count:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A step reads and writes a few lines in each of many pages, and with small ones spends as long in page walks as in attention.
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """Returns the first plus the second, plus the third and so on, because torch's own sums may use another order for another shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def empty_cache(shapes: tuple[int, int, int], layers: int, dtype: torch.dtype, device: torch.device) -> list[KVLayer]:
    """Returns a zeroed cache of ``shapes`` = (blocks, Hkv, D) for each of ``layers``, with scales if ``dtype`` needs them."""
    (blocks, heads, _), size = shapes, stored_size(shapes[2], dtype)

    def zeros(*shape: int, of: torch.dtype) -> Tensor:
        return untouched_zeros((blocks, heads, *shape), of, device)

    def scales() -> Tensor | None:
        return zeros(BLOCK_TOKENS, of=torch.float32) if is_scaled(dtype) else None

    return [
        KVLayer(zeros(size, BLOCK_TOKENS, of=dtype), zeros(BLOCK_TOKENS, size, of=dtype), scales(), scales()) for _ in range(layers)
    ]
