"""What a module of transformers asks of attention: observed by a forward pass without numbers, on torch's ``meta`` device."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tandem.model.transformers_module.attention import UNDERSTOOD
from tandem.model.transformers_module.logits_form import LogitsForm, observe_logits
from tandem.model.transformers_module.one_line import one_line
from tandem.types import UserError

PROBE = "tandem_probe"
"""The name of the attention function that observes."""
TOKENS = 5
FARTHEST = 2**18
"""The number of keys before a query whose mask is read: windows of more tokens count as full attention."""
_FULL, _OTHER = -1, -2


class Call(NamedTuple):
    """A call of attention. ``heads``: (query heads, key-value heads, size of a head). ``window`` in tokens (``None``: full attention). ``cap``: the soft cap of
    the scores."""

    module: nn.Module
    heads: tuple[int, int, int]
    window: int | None
    cap: float | None


@dataclass
class _Observer:
    calls: list[Call]
    head_input: Tensor | None = None
    head_output: Tensor | None = None
    base_output: Any = None


_observers: list[_Observer] = []


def probe(network: Any) -> tuple[list[Call], LogitsForm]:
    """Returns the calls of attention of ``network``, a causal language model on the ``meta`` device whose attention is ``PROBE``, in order; and how it computes
    its logits.

    Raises:
        UserError: The module computes with attention, masks or logits in a way that has no equal here.
    """
    observer, head, base = _Observer([]), network.get_output_embeddings(), network.base_model
    hooks = [
        head.register_forward_hook(lambda _, given, output: _note(observer, given[0], output)),
        base.register_forward_hook(lambda _, __, output: setattr(observer, "base_output", output)),
    ]
    try:
        output = followed(network, observer)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"its forward pass cannot be followed ({one_line(error)})") from None
    finally:
        for hook in hooks:
            hook.remove()
    return observer.calls, _logits_form(network, observer, output.logits)


def followed(network: Any, observer: _Observer | None = None, **more: Any) -> Any:
    """Returns the output of ``network`` on the ``meta`` device for ``TOKENS`` tokens, with the arguments ``more``. Raises what its forward pass raises."""
    tokens = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    positions = torch.arange(TOKENS, device="meta").unsqueeze(0)
    _observers.append(observer or _Observer([]))
    try:
        with torch.no_grad():
            # A mask of tokens keeps transformers from reading the positions, which have no values here.
            return network(input_ids=tokens, position_ids=positions, attention_mask=torch.ones_like(tokens), use_cache=False, **more)
    finally:
        _observers.pop()


def _note(observer: _Observer, given: Tensor, output: Tensor) -> None:
    observer.head_input, observer.head_output = given, output


def _logits_form(network: Any, observer: _Observer, logits: Tensor) -> LogitsForm:
    if observer.head_output is None or observer.base_output is None or observer.head_input is None:
        raise UserError("its logits are not those of one model and one head")
    hidden = observer.base_output[0]
    is_read = _memory(observer.head_input) is _memory(hidden) and observer.head_input.shape == hidden.shape
    return LogitsForm() if is_read and logits is observer.head_output else observe_logits(network, observer.base_output)


def _memory(tensor: Tensor) -> Tensor:
    """Returns the tensor that ``tensor`` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def observe(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    softcap: float | None = None, **more: Any,
) -> tuple[Tensor, None]:
    """The attention function ``PROBE``: notes its arguments."""
    # The shape [1, heads, tokens, size] is that of every implementation of attention in transformers.
    unknown = [name for name, given in more.items() if name not in UNDERSTOOD and given is not None and given is not False]
    if unknown:
        raise UserError(f"its attention has a term that the kernels do not have ('{unknown[0]}')")
    if query.shape[-1] != value.shape[-1] or query.shape[-1] != key.shape[-1]:
        raise UserError(f"its heads have {key.shape[-1]} numbers for keys and {value.shape[-1]} for values, which the KV cache does not hold")
    if key.shape[2] != query.shape[2]:
        raise UserError("its attention reads keys of other tokens than those of the batch")
    window = _OTHER if attention_mask is None else int(attention_mask.flatten()[0])
    if window == _OTHER:
        raise UserError("its attention is not causal attention with or without a sliding window")
    heads = query.shape[1], key.shape[1], query.shape[-1]
    _observers[-1].calls.append(Call(module, heads, None if window == _FULL else window, softcap))
    return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None


def observed_mask(batch_size: int, q_length: int, kv_length: int, *_: Any, mask_function: Any, **more: Any) -> Tensor:
    """The mask function ``PROBE``: returns, in the place of a mask, the window that the mask makes."""
    keys, first = torch.arange(FARTHEST + 8), torch.tensor(0)
    try:
        seen = mask_function(first, first, torch.tensor(FARTHEST), keys)
    except Exception:
        return torch.full((1, 1, q_length, kv_length), _OTHER)
    count = int(seen.sum())
    is_window = seen.shape == keys.shape and count > 0 and bool(seen[FARTHEST - count + 1 : FARTHEST + 1].all())
    return torch.full((1, 1, q_length, kv_length), _OTHER if not is_window else _FULL if count == FARTHEST + 1 else count)
