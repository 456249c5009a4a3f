"""The diagram of the pod's states, drawn from the tables of ``states``: ``python -m tandem.pod.diagram docs/figures/pod-states.svg``."""

import argparse
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

from tandem.pod.states import ROLLOUT_TRANSITIONS, TRAINER_TRANSITIONS, RolloutState, TrainerState

S = TypeVar("S", bound=StrEnum)
_T, _R = TrainerState, RolloutState
TRAINER_CYCLE = (_T.TRAIN, _T.OFFLOAD, _T.CONVERT, _T.REGISTER, _T.UPDATE_WEIGHT, _T.WAIT_ROLLOUT, _T.ONLOAD)
ROLLOUT_CYCLE = (_R.START_ENGINE, _R.UPDATE_WEIGHT, _R.ROLLOUT, _R.TERMINATE_ENGINE)
"""The figure's two cycles, clockwise from the top; the other states stand inside."""
WIDTH, HEIGHT, BOX = 1120, 620, (122, 28)
_STYLE = (
    "text{font:13px sans-serif;text-anchor:middle;fill:#1c2733}.title{font-size:16px;font-weight:bold}"
    "rect{fill:#eaf2fb;stroke:#35618f;stroke-width:1.4}.inner rect{fill:#f6f6f6;stroke:#8a8a8a}path{fill:none;stroke:#a3acb5;stroke-width:1.1}"
    ".cycle path{stroke:#1f4e79;stroke-width:2.2}"
)


class _Point(NamedTuple):
    x: float
    y: float


def diagram() -> str:
    """Returns the diagram of both sidecars as SVG. Thick arrows are the figure's cycle. A sidecar that dies goes to ``down`` from any state, which is not
    drawn."""
    inner_trainer, inner_rollout = (_T.DOWN, _T.START, _T.CHECKPOINT, _T.INFERENCE), (_R.DOWN, _R.SLEEP_ENGINE, _R.EVALUATE, _R.KEEP_ENGINE)
    left = _sidecar("trainer sidecar", TRAINER_TRANSITIONS, TRAINER_CYCLE, inner_trainer, _Point(290, 320), _Point(98, 130), math.pi / 4)
    right = _sidecar("rollout sidecar", ROLLOUT_TRANSITIONS, ROLLOUT_CYCLE, inner_rollout, _Point(840, 320), _Point(75, 130), 0.0)
    markers = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" style="fill:{color};stroke:none"/></marker>'
        for name, color in (("thick", "#1f4e79"), ("thin", "#a3acb5"))
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="The states of a pod\'s two sidecars">',
        f"<style>{_STYLE}</style><defs>{markers}</defs>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" style="fill:#ffffff;stroke:none"/>', *left, *right, "</svg>",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _sidecar(title: str, table: Mapping[S, frozenset[S]], cycle: Sequence[S], inner: Sequence[S], center: _Point, inside: _Point, turn: float) -> list[str]:
    assert set(cycle) | set(inner) == set(table), f"the diagram of the {title} does not place every state"
    at = _on_ellipse(cycle, center, _Point(215, 235)) | _on_ellipse(inner, center, inside, turn)
    around = set(zip(cycle, (*cycle[1:], cycle[0]), strict=True))
    lines = [f'<text class="title" x="{center.x:g}" y="30">{title}</text>']
    for is_cycle in (False, True):
        lines.append(f'<g class="{"cycle" if is_cycle else "others"}">')
        for before in table:
            lines += [_arrow(at, before, after, center, is_cycle) for after in sorted(table[before]) if ((before, after) in around) == is_cycle]
        lines.append("</g>")
    for name, states in (("outer", cycle), ("inner", inner)):
        lines += [f'<g class="{name}">', *(_box(state, at[state]) for state in states), "</g>"]
    return lines


def _on_ellipse(states: Sequence[S], center: _Point, radius: _Point, turn: float = 0.0) -> dict[S, _Point]:
    angles = (2 * math.pi * place / len(states) + turn for place in range(len(states)))
    return {state: _Point(center.x + radius.x * math.sin(a), center.y - radius.y * math.cos(a)) for state, a in zip(states, angles, strict=True)}


def _box(state: StrEnum, at: _Point) -> str:
    width, height = BOX
    corner = f'x="{at.x - width / 2:.1f}" y="{at.y - height / 2:.1f}"'
    return f'<rect {corner} width="{width}" height="{height}" rx="6"/><text x="{at.x:.1f}" y="{at.y + 4.5:.1f}">{state.value.replace("_", " ")}</text>'


def _arrow(at: Mapping[S, _Point], before: S, after: S, center: _Point, is_cycle: bool) -> str:
    """Returns the arrow between two boxes, bent to its left so that both directions of a pair are seen; one to the same box is a loop above it."""
    marker, name = "thick" if is_cycle else "thin", f"{before.value} to {after.value}"
    start, end = at[before], at[after]
    if before == after:
        top = start.y - BOX[1] / 2
        path = f"M{start.x - 14:.1f},{top:.1f} C{start.x - 26:.1f},{top - 26:.1f} {start.x + 26:.1f},{top - 26:.1f} {start.x + 14:.1f},{top:.1f}"
    else:
        bend = 0.0 if is_cycle else 0.12
        middle = _Point((start.x + end.x) / 2 + bend * (end.y - start.y), (start.y + end.y) / 2 - bend * (end.x - start.x))
        first, last = _edge_of(start, middle), _edge_of(end, middle)
        path = f"M{first.x:.1f},{first.y:.1f} Q{middle.x:.1f},{middle.y:.1f} {last.x:.1f},{last.y:.1f}"
    return f'<path d="{path}" marker-end="url(#{marker})"><title>{name}</title></path>'


def _edge_of(box: _Point, towards: _Point) -> _Point:
    """Returns where the line from the middle of a box ``towards`` a point leaves the box."""
    x, y = towards.x - box.x, towards.y - box.y
    reach = min(BOX[0] / 2 / abs(x) if x else math.inf, BOX[1] / 2 / abs(y) if y else math.inf)
    return _Point(box.x + reach * x, box.y + reach * y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="the SVG to write")
    parser.parse_args().file.write_text(diagram(), encoding="utf-8")


if __name__ == "__main__":
    main()
