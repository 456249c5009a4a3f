"""Paths of helpers, also of another room."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE / "megatron_on_cpu"):
    sys.path.insert(0, str(folder))
sys.path.append(str(HERE.parent / "weight_transfer"))


@pytest.fixture(scope="session")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of Megatron's environment with the shim of a CPU."""
    import megatron_environment

    return megatron_environment.make(tmp_path_factory.mktemp("sidecars")) / "megatron" / "bin" / "python"
