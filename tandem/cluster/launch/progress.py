"""How far a run is, from its folder alone, on any launcher. Reads only: a run that works is not disturbed."""

from dataclasses import dataclass
from pathlib import Path

from tandem.config.recipe import AnyRecipe
from tandem.jobs.finished import finished_result
from tandem.jobs.run_files import SFT_FOLDER
from tandem.jobs.verify.verify_records import steps_on_disk
from tandem.runtime.records.metrics import read_rows


@dataclass(frozen=True, slots=True)
class Progress:
    """``steps``: optimizer steps taken. ``score``: of the newest one, as ``reward 0.475``. ``checkpoint``: the step of the newest one, ``None`` without."""

    steps: int
    max_steps: int
    score: str
    checkpoint: int | None
    is_finished: bool
    is_in_sft: bool


def read_progress(recipe: AnyRecipe, directory: Path) -> Progress:
    """Returns the progress of the run of ``recipe`` in ``directory``."""
    rows, score = read_rows(directory / "metrics.jsonl"), ""
    if rows:
        name, key = ("loss", "train/loss") if "train/loss" in rows[-1] else ("reward", "reward/mean")
        score = f"{name} {float(rows[-1][key]):.3f}" if key in rows[-1] else ""
    saved = steps_on_disk(directory)
    in_sft = not rows and (directory / SFT_FOLDER).is_dir() and not (directory / SFT_FOLDER / "model").is_dir()
    return Progress(len(rows), recipe.run.max_steps, score, saved[-1] if saved else None, finished_result(recipe, directory) is not None, in_sft)
