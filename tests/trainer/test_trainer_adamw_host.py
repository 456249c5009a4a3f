"""AdamW with moments in host memory: the bits of AdamW, in any order of copies and updates that the events allow."""

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tandem.config.trainer import TrainerConfig
from tandem.kernels import select
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.trainer.offload.streams import StreamName, Streams
from tandem.trainer.optimizers.adamw import AdamW, OptimizerState
from tandem.trainer.optimizers.adamw_host import HostAdamW
from tandem.trainer.optimizers.make import make_optimizer

CONFIG = TrainerConfig(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0, offload="cpu")
SHAPES = {"embedding": (70, 24), "matrix": (48, 64), "norm": (24,), "bias": (3,), "last": (24, 33)}


class AnyOrder:
    """Streams with random delays: at each turn one of the operations at the heads of the streams that may start is run. ``without_waits``:
    streams ignore each other."""

    def __init__(self, seed: int, without_waits: bool = False) -> None:
        self._draw, self._heeds = random.Random(seed), not without_waits
        self._queues: dict[str, deque[tuple[str, Any]]] = {"host_to_device": deque(), "compute": deque(), "device_to_host": deque()}
        self._reached: set[int] = set()
        self._events = 0

    def run(self, stream: StreamName, work: Callable[[], object]) -> None:
        self._queues[stream].append(("run", work))

    def record_event(self, stream: StreamName) -> int:
        self._events += 1
        self._queues[stream].append(("event", self._events))
        return self._events

    def wait(self, stream: StreamName, event: Any) -> None:
        if event is not None and self._heeds:
            self._queues[stream].append(("wait", event))

    def synchronize(self) -> None:
        while any(self._queues.values()):
            ready = [q for q in self._queues.values() if q and not (q[0][0] == "wait" and q[0][1] not in self._reached)]
            assert ready, "the streams wait for each other"
            kind, what = self._draw.choice(ready).popleft()
            if kind == "run":
                what()
            elif kind == "event":
                self._reached.add(what)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def trained(make: Callable[[dict[str, nn.Parameter]], Any], steps: int = 4, finish: Callable[[], None] = lambda: None) -> tuple[Any, dict[str, nn.Parameter]]:
    held = parameters()
    optimizer, generator = make(held), torch.Generator().manual_seed(2)
    for _ in range(steps):
        for parameter in held.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.clip()
        optimizer.step(1e-2)
        finish()
    return optimizer, held


def same(a: tuple[Any, dict[str, nn.Parameter]], b: tuple[Any, dict[str, nn.Parameter]]) -> bool:
    first, second = a[0].state(), b[0].state()
    moments = first.moments.keys() == second.moments.keys() and all(torch.equal(first.moments[name], second.moments[name]) for name in first.moments)
    return moments and first.updates == second.updates and all(torch.equal(a[1][name], b[1][name]) for name in SHAPES)


def host(streams: Streams | None = None, piece: int = 1024) -> Callable[[dict[str, nn.Parameter]], HostAdamW]:
    return lambda held: HostAdamW(held.items(), CONFIG, streams=streams, piece=piece)


@pytest.mark.parametrize("piece", [256, 1024, 1 << 22])
def test_moments_in_the_host_change_no_bit_of_adamw(piece: int) -> None:
    assert same(trained(host(piece=piece)), trained(lambda held: AdamW(held.items(), CONFIG)))


def test_no_order_that_the_events_allow_changes_a_bit() -> None:
    expected = trained(lambda held: AdamW(held.items(), CONFIG))
    for seed in range(20):
        streams = AnyOrder(seed)
        # The GPU is at most one step behind, because the next gradients depend on it.
        assert same(trained(host(streams, 256), finish=streams.synchronize), expected)


def test_without_the_events_bits_do_change() -> None:
    expected = trained(lambda held: AdamW(held.items(), CONFIG))
    wrong = [AnyOrder(seed, without_waits=True) for seed in range(5)]
    assert not all(same(trained(host(streams, 256), finish=streams.synchronize), expected) for streams in wrong)


def test_a_state_goes_from_one_kind_to_the_other() -> None:
    whole, _ = trained(lambda held: AdamW(held.items(), CONFIG))
    other = parameters()
    taken = HostAdamW(other.items(), CONFIG, piece=512)
    taken.load_state(whole.state())
    assert taken.updates == 4 and all(torch.equal(taken.state().moments[name], moment) for name, moment in whole.state().moments.items())
    taken.load_state(OptimizerState({}, 0))
    assert taken.state().moments == {} and not any(view.any() for view in taken._views().values())
    with pytest.raises(ValueError, match="has no tensor"):
        taken.load_state(OptimizerState({"exp_avg/norm": torch.zeros(24)}, 1))


def test_beside_weights_in_the_host_offload_changes_nothing() -> None:
    model = Decoder(ModelShapes("qwen3", 43, 32, 1, 4, 2, 16, 48, 128, True, qk_norm=True), select("reference", torch.float32))
    assert type(make_optimizer(model, CONFIG)) is AdamW
