"""Weights & Biases, by the package ``wandb``: online with a login, otherwise in files that ``wandb sync`` sends.

The service cannot remove points, and an offline run cannot be continued in its file. So each life of an offline run writes all rows of the run
again, in one folder; online, the service says which step is next. A run that has never reached the service is offline until its next life.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import wandb

from tandem.trackers.service_run import forget_service_run, service_run
from tandem.trackers.tracker import RunFacts, SampleRow, Status, Value
from tandem.types.one_line import describe

SERVICE = "wandb"
INIT_S = 30.0
"""In which the service must answer the beginning of a run."""
_QUIET = {"silent": True, "console": "off", "disable_git": True, "disable_code": True, "x_disable_stats": True}
"""Beside the metrics of the run nothing is collected."""


class WeightsAndBiases:
    """The W&B run of a run, in ``project``. ``offline``: without the service. ``say``: told once that there is no login."""

    def __init__(self, project: str, offline: bool, say: Callable[[str], None]) -> None:
        self._project, self._offline, self._say = project, offline, say
        self._run: Any = None
        self._next, self._samples = 0, dict[int, Any]()

    def begin(self, facts: RunFacts, first_step: int) -> int:
        self.finish("stopped")
        if not self._offline and not _has_login():
            self._offline = True
            self._say("has no login (wandb login, or WANDB_API_KEY), so it writes files; send them with 'wandb sync'")
        # Files that wait to be sent: W&B's place for them is below the home folder.
        os.environ.setdefault("WANDB_DATA_DIR", str(facts.directory.resolve() / "wandb" / "data"))
        if not self._offline:
            try:
                self._run = self._begun(facts, "online")
            except wandb.errors.CommError as error:
                if _was_online(facts.directory).exists():
                    # Its points are there, and are continued when the service answers again.
                    raise
                wandb.teardown()
                self._offline = True
                self._say(f"does not reach W&B, so it writes files; send them with 'wandb sync' ({describe(error)})")
            else:
                _was_online(facts.directory).touch()
        # Of an earlier life: all rows are written again, to the files or to the service.
        if self._offline:
            shutil.rmtree(facts.directory / "wandb" / "data", ignore_errors=True)
        for folder in (facts.directory / "wandb").glob("offline-run-*"):
            shutil.rmtree(folder)
        if self._offline:
            self._run = self._begun(facts, "offline")
        # Rows that a killed life had sent without recording it are there.
        self._next = 0 if self._offline else int(self._run.step)
        return min(first_step, self._next)

    def _begun(self, facts: RunFacts, mode: Literal["online", "offline"]) -> Any:
        return wandb.init(
            mode=mode, project=self._project, name=facts.name, id=service_run(facts.directory, SERVICE), resume="allow" if mode == "online" else None,
            reinit="finish_previous", dir=str(facts.directory), config=dict(facts.config), allow_val_change=True,
            settings=wandb.Settings(init_timeout=INIT_S, **_QUIET),
        )  # fmt: skip

    def restart(self, facts: RunFacts) -> None:
        forget_service_run(facts.directory, SERVICE)

    def samples(self, step: int, rows: Sequence[SampleRow]) -> None:
        parts = sorted({name for row in rows for name in row.parts})
        data = [[row.prompt, row.completion, row.reward, *(row.parts.get(name) for name in parts)] for row in rows]
        self._samples[step] = wandb.Table(columns=["prompt", "completion", "reward", *(f"reward/{name}" for name in parts)], data=data)

    def log(self, step: int, metrics: Mapping[str, Value]) -> None:
        table = self._samples.pop(step, None)
        if step < self._next:
            return
        row = {name: value for name, value in metrics.items() if value is not None and name != "step"}
        self._run.log(row | ({"samples": table} if table is not None else {}), step=step, commit=True)

    def flush(self) -> None:
        """Does nothing: what a killed process loses is sent again when the next life begins."""

    def artefact(self, path: Path) -> None:
        artefact = wandb.Artifact(f"{path.stem}-{self._run.id}", type="model" if path.is_dir() else "report")
        if path.is_dir():
            # A reference: nothing is copied.
            artefact.add_reference(path.resolve().as_uri(), checksum=False)
        else:
            artefact.add_file(str(path))
        self._run.log_artifact(artefact)

    def finish(self, status: Status) -> None:
        if self._run is not None:
            run, self._run = self._run, None
            run.finish(exit_code=0 if status == "finished" else 1)


def _was_online(directory: Path) -> Path:
    """Returns the file that says that the service has points of the run in ``directory``."""
    return directory / "trackers" / f"{SERVICE}.online"


def _has_login() -> bool:
    try:
        return bool(wandb.login(verify=False))
    except wandb.errors.UsageError:
        return False
