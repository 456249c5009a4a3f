"""Every Triton program compiles to machine code of a Hopper GPU, on a machine without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="the package triton is not installed")


DELTA_RULE = {"delta_tokens", "delta_chunks", "delta_states", "delta_outputs", "delta_kept", "delta_outputs_backward", "delta_states_backward",
              "delta_reads_backward", "delta_pairs_backward"}  # fmt: skip


def compiled(what: str, cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(cache)}
    script = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run([sys.executable, str(script), what], env=environment, capture_output=True, text=True, timeout=570)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_program_compiles_for_hopper_and_all_tiles_of_16_bits_use_one_kind_of_matrix_instruction(dtype: str, tmp_path: Path) -> None:
    programs = compiled(dtype, tmp_path)
    names = {"linear", "grouped_linear", "rms_norm", "gate_mul", "soft_cap", "sample", "chunk_sums", "logprobs", "rope", "attention", "merge_splits",
             "logprobs_backward", "attention_queries", "attention_keys", "rms_norm_backward", "gate_mul_backward", "rope_backward",
             "latent_attention", "latent_queries", "latent_keys"}  # fmt: skip
    assert {program["program"] for program in programs} == names
    assert all(program["cubin"] > 0 for program in programs)
    # The shared memory of one multiprocessor, which rows of latent attention at the published sizes would exceed if they were one tile.
    assert all(program["shared"] <= 227 * 1024 for program in programs)
    if dtype == "bfloat16":
        products = [program for program in programs if program["program"] in ("linear", "grouped_linear", "attention", "latent_attention")]
        assert len(products) == 24 + 6
        assert all(program["wgmma"] > 0 and program["mma"] == 0 for program in products)


@pytest.mark.full
def test_the_gated_delta_rule_compiles_for_hopper_at_the_sizes_of_qwen3_next_and_packed_sequences_and_states_are_one_program(tmp_path: Path) -> None:
    programs = compiled("gated_delta", tmp_path)
    assert {program["program"] for program in programs} == DELTA_RULE
    assert all(program["cubin"] > 0 and program["shared"] <= 227 * 1024 for program in programs)
    assert all(program["wgmma"] > 0 and program["mma"] == 0 for program in programs if program["program"] != "delta_tokens")
    # The order of sums belongs to what is compiled.
    tokens = [program["hash"] for program in programs if program["program"] == "delta_tokens"]
    assert len(tokens) == 2 and len(set(tokens)) == 1
