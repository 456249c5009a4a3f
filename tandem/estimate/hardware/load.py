"""Hardware files: the kinds of GPU that come with Tandem, and those that a user adds. Imports no torch."""

import difflib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from tandem.config.load import build
from tandem.config.yaml_text import read_mapping
from tandem.estimate.hardware.hardware import DISK_BANDWIDTH, HOST_BANDWIDTH, Hardware
from tandem.types.errors import UserError

FOLDER = Path(__file__).parent
MOST_BYTES = 2**16
FIGURES = (
    "peak_flops", "product_flops", "memory_bytes", "memory_bandwidth", "multiprocessors", "link_bandwidth", "network_bandwidth", "host_bandwidth",
    "disk_bandwidth", "price_per_hour",
)  # fmt: skip
"""The keys whose value is published or measured, so that a file that sets one names its source."""
PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "int8")


@dataclass(frozen=True, slots=True)
class HardwareFile:
    """The content of a hardware file: the fields of ``Hardware``, with ``sources`` by figure."""

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    multiprocessors: int
    link_bandwidth: float
    network_bandwidth: float
    sources: Mapping[str, str]
    gpus_per_node: int = 8
    price_per_hour: float = 0.0
    product_flops: Mapping[str, float] = field(default_factory=dict)
    host_bandwidth: float = HOST_BANDWIDTH
    disk_bandwidth: float = DISK_BANDWIDTH
    device_names: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises ``UserError`` for a figure that no machine has, or that has no source."""
        for each in ("peak_flops", "product_flops"):
            for precision, rate in getattr(self, each).items():
                if precision not in PRECISIONS:
                    raise UserError(f"'{each}.{precision}' is not a precision; known here: {', '.join(PRECISIONS)}")
                _check_positive(f"{each}.{precision}", rate)
        if "bf16" not in self.peak_flops:
            raise UserError("'peak_flops.bf16' is missing; the products of a training step are counted against it")
        for precision, rate in self.product_flops.items():
            peak = self.peak_flops.get(precision, 0.0)
            if rate > peak:
                raise UserError(f"'product_flops.{precision}' is {rate:g}, more than peak_flops.{precision} {peak:g}; a product is not faster")
        for each in (*FIGURES[2:-1], "gpus_per_node"):
            _check_positive(each, getattr(self, each))
        if self.price_per_hour < 0:
            raise UserError(f"'price_per_hour' is {self.price_per_hour:g}; it must be 0 (unknown) or more")
        defaults = {each.name: each.default for each in fields(self)}
        for each in FIGURES:
            if getattr(self, each) != defaults[each] and getattr(self, each) and each not in self.sources:
                raise UserError(f"'sources.{each}' is missing; name where the figure is published or how it was measured")
        for each in self.sources:
            if each not in FIGURES:
                raise UserError(f"'sources.{each}' is the source of no figure; known here: {', '.join(FIGURES)}")


def _check_positive(name: str, value: float) -> None:
    if not value > 0 or math.isinf(value):
        raise UserError(f"'{name}' is {value:g}; it must be more than 0")


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
        file = build(HardwareFile, content)
    except UserError as error:
        raise UserError(f"hardware file '{path}': {error}") from None
    values = {each.name: getattr(file, each.name) for each in fields(file) if each.name != "sources"}
    return Hardware(**values, sources=tuple(f"{figure}: {source}" for figure, source in file.sources.items()))


def source_of(hardware: Hardware, figure: str) -> str:
    """Returns where ``figure`` of ``hardware`` is published."""
    return next(source.removeprefix(f"{figure}: ") for source in hardware.sources if source.startswith(f"{figure}: "))


def hardware_of_device(device_name: str) -> Hardware | None:
    """Returns the hardware whose device name is the longest that is part of torch's ``device_name``, ``None`` if there is none."""
    matches = [(len(part), each) for each in map(load_hardware, known_hardware()) for part in each.device_names if part in device_name]
    return max(matches, key=lambda match: match[0])[1] if matches else None
