"""Residents in a file or in host memory: exact bytes, memory returned to the system, the same tensors afterwards, damage that is found."""

import os
import threading
from dataclasses import replace

import pytest
import torch

from tandem.config.trainer import TrainerConfig
from tandem.pod.release import release
from tandem.runtime.process.processes import memory_of
from tandem.trainer.offload.offloader import Offloader, storage_bytes
from tandem.trainer.offload.places import PIECE_BYTES, FilePlace, HostPlace, make_place
from tandem.trainer.optimizers.make import make_optimizer
from tandem.types import DamagedOffload, RunError

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


def moved_away(offloader, name, tensors, **more):
    offloader.begin_offload(name, tensors, **more)
    return offloader.wait(name)


def brought_back(offloader, name):
    offloader.begin_reload(name)
    return offloader.wait(name)


def test_storages_leave_memory_once_and_come_back_under_their_views(place, tmp_path):
    whole = torch.arange(6 * 2**20, dtype=torch.float32)
    view, small, mapped = whole[5:].view(-1), torch.full((3,), 7.0), torch.frombuffer(bytearray(64), dtype=torch.float32)
    expected, offloader = whole.clone(), Offloader(place)
    before = resident_bytes()
    written = moved_away(offloader, "actor", [whole, view, small, mapped])
    assert written.size_bytes == written.copied_bytes == whole.nbytes + small.nbytes and written.seconds > 0
    assert storage_bytes([whole, small]) == 0 and mapped.untyped_storage().nbytes() == 64
    assert offloader.is_away("actor") and offloader.wait("actor") is None
    if isinstance(place, FilePlace):
        assert before - resident_bytes() > 0.9 * expected.nbytes
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    assert brought_back(offloader, "actor").size_bytes == written.size_bytes and not offloader.is_away("actor")
    assert torch.equal(whole, expected) and torch.equal(view, expected[5:]) and small.tolist() == [7.0] * 3
    view[0] = -1.0
    assert whole[5] == -1.0, "views share memory again"
    offloader.close()


def test_groups_come_back_alone_and_one_that_grows_gets_another_place(place):
    """Before the first update an optimizer has no moments."""
    actor, moments = torch.arange(5000, dtype=torch.float32), list[torch.Tensor]()
    offloader = Offloader(place)
    for step in range(4):
        expected = [tensor.clone() for tensor in (actor, *moments)]
        assert moved_away(offloader, "actor", [actor]).size_bytes == actor.nbytes
        assert moved_away(offloader, "optimizer", moments).size_bytes == sum(tensor.nbytes for tensor in expected[1:])
        brought_back(offloader, "optimizer")
        assert storage_bytes([actor]) == 0 and all(torch.equal(*pair) for pair in zip(moments, expected[1:], strict=True))
        brought_back(offloader, "actor")
        assert torch.equal(actor, expected[0])
        actor += 1
        moments = moments or [torch.full((700 + 4000 * step,), 3.0), torch.full((9000,), -3.0)]
    offloader.close()


def test_a_frozen_group_is_written_once_and_one_that_changes_every_time(place):
    frozen, changing = torch.arange(3000, dtype=torch.float32), torch.zeros(3000)
    offloader, found = Offloader(place), []
    for step in range(3):
        changing += step
        moved = moved_away(offloader, "reference", [frozen], is_frozen=True), moved_away(offloader, "actor", [changing])
        found.append([(each.size_bytes, each.copied_bytes) for each in moved])
        brought_back(offloader, "reference"), brought_back(offloader, "actor")
        assert frozen.sum() == sum(range(3000)) and changing.tolist() == [float(sum(range(step + 1)))] * 3000
    first, later = [(12000, 12000), (12000, 12000)], [(12000, 0), (12000, 12000)]
    assert found == [first, later, later]


@pytest.mark.parametrize("staged", [False, True])
def test_a_bit_that_changes_in_the_file_is_found_in_any_piece(staged, tmp_path):
    for at in (0, PIECE_BYTES - 1, PIECE_BYTES + 5, 2 * PIECE_BYTES + 3):
        place = FilePlace(tmp_path, torch.zeros(PIECE_BYTES, dtype=torch.uint8) if staged else None)
        tensors = [torch.ones(7), torch.ones(PIECE_BYTES // 2 + 1)]
        offloader = Offloader(place)
        moved_away(offloader, "optimizer", tensors)
        byte = os.pread(place.descriptor, 1, 4096 + at)
        os.pwrite(place.descriptor, bytes([byte[0] ^ 4]), 4096 + at)
        with pytest.raises(DamagedOffload, match="the offloaded optimizer came back from the disk with other bytes"):
            brought_back(offloader, "optimizer")
        offloader.close()


def test_weights_are_converted_while_the_moments_are_still_being_written(tmp_path):
    class SlowDisk(FilePlace):
        is_free = threading.Event()

        def write(self, content: torch.Tensor, at: int) -> str:
            assert self.is_free.wait(timeout=60)
            return super().write(content, at)

    moments, weights = torch.arange(1000, dtype=torch.float32), torch.arange(8, dtype=torch.float32)
    disk = SlowDisk(tmp_path)
    offloader = Offloader(disk)
    offloader.begin_offload("optimizer", [moments])
    converted = weights.bfloat16()
    assert not disk.is_free.is_set() and converted.tolist() == list(range(8)), "a write that waited for this line would have failed"
    disk.is_free.set()
    offloader.begin_offload("actor", [weights])
    assert (offloader.wait("optimizer").size_bytes, offloader.wait("actor").size_bytes) == (moments.nbytes, weights.nbytes)
    brought_back(offloader, "optimizer"), brought_back(offloader, "actor")
    assert moments.tolist() == list(range(1000)) and weights.tolist() == list(range(8))
    offloader.close()


def test_only_what_is_on_the_computing_device_moves(tmp_path):
    # Host memory is where the state of a CPU is already.
    assert make_place("memory", CPU, tmp_path) is None and isinstance(make_place("disk", CPU, tmp_path), FilePlace)
    elsewhere, stays = Offloader(HostPlace(pinned=False), torch.device("meta")), torch.ones(8)
    assert moved_away(elsewhere, "actor", [stays]).size_bytes == 0 and storage_bytes([stays]) == 32
    assert brought_back(elsewhere, "actor").size_bytes == 0


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
def test_training_that_slept_between_two_steps_has_the_bits_of_one_that_did_not(optimizer, make_model, place):
    def train(sleeps: bool) -> dict[str, torch.Tensor]:
        model = make_model(torch.float32)
        made, offloader = make_optimizer(model, replace(CONFIG, optimizer=optimizer)), Offloader(place)
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
                assert moved_away(offloader, "state", state).size_bytes == size == brought_back(offloader, "state").size_bytes
        return {**dict(model.named_parameters()), **made.state().moments}

    found, expected = train(True), train(False)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_disk_without_room_is_named(tmp_path, monkeypatch):
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RunError, match=r"No space left on device.*trainer.offload_folder"):
        Offloader(FilePlace(tmp_path)).begin_offload("actor", [torch.zeros(8)])
