"""A replica's checkpoint continues bit for bit in a new process, and committed checkpoints stay loadable after a death."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.trainer.checkpoint.find import committed_steps

TRAIN = """
import os, signal, sys
from pathlib import Path
import torch
sys.path.insert(0, str(Path(sys.argv[1])))
import conftest
from tandem.config.algorithm import AlgorithmConfig
from tandem.config.trainer import TrainerConfig
from tandem.rl.algorithms.update import update_policy
from tandem.trainer.checkpoint.replica_checkpoints import ReplicaCheckpoints
from tandem.trainer.checkpoint.replica_state import ReplicaState
from tandem.trainer.grad_scaler import GradScaler
from tandem.trainer.parallel.ranks import alone
from tandem.trainer.parallel.replica import make_replica

torch.set_num_threads(1)
make_model = conftest.make_model.__wrapped__()
make_batch = conftest.make_batch.__wrapped__()
trainer = TrainerConfig(learning_rate=1e-2, warmup_steps=2, weight_decay=0.1, micro_batch_tokens=40, optimizer=sys.argv[3])
algorithm, folder = AlgorithmConfig(kl_coef=0.1), Path(sys.argv[2])
ranks = alone()
replica, guard = make_replica(make_model(torch.float32), trainer, ranks), GradScaler(trainer)


def die(point):
    if point == sys.argv[4]:
        os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(7)
checkpoints = ReplicaCheckpoints(folder, 2, folder.parent, ReplicaState(replica), guard, ranks.world, asynchronous=False, fault_point=die)
found = checkpoints.load()
step = 0 if found is None else found.step
for step in range(step, int(sys.argv[5])):
    update_policy(replica, make_batch(seed=step, step=step), algorithm, trainer, guard=guard)
    checkpoints.save(step + 1, {"steps": step + 1})
print(step, checkpoints.take_committed().digest)
"""


def run(folder: Path, steps: int, optimizer: str = "adamw", die_at: str = "-", expect: int = 0) -> str:
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", TRAIN, here, folder, optimizer, die_at, str(steps)], capture_output=True, text=True, timeout=300, cwd=here.parent.parent
    )
    assert done.returncode == expect, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_steps_before_a_kill_and_after_it_in_a_new_process_are_the_undisturbed_steps_bit_for_bit(optimizer: str, tmp_path: Path) -> None:
    straight = run(tmp_path / "straight", 3, optimizer)
    run(tmp_path / "killed", 3, optimizer, "after:checkpoint_stage:2", -signal.SIGKILL)
    assert committed_steps(tmp_path / "killed") == [1]
    assert run(tmp_path / "killed", 3, optimizer) == straight


@pytest.mark.full
def test_only_so_many_checkpoints_are_kept_though_a_process_dies_before_it_removes_the_older_ones(tmp_path: Path) -> None:
    run(tmp_path / "checkpoints", 4, die_at="after:checkpoint_commit:4", expect=-signal.SIGKILL)
    assert committed_steps(tmp_path / "checkpoints") == [2, 3, 4]
    run(tmp_path / "checkpoints", 5, die_at="before:checkpoint_write:5", expect=-signal.SIGKILL)
    assert committed_steps(tmp_path / "checkpoints") == [3, 4]
