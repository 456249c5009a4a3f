"""A small run on data that a launcher places, and the one on this machine that it is compared with."""

from pathlib import Path
from typing import Any

import yaml
from data_runs import rows
from launched_runs import LaunchedRuns
from package_data import make_datasets
from pretrain_recipe import recipe_sections
from sharded import is_same

from tandem.dashboard.hardware import newest_by_node
from tandem.dashboard.open_run import OpenRun
from tandem.metrics_database.answers import Answers
from tandem.metrics_database.store import FILE, MetricsReader

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


WATCHED = ("--metrics={port: 0, interval_s: 1}", "--health.every_s=0.5")
"""With which what is watched of the nodes stays beside the journal."""


def assert_watched(runs: LaunchedRuns, name: str, node: str) -> None:
    """Checks that the run ``name`` was told of the further ``node`` while it trained: its heartbeats, the times of its rank and the memory of its processes."""
    run = OpenRun(name, runs.directory(name))
    assert node in newest_by_node(run)
    reader = MetricsReader(run.directory / FILE)
    span = reader.span_ms()
    assert span is not None
    for series in (f'tandem_rank_own_seconds_total{{node="{node}",rank="1"}}', f'tandem_process_resident_memory_bytes{{node="{node}",rank="1"}}'):
        assert Answers(reader.read).over(f"last_over_time({series}[1h])", [span[1]]) != {}, series
