"""The tracker of a name, and what keeps it from working, found before a run begins."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import cast

from tandem.config.trackers import TrackersConfig
from tandem.runtime.import_path import load_function
from tandem.trackers.tracker import Tracker
from tandem.types import UserError

PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}
"""The package that each tracker needs; the extra of Tandem has the tracker's name."""


def open_tracker(name: str, config: TrackersConfig, directory: Path, say: Callable[[str], None]) -> Tracker:
    """Returns the tracker ``name`` of the run in ``directory``, which tells ``say`` what the run is to say. Raises ``UserError`` where it
    cannot be loaded."""
    if name == "tensorboard":
        from tandem.trackers.tensorboard import TensorBoard

        return TensorBoard(tensorboard_folder(config, directory))
    if name == "wandb":
        from tandem.trackers.wandb import WeightsAndBiases

        return WeightsAndBiases(config.project, config.wandb_offline, say)
    if name == "mlflow":
        from tandem.trackers.mlflow import Mlflow

        return Mlflow(config.project, config.mlflow_uri)
    if name == "trackio":
        from tandem.trackers.trackio import Trackio

        return Trackio(config.project)
    return cast(Tracker, load_function(name, "tracker")[0]())


def tensorboard_folder(config: TrackersConfig, directory: Path) -> Path:
    """Returns the folder of the event files of the run in ``directory``."""
    return Path(config.tensorboard_folder) / directory.name if config.tensorboard_folder else directory / "tensorboard"


def check_trackers(config: TrackersConfig) -> None:
    """Raises ``UserError`` where a tracker's package is not installed, its folder cannot be written or its class cannot be loaded."""
    for name in config.names:
        if ":" in name:
            load_function(name, "tracker")
        elif importlib.util.find_spec(PACKAGES[name]) is None:
            raise UserError(f"'trackers.names' has '{name}', which is not installed; pip install 'tandem-rl[{name}]'")
    if config.tensorboard_folder:
        try:
            Path(config.tensorboard_folder).mkdir(parents=True, exist_ok=True)
            probe = Path(config.tensorboard_folder) / ".tandem-can-write"
            probe.touch()
            probe.unlink()
        except OSError as error:
            given = f"'trackers.tensorboard_folder' is '{config.tensorboard_folder}'"
            raise UserError(f"{given}, which cannot be written: {error.strerror}; name another") from None
