"""The comparison of a replayed step with its record, and the folder for the replay."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tandem.config.machine import MachineConfig
from tandem.config.recipe import AnyRecipe
from tandem.config.registry import RegistryConfig
from tandem.jobs.run_files import write_recipe
from tandem.runtime.machine.gpus import Device
from tandem.runtime.process.temporary import temporary_folder
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.tensor_digests import FOLDER
from tandem.types import UserError

Part = Literal["rollout", "rewards", "train"]
PARTS: tuple[Part, ...] = ("rollout", "rewards", "train")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of ``count`` values of ``part``; ``differences`` has one line for each value that is not ``how``."""

    part: Part
    count: int
    differences: tuple[str, ...]
    how: Literal["equal bit for bit", "finite or not as recorded"] = "equal bit for bit"


def differences(recorded: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value of ``recorded`` that is not bit-identical in ``now``; NaN equals NaN."""
    pairs = [(name, value, now.get(name)) for name, value in recorded.items()]
    return [f"{name}: recorded {a!r}, now {b!r}" for name, a, b in pairs if not (a == b or (a != a and b != b))]


def same_device(machine: MachineConfig, directory: Path, recorded: Device | None) -> MachineConfig:
    """Returns ``machine`` with the device that the run in ``directory`` ``recorded``. Raises ``UserError`` where it names another one."""
    device: Device = recorded or "cpu"
    if machine.device not in ("auto", device):
        raise UserError(
            f"'{directory}' was run on '{device}' and machine.device is '{machine.device}', whose results are not bit-identical; remove the override"
        )
    return replace(machine, device=device)


@contextmanager
def scratch_run(recipe: AnyRecipe, directory: Path, facts: Mapping[str, Any], record: Path | None = None) -> Iterator[Path]:
    """Yields a temporary folder for a run of ``recipe`` that starts from the checkpoints in ``directory``, through links, and uploads, registers
    and traces nothing. Its journal has ``facts``. The digests of its tensors are written to the folder ``record``."""
    run = replace(recipe.run, trace_steps=())
    quiet = replace(recipe, checkpoint=replace(recipe.checkpoint, upload=""), registry=RegistryConfig(), run=run)
    with temporary_folder() as scratch:
        write_recipe(quiet, scratch)
        (scratch / "logs").mkdir()
        for name in ("checkpoints", "models", "reference"):
            if (directory / name).exists():
                (scratch / name).symlink_to((directory / name).resolve())
        if record is not None:
            (scratch / FOLDER).symlink_to(record.resolve())
        with Journal(scratch / "journal.sqlite") as journal:
            for key, value in facts.items():
                if value is not None:
                    journal.set(key, value)
        yield scratch
