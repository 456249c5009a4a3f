"""The order of the house: who may import whom, and what starts without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_no_package_imports_from_one_above_it() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([str(linter), "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "tandem", "tandem.config.recipe", "tandem.types", "tandem.types.wire", "tandem.types.wire_records", "tandem.layout.shapes", "tandem.layout.sharding",
        "tandem.estimate.memory", "tandem.cli.main", "tandem.runtime.journal", "tandem.runtime.rpc", "tandem.pod.shim",
        "tandem.rl.rewards.worker", "tandem.jobs.start", "tandem.report.run_report", "tandem.model.family", "tandem.model.new_model",
    ],
)
def test_what_must_start_without_torch_does(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_offline_rooms_need_only_torch_safetensors_tokenizers_and_yaml() -> None:
    code = (
        "import sys\n"
        "for name in ('numpy', 'xxhash', 'rich', 'plotly', 'jinja2', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import tandem.engine.llm, tandem.model.huggingface, tandem.kernels, tandem.trainer.step, tandem.trainer.build\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
