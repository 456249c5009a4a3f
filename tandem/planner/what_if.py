"""The same model and batch on other GPUs: another kind, another number, another interconnect or price, beside the plan. Imports no torch."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from tandem.estimate.hardware.hardware import Hardware
from tandem.estimate.hardware.load import load_hardware
from tandem.planner.plan import Plan
from tandem.planner.request import PlanRequest
from tandem.planner.score import Score, score
from tandem.planner.search import Progress, pareto_front, sweep
from tandem.types.errors import UserError

KEYS = ("gpu", "gpus", "interconnect", "link", "price")
"""What may be another: the kind of GPU (a name or a hardware file), their number, ``network_bandwidth``, ``link_bandwidth`` and ``price_per_hour``."""
BANDWIDTH = re.compile(r"([0-9.]+(?:e[0-9]+)?)(GB|Gb|TB|B)/s")
UNITS = {"B": 1.0, "Gb": 1e9 / 8, "GB": 1e9, "TB": 1e12}


@dataclass(frozen=True, slots=True)
class WhatIf:
    """``words``: the changes, as they were asked for. ``score``: the fastest layout that fits, or the given layout; ``None`` if none fits. ``scored``: all that
    fit. ``considered``: how many layouts were scored."""

    words: str
    score: Score | None
    scored: tuple[Score, ...]
    considered: int


def parse_changes(words: str) -> dict[str, str]:
    """Returns the changes of ``words``, such as ``gpu=H200,interconnect=25GB/s``. Raises ``UserError`` for a key that is unknown or given twice."""
    changes: dict[str, str] = {}
    for part in words.split(","):
        key, equals, value = part.strip().partition("=")
        if key not in KEYS or not equals or not value:
            raise UserError(f"--what-if {words}: '{part.strip()}' must be one of {', '.join(f'{key}=...' for key in KEYS)}")
        if key in changes:
            raise UserError(f"--what-if {words}: {key} is given twice; ask for each with a --what-if of its own")
        changes[key] = value
    return changes


def changed(request: PlanRequest, words: str) -> PlanRequest:
    """Returns ``request`` with the changes of ``words``. Raises ``UserError`` for a value that no machine has."""
    changes = parse_changes(words)
    hardware = load_hardware(changes["gpu"]) if "gpu" in changes else request.hardware
    # A price that was given is of the GPU that it was given for.
    hardware = _with_figures(hardware, changes, words)
    gpus = request.gpus
    if "gpus" in changes:
        if not changes["gpus"].isdigit():
            raise UserError(f"--what-if {words}: gpus is '{changes['gpus']}'; it must be a whole number")
        gpus = int(changes["gpus"])
    other = replace(request, hardware=hardware, gpus=gpus)
    try:
        other.check()
    except UserError as error:
        raise UserError(f"--what-if {words}: {error}") from None
    return other


def _with_figures(hardware: Hardware, changes: dict[str, str], words: str) -> Hardware:
    sources, figures = dict(hardware.sources), dict[str, float]()
    for key, figure in (("interconnect", "network_bandwidth"), ("link", "link_bandwidth")):
        if key in changes:
            figures[figure] = bandwidth(changes[key], f"--what-if {words}: {key}")
    if "price" in changes:
        figures["price_per_hour"] = price(changes["price"], f"--what-if {words}: price")
    sources |= dict.fromkeys(figures, "--what-if")
    return replace(hardware, **figures, sources=sources)  # type: ignore[arg-type]


def bandwidth(text: str, name: str) -> float:
    """Returns the bytes per second of ``text``, such as ``400Gb/s`` or ``50GB/s``."""
    match = BANDWIDTH.fullmatch(text)
    value = float(match[1]) * UNITS[match[2]] if match and match[1].count(".") < 2 and match[1] != "." else 0.0
    if not 1e6 <= value <= 1e15:
        raise UserError(f"{name} is '{text}'; it must be a bandwidth of one GPU in one direction, such as 400Gb/s or 50GB/s")
    return value


def price(text: str, name: str) -> float:
    """Returns the US dollars of ``text`` that an hour of a GPU costs."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1e6:
        raise UserError(f"{name} is '{text}'; it must be the US dollars of an hour of one GPU, such as 2.5")
    return value


def compare_plans(request: PlanRequest, asked: Sequence[str], progress: Progress | None = None) -> list[WhatIf]:
    """Returns the best layout with each of the changes, of all that a plan considers."""
    compared = []
    for words, other in [(words, changed(request, words)) for words in asked]:
        swept = sweep(other, progress)
        compared.append(WhatIf(words, swept.best, swept.scored, swept.considered))
    return compared


def compare_layout(given: Score, request: PlanRequest, asked: Sequence[str]) -> list[WhatIf]:
    """Returns the same layout with each of the changes. Raises ``UserError`` for another number of GPUs, which is another layout."""
    compared = []
    for words in asked:
        other = changed(request, words)
        if other.gpus != request.gpus:
            raise UserError(f"--what-if {words}: another number of GPUs needs another layout; leave --tp, --pp, --dp and the other axes out")
        scored = score(given.shapes, given.layout, other.hardware)
        compared.append(WhatIf(words, scored if scored.fits else None, (scored,), 1))
    return compared


def whole_front(plan: Plan, compared: Sequence[WhatIf]) -> Iterator[tuple[str, Score]]:
    """Yields, from the fastest on, the layouts of the plan and of all changes that no other beats in time, cost and memory, each with its changes."""
    of = {id(each): words for words, scored in (("", plan.sweep.scored), *((each.words, each.scored) for each in compared)) for each in scored}
    for each in pareto_front([*plan.sweep.scored, *(scored for other in compared for scored in other.scored)]):
        yield of[id(each)], each
