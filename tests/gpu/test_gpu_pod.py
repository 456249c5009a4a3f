"""A pod on a device: rollout and trainer agree bit for bit there, it learns, its residents leave the device, and a death changes nothing."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "pod"))

from pod_runs import PodRun, difference

from tandem.pod.release import release
from tandem.runtime.records.journal import Journal
from tandem.trainer.offload.offloader import Offloader
from tandem.trainer.offload.places import make_place

pytestmark = pytest.mark.gpu
FEW = ("--machine.device=cuda", "--run.max_steps=3", "--sft.steps=6", "--model.create.num_key_value_heads=2")


@pytest.fixture(autouse=True)
def tensors_begin_on_the_host(on_the_device: None) -> Iterator[None]:
    with torch.device("cpu"):
        yield


def train(run: PodRun, *settings: str) -> PodRun:
    done = run.train(*FEW, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def agrees(run: PodRun) -> bool:
    return [(row["mismatch_kl"], row["mismatch_max_abs"]) for row in run.rows()] == [(0.0, 0.0)] * len(run.rows())


@pytest.mark.parametrize(
    "settings", ["", "trainer.dtype=bfloat16", "trainer.precision=bf16", "trainer.precision=fp16", "rollout.engine.kv_cache_dtype=int8",
                 "model.create.architecture=qwen3_moe model.create.num_experts=4", "machine.kernels=reference", "residents.plan=terminate"],
)  # fmt: skip
def test_rollout_and_trainer_agree_bit_for_bit(tmp_path: Path, settings: str) -> None:
    run = train(PodRun(tmp_path), *(f"--{setting}" for setting in settings.split()))
    assert agrees(run)
    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    assert all(row["memory/gpu/peak"] > 0 and row["actor/grad_norm"] > 0 for row in rows)
    with Journal(run.directory / "journal.sqlite", read_only=True) as journal:
        assert journal.get("device") == "cuda"
    assert run.left_behind() == []


@pytest.mark.parametrize("mesh", ["parallel.data=2 parallel.zero=3", "parallel.tensor=2 rollout.engine.tensor_parallel_size=2", "parallel.pipeline=2"])
def test_ranks_that_share_gpus_with_the_engine_agree_with_it(tmp_path: Path, mesh: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two CUDA devices are needed")
    assert agrees(train(PodRun(tmp_path), *(f"--{setting}" for setting in mesh.split())))


def test_it_learns(tmp_path: Path) -> None:
    run = PodRun(tmp_path)
    done = run.train("--machine.device=cuda", "--sft.steps=6", "--run.max_steps=30", "--rollout.prompts_per_step=16", "--evaluation.every_steps=50")
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [row["reward/mean"] for row in run.rows()]
    assert sum(rewards[-5:]) > sum(rewards[:5]) + 0.5, rewards


@pytest.mark.parametrize("to", ["memory", "disk"])
def test_residents_leave_the_device_and_come_back(tmp_path: Path, to: str) -> None:
    device = torch.device("cuda", 0)
    groups = {"actor": [torch.randn(n, device=device) for n in (5_000_000, 3)], "optimizer": [torch.randn(9_000_001, device=device)]}
    expected = {name: [tensor.cpu() for tensor in tensors] for name, tensors in groups.items()}
    size = sum(tensor.nbytes for tensors in groups.values() for tensor in tensors)
    place = make_place(to, device, tmp_path)
    assert place is not None
    offloader = Offloader(place, device)
    allocated, (free, _) = torch.cuda.memory_allocated(device), torch.cuda.mem_get_info(device)
    for name, tensors in groups.items():
        offloader.begin_offload(name, tensors)
    moved = [offloader.wait(name) for name in groups]
    assert sum(one.size_bytes for one in moved if one is not None) == size
    release(device)
    assert allocated - torch.cuda.memory_allocated(device) >= size
    assert torch.cuda.mem_get_info(device)[0] - free > 0.9 * size, "the driver has it back"
    for name, tensors in groups.items():
        offloader.begin_reload(name)
        offloader.wait(name)
        assert all(torch.equal(tensor.cpu(), wanted) for tensor, wanted in zip(tensors, expected[name], strict=True))
    offloader.close()


@pytest.mark.parametrize("to", ["memory", "disk"])
@pytest.mark.parametrize("plan", ["offload", "figure", "terminate"])
def test_residents_that_move_change_no_bit(tmp_path: Path, plan: str, to: str) -> None:
    stays = train(PodRun(tmp_path, name="stays"), "--residents.plan=keep")
    moved = train(PodRun(tmp_path, name="moved"), f"--residents.plan={plan}", f"--residents.to={to}")
    assert difference(moved, stays) == [] and moved.events("residue") == []


@pytest.mark.parametrize("fault", ["trainer_worker:after:register:2", "rollout_worker:after:update_weight:1"])
def test_a_death_changes_no_bit(tmp_path: Path, fault: str) -> None:
    undisturbed, disturbed = train(PodRun(tmp_path, name="undisturbed")), train(PodRun(tmp_path, name="disturbed"), "--fault", fault)
    assert len(disturbed.events("recovery")) == 1
    assert difference(disturbed, undisturbed) == []


def test_a_killed_pod_is_resumed_on_the_same_device_to_the_same_bits(tmp_path: Path) -> None:
    undisturbed, killed = train(PodRun(tmp_path, name="undisturbed")), PodRun(tmp_path, name="killed")
    assert killed.train(*FEW, "--fault", "pod:after:commit_scores:2").returncode != 0
    done = killed.resume()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Results will not be bit-identical" not in done.stdout + done.stderr
    assert difference(killed, undisturbed) == []
