"""Stacked bars and tables of a page, as HTML that needs no script and is as readable on a narrow screen. Imports no torch."""

import html
from collections.abc import Mapping, Sequence

COLORS = 8
"""``--c0`` to ``--c7`` of ``plan.css``; further parts have them again, paler."""
STYLE = (
    ".bars{display:grid;grid-template-columns:auto 1fr auto;gap:.35rem .7rem;align-items:center;font-size:.85rem;font-variant-numeric:tabular-nums}"
    ".bar{position:relative;display:flex;height:1.4rem;background:var(--grid);border-radius:.25rem}.bar i{display:block;height:100%}"
    ".bar u{position:absolute;top:-.2rem;bottom:-.2rem;border-left:2px dashed var(--bad)}"
    ".legend{display:flex;flex-wrap:wrap;gap:.1rem 1rem;margin-bottom:.6rem}.legend span{font-size:.82rem}"
    ".legend i{display:inline-block;width:.8em;height:.8em;margin-right:.35em;border-radius:.2em}"
)


def bar_rows(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str, scale: float, limit: float = 0.0) -> str:
    """Returns a stacked bar for each row, with a mark at ``limit``. Values are divided by ``scale`` to be in ``unit``."""
    names = list(dict.fromkeys(name for _, parts in rows for name, value in parts.items() if value))
    most = max([limit, *(sum(parts.values()) for _, parts in rows)]) or 1.0
    keys = [f"<span>{_swatch(at)}{_words(name)}</span>" for at, name in enumerate(names)]
    if limit:
        keys.append(f"<span>dashed: {figure(limit / scale)} {unit} there are</span>")
    drawn = [_row(name, parts, names, unit, scale, most, limit) for name, parts in rows]
    return f"<figure class='chart wide'><div class='legend'>{''.join(keys)}</div><div class='bars'>{''.join(drawn)}</div></figure>"


def _row(name: str, parts: Mapping[str, float], names: Sequence[str], unit: str, scale: float, most: float, limit: float) -> str:
    titles = {part: f"{_words(part)}: {figure(parts[part] / scale)} {unit}" for part in names if parts.get(part)}
    pieces = "".join(
        f"<i style='width:{100 * parts[part] / most:.3f}%;{_fill(names.index(part))}' title='{title}'></i>" for part, title in titles.items()
    )
    mark = f"<u style='left:{100 * limit / most:.3f}%'></u>" if limit else ""
    total = f"{figure(sum(parts.values()) / scale)} {unit}"
    said = html.escape(f"{name}: {total}; " + ", ".join(titles.values()), quote=True)
    return f"<span>{html.escape(name)}</span><div class='bar' role='img' aria-label='{said}'>{pieces}{mark}</div><b>{total}</b>"


def figure(value: float) -> str:
    """Returns ``value`` with three significant digits, whole from 1,000 on."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table of HTML cells in a panel, all columns but the first aligned to the right."""
    side = lambda place: " class='number'" if place else ""
    top = "".join(f"<th{side(place)}>{html.escape(name)}</th>" for place, name in enumerate(head))
    body = "".join("<tr>" + "".join(f"<td{side(place)}>{cell}</td>" for place, cell in enumerate(row)) + "</tr>" for row in rows)
    return f"<div class='panel' tabindex='0'><table><tr>{top}</tr>{body}</table></div>"


def _words(name: str) -> str:
    return html.escape(name.replace("_", " "))


def _swatch(number: int) -> str:
    return f"<i style='{_fill(number)}'></i>"


def _fill(number: int) -> str:
    return f"background:var(--c{number % COLORS})" + (";opacity:.5" if number >= COLORS else "")
