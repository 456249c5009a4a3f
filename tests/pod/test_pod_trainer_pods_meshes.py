"""Meshes over two trainer pods: the bits of the same mesh in one."""

from pathlib import Path

import pytest
from trainer_pod_runs import assert_same_bits

MESHES = {
    "four ranks, zero 1": "--parallel.data=4 --parallel.zero=1",
    "zero 2": "--parallel.data=2 --parallel.zero=2",
    "data x tensor": "--parallel.data=2 --parallel.tensor=2 --model.create.num_key_value_heads=2",
    "data x pipeline": "--parallel.data=2 --parallel.pipeline=2 --model.create.tie_word_embeddings=false",
    "context": "--parallel.data=2 --parallel.context=2",
    "experts": "--parallel.data=4 --parallel.expert=2 --model.create.architecture=qwen3_moe --model.create.num_experts=4",
}


@pytest.mark.full
@pytest.mark.parametrize("settings", [pytest.param(settings, id=name) for name, settings in MESHES.items()])
def test_two_trainer_pods_on_a_mesh_have_the_bits_of_the_mesh_in_one(settings: str, tmp_path: Path) -> None:
    assert_same_bits(settings, tmp_path)
