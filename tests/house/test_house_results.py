"""Every recipe with a result states its figures, and its page has the command, a table of seeds and a drawn curve."""

import importlib.util
import json
import re
import xml.etree.ElementTree
from pathlib import Path
from types import ModuleType

import pytest

from tandem.runtime.records.journal import Journal

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
PAGES = sorted(RESULTS.glob("*.md"))
WITH_RESULT = {recipe: page for recipe in sorted((ROOT / "recipes").glob("*.yaml")) for page in re.findall(r"docs/results/(\w+\.md)", recipe.read_text())}
ONE_SEED = {"calculator_agent"}
SVG = "{http://www.w3.org/2000/svg}"


def figures(text: str) -> set[str]:
    """Returns the accuracies in ``text``, as ``0.91``."""
    return set(re.findall(r"\b0\.\d\d\b", text))


def rounded(page: str) -> set[str]:
    """Returns the numbers with three digits after the point on ``page``, rounded to two."""
    return {f"{float(number) + 1e-9:.2f}" for number in re.findall(r"\b[01]\.\d{3}\b", page)} | figures(page)


@pytest.mark.parametrize("recipe", WITH_RESULT, ids=lambda recipe: recipe.stem)
def test_the_figures_in_a_recipes_header_are_those_of_its_page(recipe: Path) -> None:
    header = re.match(r"(#.*\n)+", recipe.read_text())
    assert header is not None
    stated = figures(header[0])
    assert len(stated) >= 2 and stated <= rounded((RESULTS / WITH_RESULT[recipe]).read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_command_seeds_minutes_and_curves_and_is_listed(page: Path) -> None:
    text = page.read_text()
    recipes = [recipe.stem for recipe, name in WITH_RESULT.items() if name == page.name]
    assert recipes and all(f"tandem train {recipe}" in text or f"tandem train recipes/{recipe}.yaml" in text for recipe in recipes)
    assert all(re.search(rf"^\| (seed )?{seed} \|", text, re.MULTILINE) for seed in (0, 1, 2)) or page.stem in ONE_SEED
    assert "minutes" in text and f"](results/{page.name})" in (ROOT / "docs" / "rl.md").read_text()
    names = re.findall(r"!\[[^\]]+\]\((\w+\.svg)\)", text)
    assert names
    for name in names:
        lines = xml.etree.ElementTree.parse(RESULTS / name).getroot().findall(f"{SVG}polyline")
        assert lines and all(len(line.attrib["points"].split()) >= 3 for line in lines)


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", RESULTS / "curves.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def axis(root: xml.etree.ElementTree.Element, anchor: str, coordinate: str) -> list[tuple[float, float]]:
    """Returns ``(place, value)`` of the first and the last tick label with ``text-anchor`` ``anchor``."""
    labels = [each for each in root.findall(f"{SVG}text") if each.get("text-anchor") == anchor and re.fullmatch(r"[\d.]+", each.text or "")]
    return [(float(label.attrib[coordinate]), float(label.text or "")) for label in (labels[0], labels[-1])]


def test_a_curve_is_where_its_axes_say(curves: ModuleType, tmp_path: Path) -> None:
    values = [(0, 0.333), (5, 0.75), (45, 0.913)]
    with Journal(tmp_path / "journal.sqlite") as journal:
        for step, value in values:
            journal.commit_evaluation(step, "sampled", {"accuracy": value})
            journal.commit_evaluation(step, "greedy", {"accuracy": 1.0})
    drawing = curves.svg([curves.Line("a & b", curves.evaluated(tmp_path, "sampled", "accuracy"))], "share", 0.9)
    root = xml.etree.ElementTree.fromstring(drawing)
    (line,) = root.findall(f"{SVG}polyline")
    (x0, step0), (x1, step1) = axis(root, "middle", "x")
    (y0, value0), (y1, value1) = axis(root, "end", "y")
    drawn = []
    for point in line.attrib["points"].split():
        x, y = map(float, point.split(","))
        # A label's baseline is 4 pixels below its tick.
        drawn.append((step0 + (x - x0) / (x1 - x0) * (step1 - step0), value0 + (y + 4 - y0) / (y1 - y0) * (value1 - value0)))
    for (step, value), (drawn_step, drawn_value) in zip(values, drawn, strict=True):
        assert drawn_step == pytest.approx(step, abs=0.05) and drawn_value == pytest.approx(value, abs=0.001)


def test_rows_are_averaged(curves: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "share": step / 10}) + "\n" for step in range(5)))
    assert curves.measured(tmp_path, "share", 2) == [(1, pytest.approx(0.05)), (3, pytest.approx(0.25))]


def test_ticks_are_round_and_enclose_the_values(curves: ModuleType) -> None:
    assert curves.ticks(0.95) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert curves.ticks(60) == [0, 10, 20, 30, 40, 50, 60]
    assert curves.ticks(225) == [0, 50, 100, 150, 200, 250]
    assert curves.ticks(1.0)[-1] == 1.0


def test_the_seconds_of_each_phase_of_a_switch_are_those_of_the_newest_results() -> None:
    newest = sorted((ROOT / "benchmarks" / "results").glob("switch-phases-*.md"))[-1]
    rows = [line for line in newest.read_text().splitlines() if re.match(r"\| [a-z_]+ \| \d", line)]
    section = (ROOT / "docs" / "hybrid.md").read_text().partition("## Seconds of each phase")[2].partition("\n### ")[0]
    assert len(rows) == 11 and [line for line in section.splitlines() if re.match(r"\| [a-z_]+ \| \d+\.\d", line)] == rows
    assert f"results/{newest.name})" in section
    (sums,) = re.findall(r"medians: ([\d.]+) s, of the plain copies ([\d.]+) s: ratio ([\d.]+)", newest.read_text())
    stated = re.findall(r"([\d.]+) s by medians, of ([\d.]+) s for the copies, a ratio of ([\d.]+)\.", section)
    assert stated == [(f"{float(sums[0]):.2f}", f"{float(sums[1]):.2f}", sums[2])]
