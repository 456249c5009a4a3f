"""Moments in a file: the bits of AdamW in memory, a smaller process, and a disk without room."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tandem.config.trainer import TrainerConfig
from tandem.trainer.offload import pager
from tandem.trainer.offload.pager import Pager
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.types import RunError

CONFIG = TrainerConfig(learning_rate=0.01, weight_decay=0.1, offload="nvme")


def parameters():
    generator = torch.Generator().manual_seed(0)
    made = {"small": (7,), "matrix": (190, 37), "norm": (1003,), "last": (64, 32)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in made.items()}


def gradients(held, seed, skip=()):
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in held.items():
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if name in skip else gradient


@pytest.mark.parametrize("piece", [64, 1024, 1 << 20])
def test_paged_moments_have_the_bits_of_adamw_in_memory(piece, tmp_path, monkeypatch):
    monkeypatch.setattr(pager, "PIECE", piece)
    held, other = parameters(), parameters()
    plain, paged = AdamW(held.items(), CONFIG), PagedAdamW(other.items(), CONFIG, tmp_path)
    for step in range(4):
        for each, its in ((held, plain), (other, paged)):
            gradients(each, step)
            assert its.clip() > 1
            its.step(0.01 * (step + 1))
    assert all(torch.equal(held[name], other[name]) for name in held)
    state = paged.state()
    assert state.updates == 4 and state.moments.keys() == plain.state().moments.keys()
    assert all(torch.equal(state.moments[name], tensor) for name, tensor in plain.state().moments.items())
    again = PagedAdamW(other.items(), CONFIG, tmp_path)
    again.load_state(state)
    for each, its in ((held, plain), (other, again)):
        gradients(each, 9)
        its.step(0.01)
    assert all(torch.equal(held[name], other[name]) for name in held)
    with pytest.raises(ValueError, match="exp_avg/last"):
        again.load_state(type(state)({k: v for k, v in state.moments.items() if k != "exp_avg/last"}, 4))


def test_two_buffers_are_all_that_stays_in_memory_and_every_piece_is_visited_once(tmp_path, monkeypatch):
    monkeypatch.setattr(pager, "PIECE", 128)
    made = Pager(tmp_path, [1000, 1000, 300], torch.float32, at_once=2)
    assert made.staging_bytes == 2 * 2 * 128 * 4
    seen = []

    def work(group, where, pieces):
        seen.append((group, where.start, where.stop))
        for piece in pieces:
            piece.add_(torch.arange(where.start, where.stop))

    for _ in range(3):
        made.visit([(0, 1), (2,)], work)
    assert seen[:11] == [(0, s, min(s + 128, 1000)) for s in range(0, 1000, 128)] + [(1, s, min(s + 128, 300)) for s in range(0, 300, 128)]
    assert torch.equal(made.mapped(1), 3.0 * torch.arange(1000)) and torch.equal(made.mapped(2), 3.0 * torch.arange(300))
    made.close()


MEASURE = """
import sys, torch
from pathlib import Path
from torch import nn
from tandem.config.trainer import TrainerConfig
from tandem.trainer.optimizers.adamw_paged import PagedAdamW
from tandem.trainer.optimizers.adamw import AdamW
config = TrainerConfig()

def resident():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def taken(make, size):
    held = {str(i): nn.Parameter(torch.ones(size, 1024)) for i in range(12)}
    for p in held.values():
        p.grad = torch.ones_like(p)
    before, optimizer = resident(), make(held)
    for _ in range(2):
        optimizer.step(1e-3)
    return resident() - before

taken(lambda held: AdamW(held.items(), config), 1)  # the first one of a process loads modules too
print(taken(lambda held: PagedAdamW(held.items(), config, Path(sys.argv[1])), 1024), taken(lambda held: AdamW(held.items(), config), 1024))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to read resident memory")
def test_resident_memory_is_smaller_by_the_moments(tmp_path):
    done = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path)], check=True, capture_output=True, text=True)
    paged, plain = map(int, done.stdout.split())
    moments, staging = 2 * 12 * 1024 * 1024 * 4, 2 * 2 * pager.PIECE * 4
    assert 0.9 * moments < plain < 1.1 * moments
    assert paged < staging + 0.1 * moments


def test_a_disk_without_room_is_said_before_the_first_step(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"No space left.*trainer\.offload_folder") as caught:
        PagedAdamW(parameters().items(), CONFIG, tmp_path)
    assert len(str(caught.value).splitlines()) == 1
