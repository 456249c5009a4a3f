"""A small run on data that a launcher places, and the one on this machine that it is compared with."""

from pathlib import Path
from typing import Any

import yaml
from data_runs import rows
from launched_runs import LaunchedRuns
from package_data import make_datasets
from pretrain_recipe import recipe_sections
from sharded import is_same

MESH = ("--parallel.data=2",)


def write_recipe(runs: LaunchedRuns, steps: int) -> Path:
    """Writes the recipe, with its data, to the folder of ``runs``, and returns its path."""
    made = runs.folder / "data"
    made.mkdir()
    make_datasets(made, "json")
    sections: dict[str, Any] = recipe_sections(
        made, data={"train": [{"path": str(made / "json")}], "global_batch_size": 4}, run={"max_steps": steps}, checkpoint={"every_steps": 5},
        trainer={"micro_batch_tokens": 100},
    )  # fmt: skip
    path = runs.folder / "text.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def ends(runs: LaunchedRuns, name: str) -> None:
    """Waits until the run ``name`` has finished."""
    status = runs.wait_for_state(name, "finished", "failed", "stopped")
    assert status["state"] == "finished", (status, runs.output(name))


def assert_equal_to_local(runs: LaunchedRuns, name: str, recipe: str | Path, *settings: str) -> None:
    """Compares the finished run ``name`` with the same ranks on this machine and ``settings``, bit for bit."""
    runs.tandem("train", recipe, "--run.name=local", *MESH, *settings)
    assert runs.model(name) == runs.model("local") and rows(runs.directory(name)) == rows(runs.directory("local"))
    newest = max((runs.directory("local") / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2])).name
    assert is_same(*(runs.directory(each) / "checkpoints" / newest for each in (name, "local")))
