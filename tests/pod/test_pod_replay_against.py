"""``tandem replay --against``: the first tensor that differs between two versions of the code is named, and none where they compute the same."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from pod_runs import PodRun, finish

import tandem
from tandem.jobs.replay.against import other_environment
from tandem.types import UserError

SOURCE = Path(tandem.__file__).parent
MakeVersion = Callable[..., Path]


@pytest.fixture(scope="module")
def version_of(tmp_path_factory: pytest.TempPathFactory) -> MakeVersion:
    """Makes a virtual environment whose Tandem is this one with one line of one file replaced."""

    def made(file: str = "", line: str = "", by: str = "") -> Path:
        folder = tmp_path_factory.mktemp("version")
        shutil.copytree(SOURCE, folder / "source" / "tandem", ignore=shutil.ignore_patterns("__pycache__"))
        if file:
            path = folder / "source" / "tandem" / file
            text = path.read_text()
            assert text.count(line) == 1, (file, line)
            path.write_text(text.replace(line, by))
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
        (packages,) = (folder / "env").glob("lib/python*/site-packages")
        installed = [entry for entry in sys.path if entry.endswith("site-packages")]
        (packages / "other.pth").write_text("\n".join([str(folder / "source"), *installed]))
        return folder / "env"

    return made


def against(run: PodRun, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return finish(run.begin("replay", str(run.directory), "--step", "5", *arguments))


@pytest.fixture()
def run(undisturbed: PodRun, tmp_path: Path) -> PodRun:
    copied = PodRun(tmp_path)
    shutil.copytree(undisturbed.directory, copied.directory)
    return copied


@pytest.mark.full
def test_the_same_code_in_another_environment_has_the_same_tensors(run: PodRun, version_of: MakeVersion) -> None:
    other = version_of()
    done = against(run, "--inline", "--against", str(other))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"in '{other.parent / 'source' / 'tandem'}'" in done.stdout and "first difference" not in done.stdout
    equal, count = done.stdout.splitlines()[-1].split()[0:3:2]
    # Steps 4 and 5 are taken again, each with the weights before and after, and outputs and gradients of two layers.
    assert equal == count and int(count) > 150


CHANGES = {
    # Samples, batch and the whole forward pass are equal.
    "loss": (
        ("trainer/losses/kl.py", "k3 = torch.expm1(-difference) + difference", "k3 = 2 * (torch.expm1(-difference) + difference)"),
        "train, rank-0: gradient of actor, layer 1, MLP",
    ),
    "advantage": (
        ("rl/algorithms/grpo.py", "group_std(rewards, valid) + epsilon", "group_std(rewards, valid) + 2 * epsilon"), "train, rank-0: batch, advantages",
    ),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("changed", CHANGES)
def test_the_first_tensor_that_a_change_of_the_code_changes_is_named(changed: str, run: PodRun, version_of: MakeVersion) -> None:
    change, wanted = CHANGES[changed]
    done = against(run, "--inline", "--only", "train", "--against", str(version_of(*change)))
    assert done.returncode == 1, done.stdout + done.stderr
    # The checkpoint of step 4 is the newest before step 5.
    assert f"first difference: step 4, {wanted}" in done.stdout


def test_what_is_no_environment_and_a_python_without_tandem_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    refused = (("nowhere", "neither a program 'python' nor the folder"), ("empty", "neither a program 'python'"), ("bare", "whose Python has no Tandem"))
    for name, why in refused:
        with pytest.raises(UserError, match=why) as caught:
            other_environment(tmp_path / name)
        assert f"--against is '{tmp_path / name}'" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.full
def test_a_tandem_that_cannot_record_and_a_replay_that_fails_there_are_named(run: PodRun, version_of: MakeVersion) -> None:
    old = version_of("cli/replay.py", '"--record", metavar', '"--kept", metavar')
    done = against(run, "--inline", "--only", "rewards", "--against", str(old))
    assert done.returncode != 0 and "has no 'replay --record'" in done.stderr and len(done.stderr.splitlines()) == 1
    broken = version_of("jobs/replay/replay_rl.py", 'say(f"loaded the checkpoint of step {at}")', 'raise RunError("it is broken")')
    done = against(run, "--inline", "--only", "rewards", "--against", str(broken))
    assert done.returncode == 1 and "failed: " in done.stderr and "it is broken" in done.stderr and len(done.stderr.splitlines()) == 1
