"""What a run on data reports about its device before it begins and about its speed in its rows."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from package_data import make_datasets
from pretrain_recipe import write_recipe

from tandem.config.pretrain import PretrainRecipe
from tandem.config.recipe import Recipe, load_config
from tandem.jobs.checks.check_rl import RunPlan, check_rl_run
from tandem.jobs.replay.comparison import same_device
from tandem.jobs.replay.replay_data import replay_data_step
from tandem.jobs.sft import sft_recipe
from tandem.jobs.start import resume, train
from tandem.runtime.callback import Callback
from tandem.runtime.machine import gpus
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import read_rows
from tandem.trainer import device_speed
from tandem.trainer.device_speed import DeviceSpeed
from tandem.types import RunError, UserError

ROOT = Path(__file__).parents[2]


def refused(tmp_path: Path, recipe: str, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        train(load_config(ROOT / "recipes" / recipe, [f"--run.directory={tmp_path / 'runs'}", "--machine.device=cuda", *overrides]))
    assert not (tmp_path / "runs").exists(), "work had begun"
    return str(raised.value)


def pretend(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(gpus, "probe", lambda: gpus.Probe((gpus.Gpu("NVIDIA H200", 1 << 37, 1 << 37),) * count, "torch is built without CUDA"))


@pytest.mark.parametrize("recipe", ["pretrain.yaml", "sft.yaml", "sort.yaml"])
def test_a_gpu_that_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: str) -> None:
    pretend(monkeypatch, 0)
    said = refused(tmp_path, recipe)
    assert said.startswith("'machine.device' is 'cuda' and no GPU is found: torch is built without CUDA") and "\n" not in said


def test_fewer_gpus_than_ranks_are_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, 1)
    for recipe, key in (("pretrain.yaml", "parallel.data"), ("sort.yaml", "parallel.data"), ("sort.yaml", "rollout.engine.tensor_parallel_size")):
        assert "this run has 2 ranks; torch finds 1 GPUs" in refused(tmp_path, recipe, f"--{key}=2")


@pytest.mark.parametrize("name", ["offload_parameters", "offload_activations"])
def test_what_cannot_leave_a_gpu_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    pretend(monkeypatch, 1)
    for recipe in ("pretrain.yaml", "sort.yaml"):
        said = refused(tmp_path, recipe, "--trainer.offload=nvme", f"--trainer.{name}=nvme")
        assert said.startswith(f"'trainer.{name}' is 'nvme'") and "machine.device to cpu" in said


def pod_plan(monkeypatch: pytest.MonkeyPatch, free_bytes: int, *overrides: str) -> RunPlan:
    """The plan of a pod on one GPU with ``free_bytes`` that a process can use."""
    gpu = gpus.Gpu("NVIDIA H200", -int(-(free_bytes + gpus.CONTEXT_BYTES) // gpus.ROOM_SHARE), 1 << 37)
    monkeypatch.setattr(gpus, "probe", lambda: gpus.Probe((gpu,)))
    recipe = load_config(ROOT / "recipes" / "sort.yaml", ["--machine.device=cuda", *overrides])
    assert isinstance(recipe, Recipe)
    return check_rl_run(recipe)


def test_a_plan_is_chosen_by_the_room_of_the_gpu_and_a_gpu_too_small_for_the_strictest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # On this machine host memory is enough.
    gpu = pod_plan(monkeypatch, 1 << 40).pod.gpu
    assert gpu is not None and gpu.largest_phase == gpu.trainer + gpu.rollout
    assert pod_plan(monkeypatch, gpu.largest_phase).pod.residency.plan == "keep"
    plan = pod_plan(monkeypatch, gpu.largest_phase - (1 << 20))
    assert plan.pod.residency.plan == "sleep" and plan.pod.gpu is not None
    assert f"device: 1 x NVIDIA H200, predicted {plan.pod.gpu.largest_phase / 2**20:,.0f} MiB of each" in plan.lines()
    assert plan.lines()[0] == "residents: plan sleep" and plan.lines()[1].startswith("residents: keep needs ")
    least = pod_plan(monkeypatch, 1 << 40, "--residents.plan=terminate").pod
    assert least.gpu is not None and least.gpu.trainer_idle == 0 and least.residency.to == "memory"
    assert pod_plan(monkeypatch, least.gpu.largest_phase).pod.residency.plan == "figure", "which needs no more of the GPU"
    for free, overrides in ((least.gpu.largest_phase - (1 << 20), ()), (gpu.largest_phase - (1 << 20), ("--residents.plan=keep",))):
        with pytest.raises(RunError, match=r"needs \d.* GiB of each GPU at its worst moment and may take .* what would fit: .* GiB of each GPU \(residents"):
            pod_plan(monkeypatch, free, *overrides)
    assert pod_plan(monkeypatch, 1 << 40, f"--residents.device_gib={(gpu.largest_phase - 2**20) / 2**30}").pod.residency.plan == "sleep"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_the_stage_before_reinforcement_learning_and_a_replay_take_the_pods_device(tmp_path: Path, device: str) -> None:
    recipe = load_config(ROOT / "recipes" / "sort.yaml", [f"--machine.device={device}"])
    assert isinstance(recipe, Recipe)
    expected = "cuda" if device == "cuda" else "cpu"
    assert sft_recipe(recipe, tmp_path, tmp_path, 32).machine.device == expected
    assert same_device(recipe.machine, tmp_path, expected).device == expected  # type: ignore[arg-type]
    other = {"cpu": "cuda", "cuda": "cpu"}.get(device)
    if other is not None:
        with pytest.raises(UserError, match=f"was run on '{other}' and machine.device is '{device}', whose results are not bit-identical"):
            same_device(recipe.machine, tmp_path, other)  # type: ignore[arg-type]


def test_mfu_is_model_flops_over_the_published_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(get_device_name=lambda device: "NVIDIA H200", max_memory_allocated=lambda device: 7, reset_peak_memory_stats=lambda device: None)
    monkeypatch.setattr(device_speed.torch, "cuda", cuda)
    gpu = torch.device("cuda", 0)
    found = DeviceSpeed(gpu, "bf16").rates(989.5e12, 2.0)
    assert found == {"perf/model_tflops": pytest.approx(494.75), "perf/mfu": pytest.approx(0.5)}
    assert "perf/mfu" not in DeviceSpeed(gpu, "fp32").rates(1e12, 1.0) and "rows have none" in DeviceSpeed(gpu, "fp8").describe()
    assert DeviceSpeed(gpu, "bf16").memory() == {"memory/gpu/peak": 7.0} and "989.5 TFLOP/s" in DeviceSpeed(gpu, "bf16").describe()
    cuda.get_device_name = lambda device: "some other GPU"
    assert "perf/mfu" not in DeviceSpeed(gpu, "bf16").rates(1e12, 1.0) and "no hardware file" in DeviceSpeed(gpu, "bf16").describe()
    on_cpu = DeviceSpeed(torch.device("cpu"), "fp32")
    assert on_cpu.rates(4e12, 2.0) == {"perf/model_tflops": 2.0} and on_cpu.memory() == {}


class Heard(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


@pytest.mark.full
def test_a_run_that_was_on_a_gpu_goes_on_on_a_cpu_and_says_so_but_is_not_replayed_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    data = make_datasets(tmp_path / "data", "json")
    recipe = write_recipe(
        tmp_path, data, data={"train": [{"path": str(data / "json")}], "global_batch_size": 4}, checkpoint={"every_steps": 2, "keep": 3},
        run={"max_steps": 4},
    )  # fmt: skip
    train(load_config(recipe))
    run = tmp_path / "run"
    assert all(row["perf/model_tflops"] > 0 and "perf/mfu" not in row for row in read_rows(run / "metrics.jsonl"))
    with Journal(run / "journal.sqlite") as journal:
        assert journal.get("device") == "cpu"
        journal.set("device", "cuda")
    same = load_config(run / "config.yaml")
    assert isinstance(same, PretrainRecipe)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"'machine.device' is 'cuda' and no GPU is found"):
            replay_data_step(same, run, 3)
    with pytest.raises(UserError, match=r"was run on 'cuda' and machine.device is 'cpu'"):
        replay_data_step(load_config(run / "config.yaml", ["machine.device=cpu"]), run, 3)  # type: ignore[arg-type]
    shutil.rmtree(run / "checkpoints" / "step-4")
    heard = Heard()
    resume(run, callbacks=[heard], overrides=["--machine.device=cpu"])
    assert "Resuming on cpu at step 2. Results will not be bit-identical to the cuda run." in heard.messages
    with Journal(run / "journal.sqlite") as journal:
        (changed,) = [event.detail for event in journal.events() if event.kind == "mesh"]
        assert changed["device"] == "cpu" and changed["step"] == 2 and changed["before"] == changed["now"]
