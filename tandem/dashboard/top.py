"""The essentials of a run in a terminal: figures, curves of one line, what its sidecars do now, memory, and the newest events."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tandem.dashboard.hardware import newest_processes
from tandem.dashboard.open_run import OpenRun, stamp_of
from tandem.dashboard.overview import overview
from tandem.dashboard.runs import Runs
from tandem.report.cards import duration
from tandem.types import RunError, UserError

EVERY_S = 1.0
CURVE_POINTS = 40
MOST_CURVES, MOST_EVENTS, MOST_PROCESSES = 10, 5, 12
_BARS = "▁▂▃▄▅▆▇█"
_MIB = 2**20


def chosen_run(path: Path) -> OpenRun:
    """Returns the run that ``path`` is, or of a folder of runs the one that lives, or that was changed last. Raises ``UserError`` where there is none."""
    runs = Runs(path)
    listed, _ = runs.list()
    if not listed:
        raise UserError(f"there are no runs in '{path}'; name a run, or the folder with your runs")
    newest = max(listed, key=lambda run: (run["live"], run["changed_s"]))
    return runs.open(newest["name"])


def watch(run: OpenRun, console: Console, *, once: bool) -> None:
    """Draws the run again whenever it has written something, until Ctrl-C; ``once``, or where there is no terminal, a single time."""
    if once or not console.is_terminal:
        console.print(picture(run, console.width))
        return
    before = None
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now, size = stamp_of(run.directory), console.size
            if (now, size) != before or now[-1] is not None:
                before = (now, size)
                live.update(picture(run, console.width), refresh=True)
            time.sleep(EVERY_S)


def picture(run: OpenRun, width: int) -> Group:
    """Returns what is drawn. Texts of the run are shown as text, without codes of terminals."""
    known = overview(run)
    state = Text("live", "bold green") if known["live"] else Text(known["status"][0], "green" if known["status"][1] == "good" else "dim")
    title = Text.assemble((plain(known["name"]), "bold"), "  ", state, "  ", (f"{known['rows']:,} steps · {plain(known['path'])}", "dim"))
    parts: list[Any] = [title]
    parts += [Text(plain(line), "bold red") for line in (known["problem"], *known["alerts"]) if line]
    if known["headline"]:
        parts.append(Text(plain(known["headline"]), "dim"))
    parts.append(_cards(known["cards"]))
    parts.append(_curves(run, known["sections"], width))
    doing = _doing(run, known["live"] is not None)
    if doing is not None:
        parts.append(doing)
    if known["memory"]:
        parts.append(_memory(known["memory"]))
    using = newest_processes(run)
    if using:
        parts.append(_processes(using))
    if known["events"]:
        events = Group(*map(_event, known["events"][:MOST_EVENTS]))
        parts.append(Panel(events, title="faults and recoveries, the newest first", title_align="left", border_style="dim"))
    return Group(*parts)


def plain(text: Any) -> str:
    """Returns ``text`` without what a terminal would read as a command."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in str(text).replace("\n", " "))


def _cards(cards: Sequence[dict[str, Any]]) -> Table:
    table = Table.grid(padding=(0, 3))
    for _ in cards:
        table.add_column()
    table.add_row(*(Text.assemble((f"{card['before']} → " if card["before"] else "", "dim"), (card["value"], "bold"),
                                  (f" of {card['limit']}" if card["limit"] else "", "dim")) for card in cards))  # fmt: skip
    table.add_row(*(Text(card["name"], "dim") for card in cards))
    return table


def _curves(run: OpenRun, sections: Sequence[dict[str, Any]], width: int) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name, side in (("curve", "left"), ("last", "right"), ("", "left"), ("lowest", "right"), ("highest", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    charts = [chart for section in sections for chart in section["charts"] if chart["series"]][:MOST_CURVES]
    points = max(8, min(CURVE_POINTS, width - 60))
    with run.columns() as columns:
        size = columns.thinning(0, len(columns), points)
        for chart in charts:
            key = chart["series"][0]["key"]
            values = columns.thinned(key, 0, len(columns), size).y
            known = [value for value in values if value is not None]
            if known:
                last, (low, high) = columns.finite(key)[-1], columns.extremes(key)
                table.add_row(plain(chart["title"]), f"{last:.4g}", sparkline(values), f"{low:.4g}", f"{high:.4g}")
    return table


def sparkline(values: Sequence[float | None]) -> str:
    """Returns ``values`` as a curve of one line; a space where there is none."""
    known = [value for value in values if value is not None]
    low, spread = (min(known), max(known) - min(known)) if known else (0.0, 0.0)
    height = lambda value: _BARS[min(len(_BARS) - 1, int((value - low) / spread * len(_BARS)))] if spread else _BARS[len(_BARS) // 2]
    return "".join(" " if value is None else height(value) for value in values)


def _doing(run: OpenRun, is_live: bool) -> Text | None:
    """Returns the newest phase of each sidecar, and since when it lasts."""
    if not is_live:
        return None
    try:
        with run.phases() as phases:
            newest = phases.newest()
            began_s = phases.began_s
    except RunError:
        return None
    now = time.time() - began_s
    said = [f"{plain(sidecar)}: {plain(state.replace('_', ' '))}, step {step}" + (f", for {duration(max(0.0, now - start))}" if end is None else "")
            for sidecar, state, step, start, end in newest]  # fmt: skip
    return Text("   ".join(said), "cyan") if said else None


def _memory(memory: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name, side in (("memory", "left"), ("predicted MiB", "right"), ("measured MiB, most", "right"), ("measured / predicted", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    shown = lambda value: "-" if value is None else f"{value / _MIB:,.0f}"
    for each in memory:
        ratio = f"{each['measured'] / each['predicted']:.2f}" if each["measured"] and each["predicted"] else "-"
        table.add_row(plain(each["phase"].replace("_", " ")), shown(each["predicted"]), shown(each["measured"]), ratio)
    return table


def _processes(using: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name, side in (("process", "left"), ("cores", "right"), ("resident MiB", "right")):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for each in using[:MOST_PROCESSES]:
        table.add_row(plain(each["name"]), "-" if each["cores"] is None else f"{each['cores']:.2f}", f"{each['bytes'] / _MIB:,.0f}")
    return table


def _event(event: dict[str, Any]) -> Text:
    when = time.strftime("%H:%M:%S", time.localtime(event["time_s"])) if event["time_s"] else "-"
    detail = event["detail"]
    step = f" step {detail['step']}" if "step" in detail else ""
    said = plain(detail.get("reason") or detail.get("what") or "")
    return Text.assemble((when, "dim"), f" {plain(event['kind'].replace('_', ' '))}{step} ", (said[:300], "red" if event["bad"] else ""))
