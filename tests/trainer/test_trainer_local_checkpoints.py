"""Checkpoints on a node's own disk beside those of the run's folder: the nearest whole one is loaded, what is damaged is passed over, and a full disk ends the
tier and not the run."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tandem.config.checkpoint import CheckpointConfig
from tandem.config.trainer import TrainerConfig
from tandem.model.decoder import Decoder
from tandem.runtime.rpc.credentials import new_credential
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.checkpoint.tiers.disks_tier import Node
from tandem.trainer.checkpoint.trigger import copies_due
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import make_replica
from tandem.types import UserError

DATA = "rank-00000.safetensors"


class Run:
    """A model whose weights after N steps are all N. It has checkpoints of steps 1 and 4 in its folder, and of steps 1, 2, 3 and 4 on its local disk, which
    keeps two."""

    def __init__(self, make_model: Callable[..., Decoder], folder: Path, local: Path) -> None:
        trainer, ranks = TrainerConfig(learning_rate=1e-3), alone()
        self.folder, self.local, self.model = folder / "checkpoints", local, make_model(torch.float32)
        self.checkpoints = ReplicaCheckpoints(
            self.folder, 2, folder, ReplicaState(make_replica(self.model, trainer, ranks)), GradScaler(trainer), ranks.world, asynchronous=False, local=local
        )
        self.checkpoints.save(1, self.take(1))
        for step in (2, 3):
            self.checkpoints.copy(step, self.take(step), {"local"})
        self.checkpoints.save(4, self.take(4))

    def take(self, step: int) -> dict[str, int]:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.fill_(step)
        return {"steps": step}

    def load(self) -> tuple[str, int]:
        """Loads the nearest checkpoint and returns its tier and step, which all weights must be."""
        self.take(-1)
        loaded, opened = self.checkpoints.load(), self.checkpoints.opened
        assert loaded is not None and opened is not None and all(bool((parameter == loaded.step).all()) for parameter in self.model.parameters())
        return opened.tier, loaded.step


@pytest.fixture
def run(make_model: Callable[..., Decoder], tmp_path: Path) -> Run:
    begun = Run(make_model, tmp_path, tmp_path / "nvme")
    assert [each.trouble for each in begun.checkpoints.take_written() if each.trouble] == []
    return begun


def test_of_disks_on_several_nodes_each_serves_its_own_and_is_passed_over_where_it_is_lost(run: Run) -> None:
    """One node; ``tests/pod/test_pod_local_disks.py`` has several."""
    run.checkpoints.node = Node("127.0.0.1", new_credential())
    assert run.load() == ("folder", 4), "what another layout of the disks has is none of this one"
    for step in (5, 6, 7):
        run.checkpoints.copy(step, run.take(step), {"local"})
    own = run.local / "node-127.0.0.1"
    assert sorted(path.name for path in own.iterdir()) == ["step-6", "step-7"]
    assert run.load() == ("local", 7) and run.checkpoints.damaged == []
    assert run.checkpoints.read_bytes == {"local": (own / "step-7" / DATA).stat().st_size, "folder": 0}
    assert run.checkpoints.opened is not None and set(run.checkpoints.opened.where.values()) == {"127.0.0.1"}
    flip(own / "step-7" / DATA)
    assert run.load() == ("local", 6)
    assert any("does not have the digest it was written with" in why and "local disk of node 127.0.0.1" in why for why in run.checkpoints.damaged)
    (own / "step-6" / DATA).unlink()
    assert run.load() == ("folder", 4)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_of_two_checkpoints_of_a_step_the_local_one_is_loaded_and_the_other_is_not_read(run: Run) -> None:
    assert run.load() == ("local", 4) and run.checkpoints.damaged == []
    assert run.checkpoints.read_bytes == {"local": (run.local / "step-4" / DATA).stat().st_size, "folder": 0}
    assert sorted(path.name for path in run.local.iterdir()) == ["step-3", "step-4"]
    assert sorted(path.name for path in run.folder.iterdir()) == ["step-1", "step-4"]


@pytest.mark.parametrize("damage", ["a bit", "no marker", "half written", "a file is missing"])
def test_a_damaged_local_checkpoint_is_passed_over_in_one_line_for_the_same_step_of_the_folder(damage: str, run: Run) -> None:
    target = run.local / "step-4"
    if damage == "a bit":
        flip(target / DATA)
    elif damage == "no marker":
        (target / "COMMIT").unlink()
    elif damage == "half written":
        os.truncate(target / DATA, 1000)
    else:
        (target / DATA).unlink()
    assert run.load() == ("folder", 4)
    [why] = run.checkpoints.damaged
    assert str(target) in why and "is skipped" in why


def test_an_older_local_checkpoint_is_better_than_a_still_older_one_of_the_folder(run: Run) -> None:
    flip(run.local / "step-4" / DATA)
    flip(run.folder / "step-4" / DATA)
    assert run.load() == ("local", 3) and len(run.checkpoints.damaged) == 2


def test_a_checkpoint_under_the_name_of_another_step_is_none(run: Run) -> None:
    (run.local / "step-3").rename(run.local / "step-9")
    assert run.load() == ("local", 4)
    assert "its MANIFEST.json is that of step 3" in run.checkpoints.damaged[0]


@pytest.fixture
def small_disk(small_disk: Callable[[str], Path]) -> Path:
    return small_disk("300k")


def test_a_full_local_disk_ends_the_tier_with_one_line_and_not_the_run(make_model: Callable[..., Decoder], small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "filled").write_bytes(bytes(290 << 10))
    run = Run(make_model, tmp_path, small_disk / "run")
    assert [path.name for path in small_disk.rglob("step-*")] == []
    written = run.checkpoints.take_written()
    [left_out] = [each for each in written if each.trouble]
    assert left_out.tier == "local" and left_out.step == 1 and "no space left" in left_out.trouble
    assert [(each.tier, each.step) for each in written if not each.trouble] == [("folder", 1), ("folder", 4)]
    assert run.load() == ("folder", 4)


def test_what_is_due_for_the_tiers_before_the_folder() -> None:
    config = CheckpointConfig(memory_every_steps=2, local_directory="/nvme", local_every_steps=3)
    assert [sorted(copies_due(config, step)) for step in (0, 1, 2, 3, 6)] == [[], [], ["memory"], ["local"], ["local", "memory"]]


@pytest.mark.parametrize(
    ("keys", "said"),
    [({"local_directory": "nvme"}, "give an absolute path"), ({"local_every_steps": 2}, "is not given"), ({"local_every_steps": -1}, "0 (none) or more")],
)
def test_values_that_name_no_local_disk_are_one_line(keys: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.local") as raised:
        CheckpointConfig(**keys).check()  # type: ignore[arg-type]
    assert said in str(raised.value)
