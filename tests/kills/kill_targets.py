"""What is killed: a pod, a run on two data-parallel ranks, and a served model."""

import time
from pathlib import Path

import yaml
from package_data import make_datasets
from pod_runs import PodRun, recipe_with
from pretrain_recipe import recipe_sections
from random_kills import PROMPT, Job
from server_process import server

from tandem.config.model import ModelConfig
from tandem.config.recipe import load_config
from tandem.model.create_model import create_model


def pod_job(folder: Path, *settings: str) -> Job:
    return Job.of(PodRun(folder / "quiet", recipe=recipe_with(folder)), *settings)


def ranks_job(folder: Path, *settings: str) -> Job:
    """Twelve steps on two ranks, with a checkpoint every fifth step."""
    (folder / "data").mkdir()
    data = make_datasets(folder / "data", "json")
    sections = recipe_sections(
        data, data={"train": [{"path": str(data / "json")}], "held_out": str(data / "json"), "global_batch_size": 7},
        trainer={"warmup_steps": 5}, evaluation={"every_steps": 12, "sequences": 5}, checkpoint={"every_steps": 5, "keep": 2},
        run={"max_steps": 12}, parallel={"data": 2},
    )  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return Job.of(PodRun(folder / "quiet", recipe=path), *settings)


def server_model(folder: Path) -> tuple[Path, str, float]:
    """Returns a new model, the text that it completes ``PROMPT`` with, and twice the seconds until a server of it is ready."""
    config = load_config(recipe_with(folder)).model
    assert isinstance(config, ModelConfig) and config.create is not None
    create_model(config.create, 0, folder / "model")
    began = time.monotonic()
    with server(folder / "model", folder) as running:
        seconds = time.monotonic() - began
        fields = {name: value for name, value in PROMPT.items() if name != "prompt"}
        return folder / "model", running.complete(PROMPT["prompt"], **fields)["choices"][0]["text"], 2 * seconds
