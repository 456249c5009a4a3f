"""The import contract between packages, and what starts without torch."""

import os
import re
import subprocess
import sys
import tomllib
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
        "tandem.estimate.memory", "tandem.cli.main", "tandem.runtime.records.journal", "tandem.runtime.rpc.rpc_client", "tandem.pod.shim",
        "tandem.rl.rewards.worker", "tandem.jobs.start", "tandem.jobs.start_rl", "tandem.dashboard.report", "tandem.model.family", "tandem.model.new_model",
        "tandem.jobs.verify.verify_run", "tandem.gateway.server", "tandem.jobs.exposed.run_metrics", "tandem.observability.programs",
        "tandem.dashboard.server", "tandem.dashboard.top", "tandem.trackers.follow", "tandem.estimate.serving.throughput", "tandem.planner.serving.simulator",
        "tandem.cli.plan_serving",
    ],
)
def test_what_must_start_without_torch_does(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_file_that_the_table_of_packages_names_exists() -> None:
    rows = [line for line in (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert len(rows) > 15
    for row in rows:
        package, *names = re.findall(r"`([\w/]+)`", row)
        there = {path.stem for path in (ROOT / "tandem" / package).rglob("*")}
        assert {name.strip("/") for name in names if name[0].islower()} <= there, package


def test_every_file_that_is_not_python_is_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]["tandem"]
    packaged = {path for pattern in patterns for path in (ROOT / "tandem").glob(pattern) if path.is_file()}
    others = {path for path in (ROOT / "tandem").rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    linked = {ROOT / "tandem" / path.relative_to(ROOT) for name in ("recipes", "examples") for path in (ROOT / name).rglob("*") if path.is_file()}
    assert others | linked == packaged and len(others) > 20 and len(linked) > 8


def test_no_tracked_file_names_the_address_of_a_package_index() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("this is not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    address = re.compile(rb"https?://[^\s\"']*(pypi|pythonhosted|pytorch\.org/whl|anaconda|/simple\b)", re.I)
    assert len(names) > 700 and [name for name in names if address.search((ROOT / name).read_bytes())] == []


def test_help_of_the_command_loads_neither_torch_nor_the_display_nor_the_jobs() -> None:
    """Every subcommand adds its arguments to it."""
    code = "import sys; from tandem.cli.main import main; main(['--help'])"
    checked = f"try:\n    exec({code!r})\nexcept SystemExit:\n    print({{'torch', 'rich', 'tandem.jobs', 'tandem.data'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", f"import sys\n{checked}"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()", done.stdout + done.stderr


def test_engine_and_trainer_import_and_run_with_torch_safetensors_tokenizers_and_yaml_alone(tmp_path: Path) -> None:
    hidden = ROOT / "tests" / "house" / "only_required"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(hidden), str(ROOT)))}

    def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([sys.executable, "-W", "ignore", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)

    for name in ("numpy", "filelock", "psutil", "xxhash", "rich", "starlette", "transformers"):
        assert f"No module named '{name}'" in python("-c", f"import {name}").stderr, "the packages are hidden at all"
    done = python(str(hidden / "generate_and_train.py"), str(tmp_path))
    assert done.returncode == 0, done.stderr
    counted, _, compiler = done.stdout.rstrip().rpartition(" ")
    assert counted == "True True True [2, 3, 4]", "it learned to count, from equal sequences too, and two ranks count as one does"
    assert compiler == "False", "importing torch's compiler would add a second to the start of every rank"
