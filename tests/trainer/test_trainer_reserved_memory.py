"""Memory whose pages are reused, as counted by the kernel."""

import os
from pathlib import Path

import torch

from tandem.trainer.offload.reserved_memory import PagePool, ReservedMemory

LENGTH = 8 << 20
BYTES = 4 * LENGTH


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_pages_move_with_what_they_hold_and_leave_the_addresses_they_came_from_empty() -> None:
    first, second = ReservedMemory(LENGTH, torch.float32), ReservedMemory(LENGTH, torch.float32)
    view = second.tensor[5:]
    first.tensor.copy_(torch.arange(LENGTH))
    before = resident()
    assert first.give_pages(second)
    assert abs(resident() - before) < BYTES // 8
    assert torch.equal(view, torch.arange(5, LENGTH).float())
    first.tensor[-1] = 3.0
    assert first.tensor.sum() == 3.0 and second.tensor[-1] == LENGTH - 1


def test_layers_that_are_whole_in_turn_take_the_memory_of_one() -> None:
    pool, layers = PagePool(), [ReservedMemory(LENGTH, torch.float32) for _ in range(6)]
    before = resident()
    for _ in range(2):
        for number, layer in enumerate(layers):
            pool.fill(layer)
            layer.tensor.fill_(float(number))
            assert layer.tensor[0] == number and layer.tensor[-1] == number
            pool.take(layer)
    assert resident() - before < 1.5 * BYTES


def test_a_pool_gives_back_what_is_more_than_it_keeps() -> None:
    pool, layers = PagePool(most=2), [ReservedMemory(LENGTH, torch.float32) for _ in range(4)]
    before = resident()
    for layer in layers:
        layer.tensor.fill_(1.0)
    for layer in layers:
        pool.take(layer)
    assert resident() - before < 2.5 * BYTES
