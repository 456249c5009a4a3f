"""Training on a device: the curve of the CPU, learning in 16 bits and 8, ranks over NCCL, and checkpoints that go on elsewhere."""

import json
import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))

from package_data import make_datasets

from tandem.config.recipe import load_config
from tandem.config.trainer import TrainerConfig
from tandem.jobs.start import resume, train
from tandem.kernels import select
from tandem.kernels.attention_backends import fast_attention
from tandem.kernels.mixed import in_precision
from tandem.layout.shapes import ModelShapes
from tandem.model.decoder import Decoder
from tandem.model.initialise import initialise
from tandem.trainer.losses.aggregate import counts_of
from tandem.trainer.losses.cross_entropy import make_cross_entropy_loss
from tandem.trainer.micro_batch import collate
from tandem.trainer.optimizers.adamw import AdamW
from tandem.trainer.optimizers.adamw_host import HostAdamW
from tandem.trainer.step import train_step
from tandem.types import TrainSequence

pytestmark = pytest.mark.gpu
STEPS = 8
COMPARED = ("train/loss", "actor/grad_norm")
SHAPES = ModelShapes("qwen3", 512, 128, 2, 4, 2, 32, 256, 512, tie_word_embeddings=True, qk_norm=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is found")
    return make_datasets(tmp_path_factory.mktemp("data"), "json")


@pytest.fixture(autouse=True)
def tensors_begin_on_the_host(on_the_device: None) -> Iterator[None]:
    with torch.device("cpu"):
        yield


def run(folder: Path, data: Path, *overrides: str, device: str = "cuda") -> list[dict[str, Any]]:
    """The rows of ``folder``/run."""
    recipe = {
        "algorithm": {"name": "pretrain"},
        "model": {
            "create": {
                "architecture": "qwen3", "tokenizer": str(data / "tokenizer"), "hidden_size": 64, "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128, "max_position_embeddings": 128,
                "initializer_range": 0.05,
            }
        },
        "data": {"train": [{"path": str(data / "json")}], "held_out": str(data / "json"), "sequence_length": 128, "global_batch_size": 8},
        "trainer": {"learning_rate": 3.0e-3, "weight_decay": 0.1, "micro_batch_tokens": 512},
        "evaluation": {"every_steps": STEPS, "sequences": 4},
        "checkpoint": {"every_steps": STEPS // 2, "keep": 2},
        "run": {"max_steps": STEPS, "seed": 3, "name": "run", "directory": str(folder)},
        "machine": {"device": device},
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    train(load_config(folder / "recipe.yaml", list(overrides)))
    return rows(folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def apart(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> float:
    """The largest relative difference of a loss or norm."""
    assert len(a) == len(b)
    return max(abs(x[name] - y[name]) / abs(y[name]) for x, y in zip(a, b, strict=True) for name in COMPARED)


@pytest.mark.parametrize(
    "settings", ["", "--model.create.architecture=qwen3_next --model.create.num_experts=4 --model.create.num_hidden_layers=4"], ids=["qwen3", "qwen3_next"]
)
def test_the_curve_is_that_of_the_cpu(tmp_path: Path, data: Path, settings: str) -> None:
    on_gpu, on_cpu = (run(tmp_path / device, data, *settings.split(), device=device) for device in ("cuda", "cpu"))
    assert apart(on_gpu, on_cpu) < 1e-4
    assert all(row["memory/gpu/peak"] > 0 for row in on_gpu)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp8"])
def test_fewer_bits_learn_the_same(tmp_path: Path, data: Path, precision: str) -> None:
    whole, found = run(tmp_path / "fp32", data), run(tmp_path / precision, data, f"--trainer.precision={precision}")
    assert found[-1]["train/loss"] < found[0]["train/loss"] - 0.5
    assert abs(found[-1]["train/loss"] - whole[-1]["train/loss"]) < (0.1 if precision == "fp8" else 0.03)


@pytest.mark.parametrize("offload", ["cpu", "nvme"])
def test_offloaded_moments_change_no_bit(tmp_path: Path, data: Path, offload: str) -> None:
    assert apart(run(tmp_path / offload, data, f"--trainer.offload={offload}"), run(tmp_path / "none", data)) == 0


def test_moments_in_the_host_are_unpinned_with_their_optimizer() -> None:
    model = torch.nn.Linear(3000, 1000, device="cuda")
    optimizer = HostAdamW(model.named_parameters(), TrainerConfig(learning_rate=1e-3))
    moments = list(optimizer._held.values())
    assert all(tensor.is_pinned() for tensor in moments)
    del optimizer
    assert not any(tensor.is_pinned() for tensor in moments)


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit"])
def test_other_optimizers_learn(tmp_path: Path, data: Path, optimizer: str) -> None:
    found = run(tmp_path, data, f"--trainer.optimizer={optimizer}")
    assert found[-1]["train/loss"] < found[0]["train/loss"] - 0.5


@pytest.mark.parametrize(
    "mesh", ["--parallel.data=2", "--parallel.data=2 --parallel.zero=3", "--parallel.tensor=2", "--parallel.context=2", "--parallel.pipeline=2"]
)
def test_two_ranks_over_nccl_have_the_curve_of_one(tmp_path: Path, data: Path, mesh: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("two CUDA devices are needed; this machine has one")
    assert apart(run(tmp_path / "two", data, *mesh.split()), run(tmp_path / "one", data)) < 1e-4


@pytest.mark.parametrize(("begins", "ends"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_a_checkpoint_goes_on_on_the_other_device(tmp_path: Path, data: Path, begins: str, ends: str) -> None:
    whole = run(tmp_path, data, device=begins)
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / f"step-{STEPS}")
    resume(tmp_path / "run", overrides=[f"--machine.device={ends}"])
    found = rows(tmp_path)
    assert apart(found, whole) < 1e-4 and apart(found[STEPS // 2 :], whole[STEPS // 2 :]) > 0, "the second half was taken elsewhere"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_waits_for_the_device_twice(precision: Any) -> None:
    device = torch.device("cuda", 0)
    fast = fast_attention(SHAPES.head_dim) if precision != "fp32" else None
    kernels = select("auto", device=device, deterministic=False, attention=fast or "auto")
    model = Decoder(SHAPES, in_precision(kernels, precision, device), device=device)
    initialise(model, seed=0)
    optimizer = AdamW(model.named_parameters(), TrainerConfig(learning_rate=1e-3))
    batch = [TrainSequence(str(n), tuple(i * n % 500 for i in range(n)), 1, (0.0,) + (1.0,) * (n - 1)) for n in (400, 90, 300)]

    def step() -> None:
        micro_batches = [collate([sequence], model.dtype, device) for sequence in batch]
        train_step(model, optimizer, micro_batches, make_cross_entropy_loss(counts_of(batch), "train"), 1e-3)

    step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchronizing CUDA operation" in str(w.message)]) == 2


@pytest.mark.parametrize("window", [None, 30])
def test_torchs_attention_has_the_outputs_and_gradients_of_ours(window: int | None) -> None:
    device, lengths = torch.device("cuda", 0), [70, 1, 300]
    bounds = torch.tensor([0, 70, 71, 371], dtype=torch.int32, device=device)
    own, fast = select("triton"), select("triton", device=device, deterministic=False, attention="torch")
    given = [torch.randn(sum(lengths), heads, 64, device=device) for heads in (8, 2, 2)]
    found = []
    for kernels, dtype in ((own, torch.float32), (fast, torch.bfloat16)):
        q, k, v = (x.to(dtype, copy=True).requires_grad_() for x in given)
        out = kernels.packed_attention(q, k, v, bounds, max(lengths), 0.125, window)
        out.float().square().sum().backward()
        found.append([x.float() for x in (out, q.grad, k.grad, v.grad) if x is not None])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() < 2e-2 * ours.norm()
