"""Training state in a file or in host memory during a rollout: exact bytes, memory returned to the system, the same tensors afterwards."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from tandem.config.trainer import TrainerConfig
from tandem.pod.release import release
from tandem.runtime.process.processes import memory_of
from tandem.trainer.offload.sleep import FilePlace, HostPlace, SleepOffload, make_sleep
from tandem.trainer.optimizers.make import make_optimizer
from tandem.types import RunError

CONFIG, CPU = TrainerConfig(learning_rate=1e-2), torch.device("cpu")


def resident_bytes() -> int:
    release(CPU)
    return memory_of(os.getpid()).rss_bytes


@pytest.fixture(params=["file", "file through a buffer", "host memory"])
def place(request, tmp_path):
    """A place in host memory, or in ``tmp_path``; the buffer is smaller than a tensor, as it is beside a GPU."""
    if request.param == "host memory":
        return HostPlace(pinned=False)
    return FilePlace(tmp_path, torch.zeros(10_007, dtype=torch.uint8) if "buffer" in request.param else None)


def test_storages_leave_memory_once_and_come_back_under_their_views(place, tmp_path):
    whole = torch.arange(6 * 2**20, dtype=torch.float32)
    view, small, mapped = whole[5:].view(-1), torch.full((3,), 7.0), torch.frombuffer(bytearray(64), dtype=torch.float32)
    expected = whole.clone()
    file = SleepOffload(place)
    before = resident_bytes()
    assert file.begin_offload([whole, view, small, mapped]) == whole.nbytes + small.nbytes
    assert file.begin_offload([view]) == 0
    written = file.wait()
    assert written.size_bytes == whole.nbytes + small.nbytes and written.seconds > 0
    assert whole.untyped_storage().nbytes() == small.untyped_storage().nbytes() == 0 and mapped.untyped_storage().nbytes() == 64
    assert file.holds(view) and not file.holds(mapped)
    if isinstance(place, FilePlace):
        assert before - resident_bytes() > 0.9 * expected.nbytes
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    read = file.onload()
    assert read.size_bytes == written.size_bytes and file.onload().size_bytes == 0
    assert torch.equal(whole, expected) and torch.equal(view, expected[5:]) and small.tolist() == [7.0] * 3
    view[0] = -1.0
    assert whole[5] == -1.0, "views share memory again"
    file.close()


def test_room_is_made_once_for_what_sleeps_and_grows_with_it(place):
    """The first rollout comes before the first moments; offsets of the second one cross what the first one took."""
    first, second = [torch.arange(n, dtype=torch.float32) for n in (5000, 3)], [torch.arange(n, dtype=torch.float32) for n in (700, 4000, 9000)]
    file = SleepOffload(place)
    for tensors in (first, [*second, *first], [first[0]], [*first, *second]):
        expected = [tensor.clone() for tensor in tensors]
        for begun in (tensors[:1], tensors):
            file.begin_offload(begun)
        assert file.wait().size_bytes == sum(tensor.nbytes for tensor in expected)
        assert all(file.holds(tensor) for tensor in tensors)
        file.onload()
        assert all(torch.equal(found, wanted) for found, wanted in zip(tensors, expected, strict=True))
    if isinstance(place, HostPlace):
        assert sum(len(block) for _, block in place._blocks) == file_bytes([*first, *second])
    file.close()


def file_bytes(tensors):
    """What the tensors take, each from a boundary of a page on."""
    return sum(-(-tensor.nbytes // 4096) * 4096 for tensor in tensors)


def test_weights_are_converted_while_the_moments_are_still_being_written(tmp_path):
    class SlowDisk(FilePlace):
        is_free = threading.Event()

        def write(self, content: torch.Tensor, at: int) -> None:
            assert self.is_free.wait(timeout=60)
            super().write(content, at)

    moments, weights = torch.arange(1000, dtype=torch.float32), torch.arange(8, dtype=torch.float32)
    disk = SlowDisk(tmp_path)
    sleep = SleepOffload(disk)
    assert sleep.begin_offload([moments]) == moments.nbytes
    converted = weights.bfloat16()
    assert not disk.is_free.is_set() and converted.tolist() == list(range(8)), "a write that waited for this line would have failed"
    disk.is_free.set()
    assert sleep.begin_offload([weights]) == weights.nbytes
    assert sleep.wait().size_bytes == moments.nbytes + weights.nbytes
    sleep.onload()
    assert moments.tolist() == list(range(1000)) and weights.tolist() == list(range(8))
    sleep.close()


@pytest.mark.parametrize("kind", ["none", "cpu", "nvme"])
def test_only_what_is_on_the_computing_device_moves(kind, tmp_path):
    made = make_sleep(kind, CPU, tmp_path)
    # Host memory is where the state of a CPU is already.
    assert (made is None) == (kind != "nvme")
    elsewhere = SleepOffload(HostPlace(pinned=False), torch.device("meta"))
    stays = torch.ones(8)
    assert elsewhere.begin_offload([stays]) == 0 and not elsewhere.holds(stays) and elsewhere.onload().size_bytes == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
def test_training_that_slept_between_two_steps_has_the_bits_of_one_that_did_not(optimizer, make_model, place):
    def train(sleeps: bool) -> dict[str, torch.Tensor]:
        model = make_model(torch.float32)
        made, file = make_optimizer(model, replace(CONFIG, optimizer=optimizer)), SleepOffload(place)
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
