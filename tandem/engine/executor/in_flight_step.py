"""A step that was launched and is not synchronized yet."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.executor.input_batch import SelectedRows
from tandem.kernels.api import SampledRows


class DraftOutput(NamedTuple):
    """A step verified ``num_proposed`` draft tokens of ``row`` and accepted the first ``num_accepted``."""

    row: int
    num_proposed: int
    num_accepted: int


@dataclass(slots=True)
class InFlightStep:
    """A launched step. ``sampled``: the tokens of the rows ``selected``, in host memory once the event ``done`` has completed. With ``drafts``,
    tokens are drawn from ``logits`` at verification instead. ``states[T, W]``: what a draft head will read of the decoding rows, if it will."""

    output: SchedulerOutput
    selected: SelectedRows | None = None
    sampled: SampledRows | None = None
    done: torch.cuda.Event | None = None
    logits: Tensor | None = None
    drafts: list[list[int]] | None = None
    states: Tensor | None = None


def to_host(sampled: SampledRows) -> tuple[SampledRows, torch.cuda.Event | None]:
    """Starts to copy ``sampled`` to host memory. Returns the host tensors and the event of the copy (``None``: they are on the CPU)."""
    if not sampled.tokens.is_cuda:
        return sampled, None
    host = SampledRows(*(torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in sampled))
    done = torch.cuda.Event()
    done.record()
    return host, done
