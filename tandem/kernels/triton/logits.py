"""Launches the programs over rows of logits: log-probabilities and sampling."""

from typing import NamedTuple

import torch
from torch import Tensor

from tandem.kernels.api import SampledRows, TokenLogprobs
from tandem.kernels.triton.launch import UNFUSED, check, dense, power_of_two
from tandem.kernels.triton.programs import logits as programs
from tandem.kernels.triton.programs import sampling as sampling_programs


class _Sums(NamedTuple):
    """The results of ``chunk_sums``, each [R, chunks]: the ``largest`` logits and the first ids that have them (``place``, int32), the sums
    of weights at temperature 1 (``total``) and at the row's (``scaled``), and of ``weighted`` logarithms at the latter."""

    largest: Tensor
    place: Tensor
    total: Tensor
    scaled: Tensor
    weighted: Tensor

    @property
    def chunks(self) -> int:
        return self.largest.shape[1]


def logprobs(logits: Tensor, targets: Tensor, temperature: float | None, block: int) -> TokenLogprobs:
    """Returns the log-probabilities of ``targets[R]`` under ``logits[R, V]``; without a ``temperature`` only ``raw`` is filled."""
    rows, width = logits.shape
    check("logprobs logits", logits, rows, width)
    logits = dense(logits)
    temperatures = None if temperature is None else torch.full((rows,), temperature, dtype=torch.float32, device=logits.device)
    return _combined(logits, targets, temperatures, _chunk_sums(logits, temperatures, block))


def logprobs_backward(
    logits: Tensor, targets: Tensor, raw: Tensor, scaled: Tensor, grad_raw: Tensor, grad_scaled: Tensor, temperature: float, block: int
) -> Tensor:
    """Returns the gradient by ``logits[R, V]`` of the log-probabilities ``raw[R]`` and ``scaled[R]`` of their ``targets[R]``, in the memory of the
    logits."""
    rows, width = logits.shape
    check("logprobs logits", logits, rows, width)
    # Gathered before any program writes over them.
    chosen = logits.gather(1, targets.unsqueeze(1)).float().squeeze(1)
    if rows:
        programs.logprobs_backward[(rows, -(-width // block))](
            logits, targets, chosen, raw, scaled, grad_raw.float().contiguous(), grad_scaled.float().contiguous(), temperature, width,
            SCALED=temperature != 1, BLOCK=block, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return logits


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor, block: int
) -> SampledRows:
    """Runs ``Kernels.sample_rows``."""
    rows, width = logits.shape
    check("sample logits", logits, rows, width)
    logits = dense(logits)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    sampling = torch.empty(rows, dtype=torch.float32, device=logits.device)
    settings = [x.contiguous() for x in (temperature.float(), top_k.long(), top_p.float(), min_p.float(), uniform.double())]
    sums = _chunk_sums(logits, settings[0], block)
    if rows:
        sampling_programs.sample[(rows,)](
            logits, *settings, sums.largest, sums.place, sums.scaled, tokens, sampling, width, sums.chunks, BLOCK=block,
            BLOCK_C=power_of_two(sums.chunks), num_warps=4, **UNFUSED,
        )  # fmt: skip
    return SampledRows(tokens, _combined(logits, tokens, None, sums).raw, sampling)


def _chunk_sums(logits: Tensor, temperatures: Tensor | None, block: int) -> _Sums:
    rows, width = logits.shape
    chunks = -(-width // block)
    largest, total, scaled, weighted = torch.empty(4, rows, chunks, dtype=torch.float32, device=logits.device)
    place = torch.empty(rows, chunks, dtype=torch.int32, device=logits.device)
    if rows:
        programs.chunk_sums[(rows, chunks)](
            logits, logits if temperatures is None else temperatures, largest, place, total, scaled, weighted, width, chunks,
            SCALED=temperatures is not None, BLOCK=block, num_warps=4, **UNFUSED,
        )  # fmt: skip
    return _Sums(largest, place, total, scaled, weighted)


def _combined(logits: Tensor, targets: Tensor, temperatures: Tensor | None, sums: _Sums) -> TokenLogprobs:
    rows, width = logits.shape
    raw, tempered, entropy = torch.empty(3, rows, dtype=torch.float32, device=logits.device)
    if rows:
        programs.logprobs[(rows,)](
            logits, dense(targets.long()), logits if temperatures is None else temperatures, sums.largest, sums.total, sums.scaled,
            sums.weighted, raw, tempered, entropy, width, sums.chunks, SCALED=temperatures is not None,
            BLOCK_C=power_of_two(sums.chunks), num_warps=1, **UNFUSED,
        )  # fmt: skip
    return TokenLogprobs(raw, tempered, entropy)
