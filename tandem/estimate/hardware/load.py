"""Hardware files: the kinds of GPU that come with Tandem, and those that a user adds. Imports no torch."""

import difflib
import functools
from pathlib import Path

from tandem.config.load import build
from tandem.config.yaml_text import read_mapping
from tandem.estimate.hardware.hardware import Hardware
from tandem.types.errors import UserError

FOLDER = Path(__file__).parent
MOST_BYTES = 2**16
THIS_MACHINE = "this-machine"
"""The name of what is measured here (``jobs.checks.planned_machine``), which no file has."""


def known_hardware() -> dict[str, Path]:
    """Returns the hardware files that come with Tandem, by name."""
    return {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}


def load_hardware(name_or_path: str) -> Hardware:
    """Returns the hardware of a file that comes with Tandem (its name, in any case) or of the YAML file at a path. Raises ``UserError`` for an unknown
    name, with the nearest known one, and for a file with an unknown key, a missing one or a value that no machine has."""
    known = known_hardware()
    by_name = {name.lower(): path for name, path in known.items()}
    if name_or_path.lower() in by_name:
        return _read(str(by_name[name_or_path.lower()]))
    path = Path(name_or_path)
    if path.suffix in (".yaml", ".yml") or "/" in name_or_path:
        return _read(name_or_path)
    if name_or_path.lower() == THIS_MACHINE:
        raise UserError(f"GPU '{THIS_MACHINE}' is what is measured where the plan is made: name it with --gpu alone")
    near = [name for name in by_name if name_or_path.lower() in name][:1] or difflib.get_close_matches(name_or_path.lower(), by_name, n=1, cutoff=0.5)
    hint = f"did you mean '{by_name[near[0]].stem}'?" if near else f"known here: {', '.join(known)}"
    raise UserError(f"GPU '{name_or_path}' is unknown; {hint} (or name a YAML file with its figures)")


@functools.cache
def _read(path: str) -> Hardware:
    content = read_mapping(
        path, f"hardware file '{path}'", MOST_BYTES, why_short="a hardware file has about 30 lines", missing="name a YAML file with the figures of a GPU",
        wrong="must be a mapping of figures",
    )  # fmt: skip
    try:
        return build(Hardware, content)
    except UserError as error:
        raise UserError(f"hardware file '{path}': {error}") from None


def source_of(hardware: Hardware, figure: str) -> str:
    """Returns where ``figure`` of ``hardware`` is published."""
    return hardware.sources[figure]


def hardware_of_device(device_name: str) -> Hardware | None:
    """Returns the hardware whose device name is the longest that is part of torch's ``device_name``, ``None`` if there is none."""
    matches = [(len(part), each) for each in map(load_hardware, known_hardware()) for part in each.device_names if part in device_name]
    return max(matches, key=lambda match: match[0])[1] if matches else None
