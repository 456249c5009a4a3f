"""Launches the programs of the gated delta rule."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import DeltaStates
from tandem.kernels.gated_delta import CHUNK_TOKENS, Gradients
from tandem.kernels.triton.launch import UNFUSED, check, dense, places, power_of_two
from tandem.kernels.triton.programs import gated_delta as programs
from tandem.kernels.triton.programs import gated_delta_backward as backward_programs
from tandem.kernels.triton.programs import gated_delta_chunks as chunk_programs

MOST_NUMBERS = 128
"""Numbers of a key in Qwen3-Next, with which the tiles of chunks fit into the registers and the shared memory of a Hopper GPU."""
_FEW_TOKENS = 16
"""With fewer tokens a sequence, most rows of its chunk would be empty."""
_CHUNK_COLUMNS, _TOKEN_COLUMNS = 32, 8
"""Columns of a state in a program of chunks, and in one of tokens, which has one warp: no sum waits for other warps, and one sequence has programs enough for a
device."""


class TritonPasses:
    """Sums in fp32. ``deterministic``: token by token, all calls by one compiled program, so that the bits of a token depend on the tokens before it alone.
    Otherwise in chunks of 64 tokens from the first one of each sequence in a call, where sequences have more than a few: those of a packed sequence do not
    depend on its company, while those over states depend on how tokens are divided into calls. Gradients are always computed in chunks."""

    def __init__(self, deterministic: bool) -> None:
        self._deterministic = deterministic

    def forward(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor, states: DeltaStates | None) -> Tensor:
        call = _Call(q, k, v, decay, beta, bounds)
        out = torch.empty_like(call.v)
        if call.sequences < 1 or not len(v):
            return out
        if self._deterministic or (states is not None and len(v) < _FEW_TOKENS * call.sequences):
            _by_tokens(call, states, out)
        else:
            _by_chunks(call, states, out)
        return out

    def backward(self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor) -> Gradients:
        call = _Call(q, k, v, decay, beta, bounds)
        empty = lambda *shape: torch.empty(len(v), call.heads, *shape, dtype=torch.float32, device=v.device)
        of_q, of_k, of_v, of_decay, of_beta = empty(q.shape[2]), empty(q.shape[2]), empty(call.value_size), empty(), empty()
        if call.sequences >= 1 and len(v):
            grad, options = _aligned(grad), call.options(8)
            solved = _solved(call, None, keeps=True)
            by_delta, after = torch.empty_like(solved.delta), torch.empty_like(solved.before)
            of_chunks = call.of_chunks(options)
            backward_programs.delta_outputs_backward[of_chunks](call.q, call.k, grad, call.decay, call.starts, by_delta, call.sequences, **options)
            backward_programs.delta_states_backward[call.of_sequences(options)](
                call.q, call.k, solved.w, grad, call.decay, call.starts, by_delta, after, **options
            )
            backward_programs.delta_reads_backward[of_chunks[:2]](
                call.q, call.k, call.v, call.decay, call.beta, solved.delta, grad, by_delta, solved.inverses, solved.before, after, call.starts,
                of_q, of_k, of_v, of_decay, of_beta, call.sequences, **options,
            )  # fmt: skip
            backward_programs.delta_pairs_backward[of_chunks[:2]](
                call.q, call.k, call.decay, call.beta, solved.delta, grad, by_delta, call.starts, of_q, of_k, of_decay, of_beta, call.sequences, **options
            )
        return Gradients(of_q.to(q.dtype), of_k.to(k.dtype), of_v.to(v.dtype), of_decay.to(decay.dtype), of_beta.to(beta.dtype))


class _Solved(NamedTuple):
    """What chunks are computed from: ``w[T, Hv, Dk]``, the corrections ``delta[T, Hv, Dv]``, the states ``before[places, Hv, Dk, Dv]`` each chunk, and for
    gradients the ``inverses[places, Hv, CHUNK_TOKENS, CHUNK_TOKENS]``."""

    w: Tensor
    delta: Tensor
    before: Tensor
    inverses: Tensor


class _Call:
    """The inputs of a call, checked, and its grids."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, bounds: Tensor) -> None:
        check("gated delta rule v", v, None, None, None)
        tokens, self.heads, self.value_size = v.shape
        check("gated delta rule q", q, tokens, None, None)
        check("gated delta rule k", k, *q.shape)
        check("gated delta rule decay", decay, tokens, self.heads)
        check("gated delta rule beta", beta, tokens, self.heads)
        if self.heads % q.shape[1]:
            raise ValueError(f"the gated delta rule has {self.heads} value heads over {q.shape[1]} key heads; value heads must be a multiple of key heads")
        self.q, self.k, self.v, self.decay, self.beta = (_aligned(each) for each in (q, k, v, decay, beta))
        self.starts, self.sequences = dense(bounds.to(v.device)), len(bounds) - 1

    def options(self, warps: int, columns: int = _CHUNK_COLUMNS) -> dict[str, Any]:
        """Returns the constants of a launch whose tiles have up to ``columns`` numbers of a value."""
        key_size = self.q.shape[2]
        return {
            "KEY_HEADS": self.q.shape[1], "HEADS": self.heads, "K": key_size, "V": self.value_size, "BLOCK_K": max(16, power_of_two(key_size)),
            "BLOCK_V": min(columns, max(16, power_of_two(self.value_size))), "num_warps": warps, "num_stages": 1, **UNFUSED,
        }  # fmt: skip

    def of_chunks(self, options: dict[str, Any]) -> tuple[int, int, int]:
        return places(self.sequences, len(self.v), 1, CHUNK_TOKENS), *self._of_values(options)

    def of_sequences(self, options: dict[str, Any]) -> tuple[int, int, int]:
        return self.sequences, *self._of_values(options)

    def of_tokens(self, options: dict[str, Any]) -> tuple[int, int, int]:
        return len(self.v), *self._of_values(options)

    def _of_values(self, options: dict[str, Any]) -> tuple[int, int]:
        return self.heads, -(-self.value_size // options["BLOCK_V"])


def _by_tokens(call: _Call, states: DeltaStates | None, out: Tensor) -> None:
    """Also without ``states`` it has some, and rows of further states: what is compiled, and with it the order of sums, must be the same."""
    device, options = call.v.device, call.options(1, _TOKEN_COLUMNS)
    if states is None:
        matrices = torch.empty(call.sequences, call.heads, call.q.shape[2], call.value_size, dtype=torch.float32, device=device)
        rows = torch.arange(call.sequences, device=device)
        states = DeltaStates(matrices, rows, torch.ones_like(rows, dtype=torch.bool))
    kept = torch.full((len(call.v),), -1, device=device) if states.kept is None else states.kept.long()
    programs.delta_tokens[call.of_sequences(options)](
        call.q, call.k, call.v, call.decay, call.beta, call.starts.long(), *_of_states(states), _aligned(kept), out, **options
    )


def _by_chunks(call: _Call, states: DeltaStates | None, out: Tensor) -> None:
    solved, options = _solved(call, states, keeps=False), call.options(8)
    chunk_programs.delta_outputs[call.of_chunks(options)](
        call.q, call.k, solved.delta, call.decay, call.starts, solved.before, out, call.sequences, **options
    )
    if states is not None and states.kept is not None:
        chunk_programs.delta_kept[call.of_tokens(options)](
            call.k, solved.delta, call.decay, call.starts, solved.before, dense(states.kept), states.matrices, call.sequences, **options
        )


def _solved(call: _Call, states: DeltaStates | None, keeps: bool) -> _Solved:
    """Computes the corrections of all chunks and the states before them; states of ``states`` go on."""
    options = call.options(4)
    count = call.of_chunks(options)[0]
    empty = lambda *shape: torch.empty(*shape, dtype=torch.float32, device=call.v.device)
    tokens, keys, values = len(call.v), call.q.shape[2], call.value_size
    w, delta = empty(tokens, call.heads, keys), empty(tokens, call.heads, values)
    inverses = empty(count, call.heads, CHUNK_TOKENS, CHUNK_TOKENS) if keeps else delta
    chunk_programs.delta_chunks[call.of_chunks(options)[:2]](
        call.k, call.v, call.decay, call.beta, call.starts, w, delta, inverses, call.sequences, KEEPS=keeps, **options
    )
    before = empty(count, call.heads, keys, values)
    matrices, rows, fresh = (before, call.starts, call.starts) if states is None else _of_states(states)
    chunk_programs.delta_states[call.of_sequences(options)](
        call.k, w, delta, call.decay, call.starts, matrices, rows, fresh, before, HAS_STATES=states is not None, **options
    )
    return _Solved(w, delta, before, inverses)


def _of_states(states: DeltaStates) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the matrices, which are changed in place, their rows, and which of these are fresh, as bytes."""
    if states.matrices.dtype != torch.float32 or not states.matrices.is_contiguous():
        raise ValueError(f"the gated delta rule's states are {states.matrices.dtype}; the Triton kernels take dense float32")
    return states.matrices, dense(states.rows), dense(states.fresh).view(torch.uint8)


def _aligned(x: Tensor) -> Tensor:
    """Returns ``x`` in contiguous memory from a multiple of 16 bytes on: programs are compiled for that, and others may order sums in another way."""
    x = dense(x)
    return x if x.data_ptr() % 16 == 0 else x.clone()
