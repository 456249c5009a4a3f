"""The colours of curves: they stand out from the page and can be told apart by the colour blind."""

import math
import re
from collections.abc import Iterator

import pytest

from tandem.dashboard.page_file import dashboard_assets

# Simulations of complete protanopia and deuteranopia (Machado, Oliveira and Fernandes, 2009, table 1), for linear RGB.
SEEN_AS = {
    "normal": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
}


def linear(colour: str) -> list[float]:
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def luminance(colour: str) -> float:
    red, green, blue = linear(colour)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def lab(colour: str, seen_as: str) -> tuple[float, float, float]:
    """Returns CIELAB coordinates (D65) of a colour under a simulated deficiency."""
    given = linear(colour)
    rgb = [min(1.0, max(0.0, sum(factor * part for factor, part in zip(row, given, strict=True)))) for row in SEEN_AS[seen_as]]
    matrix = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.0721750), (0.0193339, 0.1191920, 0.9503041))
    xyz = [sum(factor * part for factor, part in zip(row, rgb, strict=True)) for row in matrix]
    f = [t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (v / w for v, w in zip(xyz, (0.95047, 1, 1.08883), strict=True))]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


def themes() -> Iterator[dict[str, str]]:
    """Yields the colours of the light and of the dark theme by name."""
    assets = dashboard_assets()
    style = "".join(assets[name].read_text(encoding="utf-8") for name in ("page.css", "dashboard.css"))
    pairs = re.findall(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", style)
    for theme in (1, 2):
        yield {pair[0]: pair[theme] for pair in pairs}


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("seen_as", SEEN_AS)
def test_curves_can_be_told_apart_by_the_colour_blind_and_stand_out_from_the_page(theme: int, seen_as: str) -> None:
    colours = list(themes())[theme]
    curves = [colours[f"c{number}"] for number in range(8)]
    for number, one in enumerate(curves):
        lighter, darker = sorted((luminance(one), luminance(colours["card"])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) >= 2.2, one
        for other in curves[:number]:
            distance = math.dist(lab(one, seen_as), lab(other, seen_as))
            # Two curves are the usual number; a difference of 2.3 is just noticeable.
            assert distance > (30 if curves.index(other) < 1 and number < 2 else 10), (one, other, distance)
