"""Every Triton program compiles to machine code of a Hopper GPU, on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_program_compiles_for_hopper_and_all_tiles_of_16_bits_use_one_kind_of_matrix_instruction(dtype: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    script = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run([sys.executable, str(script), dtype], env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    names = {"linear", "grouped_linear", "rms_norm", "gate_mul", "soft_cap", "sample", "chunk_sums", "logprobs", "rope", "attention", "merge_splits",
             "logprobs_backward", "attention_queries", "attention_keys", "rms_norm_backward", "gate_mul_backward", "rope_backward",
             "latent_attention", "latent_queries", "latent_keys"}  # fmt: skip
    assert {program["program"] for program in found} == names
    assert all(program["cubin"] > 0 for program in found)
    # The shared memory of one multiprocessor, which rows of latent attention at the published sizes would exceed if they were one tile.
    assert all(program["shared"] <= 227 * 1024 for program in found)
    if dtype == "bfloat16":
        products = [program for program in found if program["program"] in ("linear", "grouped_linear", "attention", "latent_attention")]
        assert len(products) == 24 + 6
        assert all(program["wgmma"] > 0 and program["mma"] == 0 for program in products)
