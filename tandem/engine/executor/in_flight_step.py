"""A step between its launch and the moment at which the host knows its tokens."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.core.scheduler_output import SchedulerOutput
from tandem.engine.executor.input_batch import SelectedRows
from tandem.kernels.api import SampledRows


class DraftOutput(NamedTuple):
    """Of row ``row``, ``num_proposed`` draft tokens were verified in a step, and the first ``num_accepted`` were accepted."""

    row: int
    num_proposed: int
    num_accepted: int


@dataclass(slots=True)
class InFlightStep:
    """A step that was launched. ``sampled``: what the rows of ``selected`` draw, in host memory once ``done`` has happened. Where ``drafts``
    are given, tokens are drawn from ``logits`` while they are verified."""

    output: SchedulerOutput
    selected: SelectedRows | None = None
    sampled: SampledRows | None = None
    done: torch.cuda.Event | None = None
    logits: Tensor | None = None
    drafts: list[list[int]] | None = None


def to_host(sampled: SampledRows) -> tuple[SampledRows, torch.cuda.Event | None]:
    """Returns ``sampled`` on its way to host memory, and the event that it has arrived (``None``: it is there)."""
    if not sampled.tokens.is_cuda:
        return sampled, None
    host = SampledRows(*(torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True) for x in sampled))
    done = torch.cuda.Event()
    done.record()
    return host, done
