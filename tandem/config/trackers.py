"""Section ``trackers``: where the metrics, the configuration and samples of a run are shown while it trains."""

import difflib
from dataclasses import dataclass, fields

from tandem.config.addresses import check_no_secret
from tandem.config.unread import refuse_unread
from tandem.types.errors import UserError

KNOWN = ("tensorboard", "wandb", "mlflow", "trackio")


@dataclass(frozen=True, slots=True)
class TrackersConfig:
    """Experiment trackers, which receive the rows of `metrics.jsonl` while the run trains. A resume may change all keys."""

    names: tuple[str, ...] = ()
    """`tensorboard`, `wandb`, `mlflow`, `trackio`, and trackers of your own: `module:Class` or `path/to/file.py:Class` (`docs/trackers.md`). Empty: none."""
    tensorboard_folder: str = ""
    """Folder of TensorBoard's event files. Empty: `tensorboard` in the run's folder."""
    project: str = "tandem"
    """Project of Weights & Biases and trackio, experiment of MLflow."""
    wandb_offline: bool = False
    """Whether Weights & Biases is written to files that `wandb sync` sends. Without a login it is."""
    mlflow_uri: str = ""
    """MLflow tracking address (`http://host:5000`, `sqlite:///mlflow.db`). Empty: `mlflow.db` beside the run's folder."""
    samples: int = 4
    """Number of completions of a step to show with prompt and rewards. 0: none."""
    samples_every_steps: int = 10
    """Optimizer steps between two steps whose samples are shown."""
    finish_timeout_s: float = 30.0
    """Seconds to wait at the end of the run for a tracker that lacks rows. What it lacks then is said."""

    def check(self) -> None:
        """Raises ``UserError`` for an unknown tracker, one that is named twice, and values out of range."""
        for name in self.names:
            if name in KNOWN or ":" in name:
                continue
            near = difflib.get_close_matches(name, KNOWN, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(KNOWN)}; for another one write a class and name it as module:Class"
            raise UserError(f"'trackers.names' has '{name}', which is no tracker; {hint}")
        if len(set(self.names)) < len(self.names):
            raise UserError(f"'trackers.names' is {list(self.names)}, which names a tracker twice; remove one of the two")
        if self.samples < 0:
            raise UserError(f"'trackers.samples' is {self.samples}; it must be 0 (none) or more")
        if self.samples_every_steps < 1:
            raise UserError(f"'trackers.samples_every_steps' is {self.samples_every_steps}; it must be at least 1")
        if not 0 <= self.finish_timeout_s < float("inf"):
            raise UserError(f"'trackers.finish_timeout_s' is {self.finish_timeout_s}; it must be 0 or more, and finite")
        if not self.project.strip() or set(self.project) & set("/\\#?%:\0"):
            raise UserError(f"'trackers.project' is '{self.project}'; it must be a name without / \\ # ? % :")
        if not set(self.names) & {"wandb", "mlflow", "trackio"}:
            refuse_unread("trackers", self, "no tracker has projects", "project", fix="add wandb, mlflow or trackio to trackers.names")
        check_no_secret("'trackers.mlflow_uri'", self.mlflow_uri)
        for name in ("wandb", "mlflow"):
            if name not in self.names:
                keys = [field.name for field in fields(self) if field.name.startswith(name)]
                refuse_unread("trackers", self, f"trackers.names has no '{name}'", *keys, fix="add it to trackers.names")
        if self.tensorboard_folder and "tensorboard" not in self.names:
            refuse_unread("trackers", self, "trackers.names has no 'tensorboard'", "tensorboard_folder", fix="add it to trackers.names")
