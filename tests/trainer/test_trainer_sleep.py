"""Training state in a file during a rollout: exact bytes, memory that is given back, the same tensors afterwards."""

import os
from dataclasses import replace

import pytest
import torch

from tandem.config.trainer import TrainerConfig
from tandem.pod.release import release
from tandem.runtime.process.processes import memory_of
from tandem.trainer.offload.sleep import FilePlace, SleepOffload
from tandem.trainer.optimizers.make import make_optimizer
from tandem.types import RunError

CONFIG, CPU = TrainerConfig(learning_rate=1e-2), torch.device("cpu")


def resident_bytes() -> int:
    release(CPU)
    return memory_of(os.getpid()).rss_bytes


def test_storages_leave_memory_once_and_come_back_under_their_views(tmp_path):
    whole = torch.arange(6 * 2**20, dtype=torch.float32)
    view, small, mapped = whole[5:].view(-1), torch.full((3,), 7.0), torch.frombuffer(bytearray(64), dtype=torch.float32)
    expected = whole.clone()
    file = SleepOffload(FilePlace(tmp_path))
    before = resident_bytes()
    assert file.begin_offload([whole, view, small, mapped]) == whole.nbytes + small.nbytes
    assert file.begin_offload([view]) == 0
    written = file.wait()
    assert written.size_bytes == whole.nbytes + small.nbytes and written.seconds > 0
    assert whole.untyped_storage().nbytes() == small.untyped_storage().nbytes() == 0 and mapped.untyped_storage().nbytes() == 64
    assert file.holds(view) and not file.holds(mapped)
    assert before - resident_bytes() > 0.9 * whole.nbytes
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    read = file.onload()
    assert read.size_bytes == written.size_bytes and file.onload().size_bytes == 0
    assert torch.equal(whole, expected) and torch.equal(view, expected[5:]) and small.tolist() == [7.0] * 3
    view[0] = -1.0
    assert whole[5] == -1.0, "views share memory again"
    file.close()


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
def test_training_that_slept_between_two_steps_has_the_bits_of_one_that_did_not(optimizer, make_model, tmp_path):
    def train(sleeps: bool) -> dict[str, torch.Tensor]:
        model = make_model(torch.float32)
        made, file = make_optimizer(model, replace(CONFIG, optimizer=optimizer)), SleepOffload(FilePlace(tmp_path))
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            made.clip()
            made.step(1e-2)
            made.zero_grad()
            if sleeps:
                state = [*model.parameters(), *made.state().moments.values()]
                size = sum(tensor.nbytes for tensor in state)
                assert file.begin_offload(state) == size == file.wait().size_bytes == file.onload().size_bytes
        return {**dict(model.named_parameters()), **made.state().moments}

    found, expected = train(True), train(False)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_disk_without_room_is_named(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"No space left on device.*trainer.offload_folder"):
        SleepOffload(FilePlace(tmp_path)).begin_offload([torch.zeros(8)])
