"""What ``make dist`` builds, installed in environments of its own: no test here sees this clone."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = """\
import asyncio
from pathlib import Path

import tandem
from tandem import LLM, AsyncLLM, EngineArgs, SamplingParams, load_config, train

params = SamplingParams(temperature=0, max_tokens=4)
with LLM("model", max_num_seqs=4, speculative_config={"method": "ngram"}) as llm:
    reveal_type(llm.generate(["a"], params)[0].outputs[0].text)
reveal_type(load_config("sort"))
result = train({"task": {"name": "sort"}}, callbacks=[tandem.Callback()])
reveal_type(result.model)
reveal_type(result.metrics["kl"])


async def answer() -> None:
    engine = AsyncLLM.from_engine_args(EngineArgs(model="model"))
    async for output in engine.generate("a", params, request_id="0"):
        reveal_type(output.finished)


asyncio.run(answer())
"""
REVEALED = ["str", "Recipe | tandem.config.pretrain.PretrainRecipe", "Path", "list[float | int | str | bool | None]", "bool"]
MISTAKES = {
    "SamplingParams(temperatur=1)": 'Unexpected keyword argument "temperatur"',
    "LLM('model', max_num_seq=3)": 'Unexpected keyword argument "max_num_seq"',
    "LLM('model', tensor_parallel_size='2')": 'has incompatible type "str"',
    "EngineArgs(modle='x')": 'Unexpected keyword argument "modle"',
    "train(3)": "incompatible type",
    "tandem.LLMs": "has no attribute",
    "LLM('model').embeddings('a')": "has no attribute",
}


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Returns the standard output of ``command``, which must succeed, without this process's Python path and activated environment."""
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(word) for word in command], cwd=cwd, env=plain | environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in a folder of the name ``tandem``, with ``dist/``."""
    copy = tmp_path_factory.mktemp("holder") / "tandem"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(copy)], check=True)
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    (copy / ".venv").symlink_to(ROOT / ".venv")
    run("make", "-o", ".venv/.run", "dist", cwd=copy)
    return copy


@pytest.fixture(scope="module")
def installed(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with the wheel and what it requires, and nothing else."""
    folder = tmp_path_factory.mktemp("wheel") / "env"
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    (wheel,) = (clone / "dist").glob("*.whl")
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=folder.parent)
    return folder / "bin"


@pytest.fixture(scope="module")
def editable(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of an environment with an editable install of ``clone``, without what it requires."""
    folder = tmp_path_factory.mktemp("editable") / "env"
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "-e", clone, cwd=folder.parent)
    return folder / "bin"


@pytest.mark.full
def test_make_dist_builds_a_wheel_a_source_distribution_and_a_bill_of_materials(clone: Path) -> None:
    (wheel,), (source,) = (clone / "dist").glob("*.whl"), (clone / "dist").glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
        metadata = opened.read(next(name for name in names if name.endswith(".dist-info/METADATA"))).decode()
    assert {"tandem/py.typed", "tandem/cli/main.py", "tandem/recipes/sort.yaml"} <= names and any(name.endswith(".cpp") for name in names)
    assert "License-Expression: Apache-2.0" in metadata and any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(source) as opened_source:
        sources = {name.partition("/")[2] for name in opened_source.getnames()}
    assert sources >= {name for name in names if name.startswith("tandem/")} | {"pyproject.toml", "LICENSE"}
    bill = json.loads((clone / "dist" / "sbom.cdx.json").read_text())
    components = {component["name"].lower(): component["version"] for component in bill["components"]}
    assert bill["bomFormat"] == "CycloneDX" and {"torch", "safetensors", "tokenizers", "xxhash", "rich"} <= components.keys()


@pytest.mark.full
def test_the_wheel_trains_in_an_empty_environment_and_what_it_prints_can_be_pasted(installed: Path, clone: Path, tmp_path: Path) -> None:
    home, here = tmp_path / "home", tmp_path / "my runs"
    home.mkdir()
    here.mkdir()
    (packages,) = (installed.parent / "lib").glob("python3*/site-packages")
    before = {path: path.stat().st_mtime_ns for path in packages.rglob("*") if path.is_file()}
    subprocess.run(["chmod", "-R", "a-w", str(packages / "tandem")], check=True)
    tandem = installed / "tandem"
    assert run(tandem, "--version", cwd=here) == "tandem 0.1.0\n"
    assert "sort" in run(tandem, "recipes", cwd=here)
    settings = (
        "--model.create.hidden_size=16", "--model.create.num_hidden_layers=1", "--model.create.num_attention_heads=2",
        "--model.create.num_key_value_heads=1", "--model.create.head_dim=8", "--model.create.intermediate_size=32", "--sft.steps=2",
        "--sft.warmup_steps=1", "--sft.batch_size=2", "--sft.max_accuracy=1.0", "--rollout.prompts_per_step=2", "--algorithm.group_size=2",
        "--evaluation.prompts=4", "--evaluation.final_prompts=4", "--run.max_steps=1", "--machine.threads=1", "--run.name=mine",
    )  # fmt: skip
    said = run(tandem, "train", "sort", *settings, cwd=here, HOME=str(home))
    commands = [line.strip() for line in said.partition("try the model:")[2].splitlines() if line.startswith("  ")]
    assert [re.search(r"tandem'? (\w+)", command)[1] for command in commands] == ["generate", "evaluate"]  # type: ignore[index]
    for command in commands:
        run("bash", "-c", command, cwd=here, HOME=str(home))
    assert list((home / ".cache" / "tandem" / "kernels").glob("kernels-*.so"))
    assert {path: path.stat().st_mtime_ns for path in packages.rglob("*") if path.is_file()} == before
    # From a folder that holds a clone of the name of the package.
    where = run(installed / "python", "-c", "import sys, tandem; sys.stderr = sys.stdout; from tandem import LLM; print(tandem.__file__)", cwd=clone.parent)
    assert where == f"{packages / 'tandem' / '__init__.py'}\n", "no warning of a package that is not required"


@pytest.mark.full
def test_an_editable_install_is_found_from_a_folder_that_holds_a_clone(editable: Path, clone: Path) -> None:
    where = run(editable / "python", "-c", "import tandem; from tandem import EngineArgs; print(tandem.__file__)", cwd=clone.parent)
    assert where.strip() == str(clone / "tandem" / "__init__.py")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["installed", "editable"])
def test_a_type_checker_sees_the_real_types(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python = request.getfixturevalue(kind) / "python"
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "wrong.py").write_text("import tandem\nfrom tandem import LLM, EngineArgs, SamplingParams, train\n" + "\n".join(MISTAKES) + "\n")
    plain = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    command = [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--python-executable", str(python), "user.py", "wrong.py"]
    done = subprocess.run(command, cwd=tmp_path, env=plain, capture_output=True, text=True, timeout=900)
    said = done.stdout.splitlines()
    assert all(line.startswith(("user.py:", "wrong.py:", "Found ")) for line in said), done.stdout + done.stderr
    assert [line for line in said if line.startswith("user.py") and "error" in line] == []
    revealed = [line.partition("Revealed type is ")[2].strip('"') for line in said if "Revealed type" in line]
    assert len(revealed) == len(REVEALED) and all(shown.endswith(wanted) for shown, wanted in zip(revealed, REVEALED, strict=True)), revealed
    for number, (line, says) in enumerate(MISTAKES.items(), start=3):
        assert any(each.startswith(f"wrong.py:{number}: error") and says in each for each in said), (line, done.stdout)
