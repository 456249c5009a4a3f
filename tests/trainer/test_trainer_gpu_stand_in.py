"""A training step on the device "cuda" without one: FakeTensorMode refuses tensors of two devices, and a stand-in lets autograd run there."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
QUICK = ("bf16", "offload", "pipeline 2 x tensor 2 x data 2", "pod")
REST = (
    "fp32", "flash", "biases", "experts", "fp16", "fp8", "recompute", "muon", "adamw8bit", "data 2", "zero 1", "zero 2", "zero 3",
    "zero 2, muon", "zero 3, adamw8bit", "tensor 2", "tensor 2, muon",
    "tensor 2, deterministic", "context 2", "experts on stages", "pipeline 2, first", "pipeline 2, last", "pod, bf16",
    "pod, bfloat16 weights", "pod, zero 3", "pod, tensor 2",
)  # fmt: skip


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.version.cuda is not None:
        pytest.skip("the stand-in takes the place of CUDA, and this torch has it")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ is found, which the stand-in for CUDA is compiled with")
    built, root = tmp_path_factory.mktemp("stand-in") / "cuda.so", Path(torch.__file__).parent
    command = [compiler, "-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{root / 'include'}", str(HERE / "cuda_stand_in.cpp"), "-o", str(built)]
    subprocess.run([*command, f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"], check=True)
    return built


def steps(stand_in: Path, cases: tuple[str, ...]) -> dict[str, dict[str, object]]:
    environment = {**os.environ, "LD_PRELOAD": str(stand_in), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    command = [sys.executable, str(HERE / "steps_on_a_stand_in.py"), *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    found = {line["case"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert list(found) == list(cases), done.stderr
    assert not [line for line in found.values() if "error" in line], done.stderr
    return found


@pytest.mark.full
def test_a_step_keeps_to_its_gpu_and_waits_for_it_twice(stand_in: Path) -> None:
    found = steps(stand_in, QUICK)
    assert all(line["weights"] == ["cuda"] for line in found.values())
    assert [found[name]["moments"] for name in ("bf16", "offload")] == [["cuda"], ["cpu"]]
    assert {name: line["waits"] for name, line in found.items()} == dict.fromkeys(QUICK, 2)


@pytest.mark.full
def test_every_other_kind_of_step_keeps_to_its_gpu(stand_in: Path) -> None:
    found = steps(stand_in, REST)
    assert all(line["weights"] == ["cuda"] for line in found.values())
    assert {name for name, line in found.items() if line["moments"] != ["cuda"]} == {"zero 2"}, "its moments are offloaded"


@pytest.mark.full
def test_a_tensor_left_on_the_cpu_is_found(stand_in: Path, tmp_path: Path) -> None:
    text = (HERE / "steps_on_a_stand_in.py").read_text(encoding="utf-8")
    wrong = text.replace("    counted = 0\n", "    model.rotary_tables = tuple(table.cpu() for table in model.rotary_tables)\n    counted = 0\n")
    (tmp_path / "wrong.py").write_text(wrong, encoding="utf-8")
    environment = {**os.environ, "LD_PRELOAD": str(stand_in), "PYTHONPATH": str(HERE.parents[1])}
    done = subprocess.run([sys.executable, str(tmp_path / "wrong.py"), "fp32"], env=environment, capture_output=True, text=True, check=False)
    assert text != wrong and "cpu" in json.loads(done.stdout)["error"]
