"""``tandem --version``, ``tandem recipes`` and ``tandem completion``: what a user of the wheel finds without a clone."""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from helpers_cli import ROOT

import tandem
from tandem.cli.completion import words_of_commands
from tandem.cli.main import COMMANDS
from tandem.config.bundled import bundled_recipes


def test_the_version_is_that_of_the_package(command) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert command("--version").out == f"tandem {version}\n" and tandem.__version__ == version


@pytest.mark.usefixtures("unmeasured_speed")
def test_recipes_are_listed_printed_trained_by_name_and_copied(command, tmp_path: Path) -> None:
    names = [path.stem for path in sorted((ROOT / "recipes").glob("*.yaml"))]
    listed = command("recipes").out.splitlines()
    assert [line.split()[0] for line in listed] == names == list(bundled_recipes()) and all(len(line.split()) > 3 for line in listed)
    assert command("recipes", "sort").out == (ROOT / "recipes" / "sort.yaml").read_text(encoding="utf-8")
    assert "did you mean 'sort'" in command("recipes", "sorts").refusal()
    assert "recipe sort is valid" in command("train", "sort", "--dry-run").out
    # A folder of the user with the name of a recipe, and a path that is only in a clone.
    refused = command("train", tmp_path / "recipes" / "sort.yaml").refusal()
    assert refused.endswith("sort.yaml' does not exist; did you mean 'sort', which comes with Tandem?")
    assert "name a YAML file, or one that comes with Tandem: arithmetic" in command("train", "nothing.yaml").refusal()
    copied = command("recipes", "--copy", tmp_path).out.split()
    assert copied == [str(tmp_path / "recipes"), str(tmp_path / "examples")]
    for folder in copied:
        name = Path(folder).name
        assert {path.name for path in Path(folder).iterdir()} == {path.name for path in (ROOT / name).iterdir()} - {"__pycache__"}
    assert "exists and nothing is overwritten" in command("recipes", "--copy", tmp_path).refusal()


def test_a_file_of_the_name_of_a_recipe_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sort").write_text("run: {max_stepz: 3}\n")
    with pytest.raises(tandem.UserError, match="max_stepz"):
        tandem.load_config("sort")
    (tmp_path / "sort").unlink()
    (tmp_path / "sort").mkdir()
    assert tandem.load_config("sort").run.max_steps == 200


def test_words_of_a_shell_are_the_options_of_the_parsers() -> None:
    words = words_of_commands()
    assert list(words) == list(COMMANDS)
    assert {"sort", "--dry-run", "--run.max_steps=", "--data.sequence_length=", "--rollout.engine.max_num_seqs="} <= set(words["train"])
    assert "--fault" not in words["train"] and "--run.elastic=" in words["resume"] and "--max-num-seqs" in words["serve"]


def completions(shell: str, script: Path, line: str) -> set[str]:
    """Returns what ``shell`` offers at the end of ``line``."""
    if shell == "bash":
        *given, last = line.split(" ")
        words = " ".join(f"'{word}'" for word in (*given, last))
        program = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(given)}; _tandem 2>/dev/null; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        command = ["bash", "-c", program]
    else:
        command = ["fish", "--no-config", "-c", f"source {script}; complete -C '{line}'"]
    done = subprocess.run(command, capture_output=True, text=True)
    return {found.split("\t")[0] for found in done.stdout.splitlines()}


@pytest.mark.parametrize("shell", ["bash", "fish"])
def test_a_shell_completes_commands_recipes_options_and_keys(command, tmp_path: Path, shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "completion"
    script.write_text(command("completion", shell).out)
    assert completions(shell, script, "tandem re") == {"recipes", "replay", "report", "resume"}
    assert {"sort", "sort_int8"} <= completions(shell, script, "tandem train so")
    assert completions(shell, script, "tandem train sort --run.max") == {"--run.max_steps=", "--run.max_restarts="}
    assert "--max-num-seqs" in completions(shell, script, "tandem serve m --max-num")
    assert {"bash", "zsh", "fish"} <= completions(shell, script, "tandem completion ")


def test_zsh_reads_its_script(command, tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "completion").write_text(command("completion", "zsh").out)
    program = f"autoload -U compinit; compinit -u -d {tmp_path}/dump; source {tmp_path}/completion; print $_comps[tandem]"
    done = subprocess.run(["zsh", "-f", "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "_tandem", "")
