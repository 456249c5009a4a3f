"""Lets Megatron-Core run on a CPU over gloo: its calls of ``torch.cuda`` answer for the CPU. For tests alone, and never on a machine with CUDA.

Megatron-Core takes CUDA for granted: it allocates on ``torch.cuda.current_device()`` or ``"cuda"``, synchronises, uses streams and events, keeps the random
states of CUDA, and asserts that gradients are ``torch.cuda.FloatTensor``. Here there is one device, the CPU, whose work is done when a call returns. What
cannot be reached in this way: Transformer Engine, fused kernels, overlap of communication, and anything of NCCL.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

CPU = torch.device("cpu")
FACTORIES = (
    "arange", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace", "ones", "ones_like", "rand", "rand_like", "randint", "randn",
    "randn_like", "tensor", "zeros", "zeros_like", "as_tensor", "tril", "triu_indices", "tril_indices",
)  # fmt: skip
METHODS = ("to", "new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def install() -> None:
    """Changes ``torch`` in this process."""
    cuda: Any = torch.cuda
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats", "set_stream"):
        setattr(cuda, name, lambda *_, **__: None)
    cuda.current_device = lambda: CPU
    cuda.device_count = lambda: 1
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: None
    cuda.memory_allocated = cuda.max_memory_allocated = cuda.memory_reserved = lambda *_, **__: 0
    for module in (cuda, cuda.random):
        module.get_rng_state = lambda *_, **__: torch.get_rng_state()
        module.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda._lazy_call = lambda call, **_: call()
    cuda._lazy_init = lambda: None
    # Megatron sets the state of the generator of the current device in a deferred call.
    cuda.default_generators = {CPU: torch.default_generator}
    cuda.manual_seed, cuda.manual_seed_all = torch.default_generator.manual_seed, lambda seed: None
    cuda.Stream, cuda.Event = Stream, Event
    cuda.current_stream = cuda.default_stream = lambda *_: Stream()
    cuda.stream = lambda *_: Stream()
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    for name in FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    for name in METHODS:
        setattr(torch.Tensor, name, on_cpu(getattr(torch.Tensor, name)))
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self  # type: ignore[assignment, method-assign]
    torch.distributed.all_to_all_single = with_counts_on_host(torch.distributed.all_to_all_single)
    torch.Tensor.type = named_as_on_cuda(torch.Tensor.type)  # type: ignore[method-assign, assignment]


class Stream:
    """A stream whose work is always done."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_stream(self, *_: object) -> None: ...

    def wait_event(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: object) -> "Event":
        return Event()


class Event:
    """An event that has happened."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def record(self, *_: object) -> None: ...

    def wait(self, *_: object) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``function`` with every CUDA device among its arguments replaced by the CPU."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        return function(*map(replaced, arguments), **{name: replaced(value) for name, value in options.items()})

    return call


def replaced(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.partition(":")[0] == "cuda") or (isinstance(value, torch.device) and value.type == "cuda")
    return CPU if is_cuda else value


def with_counts_on_host(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``all_to_all_single`` for counts that are tensors: Megatron copies those that are on CUDA to arrays of the host, and no others."""

    @functools.wraps(exchange)
    def call(*arguments: Any, **options: Any) -> Any:
        return exchange(*arguments, **{name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in options.items()})

    return call


def named_as_on_cuda(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``Tensor.type``, which says of a tensor that it is on CUDA."""

    def named(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        answer = function(tensor, *arguments, **options)
        return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer

    return named


if not torch.cuda.is_available():
    install()
