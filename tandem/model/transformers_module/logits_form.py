"""How a module of transformers computes logits from its hidden states: one factor and one soft cap, observed with numbers in the place of both."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.model.transformers_module.one_line import one_line
from tandem.types import UserError

NEAR, FAR = 1e-3, 1e9
"""A logit that no cap changes visibly, and one that every cap replaces."""
UNCLEAR = "changes its logits other than by a factor and a soft cap"


class LogitsForm(NamedTuple):
    """Logits are ``cap tanh(z / cap)`` of ``z = W h / scaling``; ``cap`` ``None``: they are z."""

    scaling: float = 1.0
    cap: float | None = None


def observe_logits(network: Any, output: Any) -> LogitsForm:
    """Returns the form of the logits of ``network`` on the ``meta`` device, whose base model has returned ``output``, by a pass of its own code before and
    after the head. Raises ``UserError`` if they have another."""
    head, base = network.get_output_embeddings(), network.base_model
    if head.bias is not None:
        raise UserError("its head has a bias, and it changes the hidden states before it or its logits after it")
    shape = output[0].shape
    hidden = torch.linspace(-3.0, 3.0, shape.numel(), dtype=torch.float32).view(shape)
    count = int(head.weight.shape[0])
    signs = torch.tensor([1.0, -1.0]).repeat(shape[1] * count)[: shape[1] * count]
    steps = torch.logspace(-1.0, 2.5, shape[1] * count)
    logits = (signs * steps).view(1, shape[1], count)
    logits[0, 0, 0], logits[0, 0, 1] = NEAR, FAR
    read: list[Tensor] = []
    output.last_hidden_state = hidden

    def in_place_of_head(given: Tensor) -> Tensor:
        read.append(given)
        return logits.clone()

    base.forward, head.forward = (lambda *_, **__: output), in_place_of_head
    try:
        with torch.no_grad():
            written = network(input_ids=torch.zeros(1, shape[1], dtype=torch.long, device="meta"), use_cache=False).logits
    except Exception as error:
        raise UserError(f"what it does with its logits cannot be followed ({one_line(error)})") from None
    finally:
        del base.forward, head.forward
    if len(read) != 1 or read[0].device.type == "meta" or written.device.type == "meta":
        raise UserError("its logits are not those of one model and one head")
    return _form(hidden, read[0], logits, written)


def _form(hidden: Tensor, read: Tensor, logits: Tensor, written: Tensor) -> LogitsForm:
    """Returns the form with which ``hidden`` becomes ``read`` and ``logits`` become ``written``."""
    before = float(read.flatten()[-1] / hidden.flatten()[-1]) if read.shape == hidden.shape else 0.0
    if not before or not torch.allclose(read.float(), hidden * before, rtol=1e-5, atol=1e-6):
        raise UserError("it changes the hidden states before the head other than by a factor")
    if written.shape != logits.shape:
        raise UserError(UNCLEAR)
    written = written.float()
    after, cap = float(written[0, 0, 0]) / NEAR, abs(float(written[0, 0, 1]))
    if not after > 0:
        raise UserError(UNCLEAR)
    has_cap = cap < 0.5 * FAR * after
    expected = after * logits
    expected = cap * torch.tanh(expected / cap) if has_cap else expected
    if not torch.allclose(written, expected, rtol=1e-4, atol=1e-6):
        raise UserError(UNCLEAR)
    factor = _rounded(before * after)
    return LogitsForm(_rounded(1.0 / factor), _rounded(cap) if has_cap else None)


def _rounded(number: float) -> float:
    """Returns the ``number`` that a configuration has, which was observed in fp32."""
    return float(f"{number:.6g}")
