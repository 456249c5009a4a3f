"""The report of a run is the dashboard's page in one file: the same figures, no other host, no secret, nothing that runs but its own scripts."""

import base64
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from browser import Tab, browser, tab
from recorded_runs import HOSTILE, make_run, row, samples_of, value, write_rows
from test_dashboard_page import PARTS, dashboard, go

from tandem.config.recipe import load_config
from tandem.dashboard.curves import curves
from tandem.dashboard.open_run import OpenRun
from tandem.dashboard.report import write_report
from tandem.jobs.run_files import write_recipe
from tandem.report.samples import chosen_steps
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.tracing import Tracer
from tandem.types import UserError

ROOT = Path(__file__).resolve().parents[2]
TEXT = HOSTILE.replace("\ud83d", "")


def data_of(page: Path) -> dict[str, Any]:
    """Returns the data of a page. It must be JSON without NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"the page's data has {name}")

    (text,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', page.read_text(), re.S)
    data: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return data


@contextmanager
def opened(chromium: Any, page: Path, **options: Any) -> Iterator[Tab]:
    """The page in a browser without a network; at the end nothing may have gone wrong, and nothing but the file and its own modules was loaded."""
    with tab(chromium, offline=True, **options) as frozen:
        yield frozen
        assert frozen.problems == []
        assert [address for address in frozen.addresses if not address.startswith((page.as_uri(), "data:"))] == []


def show(frozen: Tab, page: Path, address: str) -> None:
    frozen.page.goto(f"{page.as_uri()}#/{address}")
    frozen.page.wait_for_function("(wanted) => document.body.dataset.ready === wanted", arg=f"#/{address}")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


def long_run(folder: Path, steps: int) -> Path:
    """Writes a run of sixty metrics, twelve phases a step, and samples of fifty steps, with long texts."""
    folder.mkdir(parents=True)
    write_recipe(load_config(ROOT / "recipes" / "sort.yaml", []), folder)
    write_rows(folder, (row(step, **{f"more/metric_{number}": math.sin(step / 9 + number) for number in range(47)}) for step in range(steps)))
    with Journal(folder / "journal.sqlite") as journal:
        for step in range(0, steps, steps // 50):
            samples, scores = samples_of(step, prompts=8, text="word " * 2000)
            journal.commit_samples(step, samples)
            journal.commit_scores(step, scores)
        for step, name in itertools.product(range(steps - 1000, steps), ("rollout", "train", "update_weight", "convert")):
            with journal.transition(step, "trainer", name):
                pass
    return folder


def test_the_page_is_one_file_whose_scripts_are_the_dashboards_and_nothing_else_can_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [row(step) for step in range(7)], text=TEXT, finished=True)
    page = write_report([run], tmp_path / "report.html")
    text = page.read_text()
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]*)">', text)
    rules = dict(part.split(" ", 1) for part in policy.split("; "))
    assert rules["default-src"] == "'none'" and "connect-src" not in rules and "unsafe" not in policy and "http" not in policy
    allowed = set(rules["script-src"].split()) - {"data:"}
    scripts = re.findall(r"<script( [^>]*)?>(.*?)</script>", text, re.S)
    hashed = {f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'" for kind, body in scripts if "application/json" not in kind}
    assert hashed == allowed and len(scripts) == 3, "no script of a run's texts is one of them"
    assert not re.search(r"<(link|script|img|iframe|object)[^>]*(src|href)=\"(?!data:)", text) and "<img src=x" not in text
    modules = json.loads(next(body for kind, body in scripts if "importmap" in kind))["imports"]
    own = {each.name for each in (ROOT / "tandem" / "dashboard" / "assets").glob("*.js")} - {"early.js", "frozen.js"}
    assert {f"tandem/{name}" for name in own | {"dom.js", "vendor/uplot.js"}} == set(modules)
    assert data_of(page)["runs"]["run"]["run"]["cards"] and (text.count("</script>"), text.count("</body>")) == (3, 1)


def test_samples_chosen_for_a_page_are_spread_evenly_with_the_first_and_the_last_step() -> None:
    assert chosen_steps(range(5), 20) == [0, 1, 2, 3, 4] and chosen_steps([], 20) == [] and chosen_steps([7], 2) == [7]
    steps = chosen_steps(range(0, 100, 2), 20)
    assert len(steps) == 20 and (steps[0], steps[-1]) == (0, 98) and all(4 <= after - before <= 6 for before, after in itertools.pairwise(steps))


def test_no_secret_of_a_recipe_is_in_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [row(0)])
    given = "{api_key: aaa111, token: bbb222, url: 'https://u:ccc333@host/x', note: 'hf_abcdefghijklmnopqrst', deep: {password: ddd444}}"
    overrides = [f"rewards.functions=[{{function: 'mine.py:judge', arguments: {given}}}]", "checkpoint.keep=7"]
    write_recipe(load_config(ROOT / "recipes" / "sort.yaml", overrides), run)
    other = make_run(tmp_path / "more" / "run", [row(0)])
    for directories in ([run], [run, other]):
        page = write_report(directories, tmp_path / "report.html")
        text = page.read_text()
        assert not re.search("aaa111|bbb222|ccc333|ddd444|abcdefghijklmnop", text) and "(hidden)" in text
    data = data_of(page)
    assert ["checkpoint.keep", ["7", "2"]] in data["compare"]["differences"], "the names of both are in the order in which they were given"
    assert [result["name"] for result in data["compare"]["results"]] == [f"{tmp_path.name}/run", "more/run"]
    with pytest.raises(UserError, match="is named twice"):
        write_report([run, run], tmp_path / "x.html")
    with pytest.raises(UserError, match="is not a run"):
        write_report([run, tmp_path], tmp_path / "x.html")


@pytest.mark.full
def test_a_run_of_10_000_steps_is_a_page_of_two_megabytes_with_the_means_and_ranges_of_its_steps(chromium: Any, tmp_path: Path) -> None:
    run = long_run(tmp_path / "run", 10_000)
    page = write_report([run], tmp_path / "report.html")
    assert page.stat().st_size < 2_500_000, page.stat().st_size
    known = data_of(page)["runs"]["run"]
    points = known["curves"]
    assert points["rows_each"] == 16 and len(points["x"]["step"]) == 625
    expected = [value("accuracy", step) for step in range(16)]
    part = points["series"]["accuracy"]
    assert (part["y"][0], part["low"][0], part["high"][0]) == pytest.approx((sum(expected) / 16, min(expected), max(expected)), rel=1e-6)
    live = curves(OpenRun("run", run), ["accuracy"], None, None, 1000, "step")
    assert live["series"]["accuracy"] == part and live["x"] == points["x"]["step"]
    assert "a point of a curve is the mean of 16 steps" in known["run"]["frozen"] and "240 samples of 20 of 50 steps" in known["run"]["frozen"]
    assert [part["count"] for part in known["phases"]["parts"]] == [4000, 4000] and len(known["phase"]) == 300
    with opened(chromium, page) as frozen:
        show(frozen, page, "run/run/samples")
        frozen.page.get_by_label("The step before").click()
        frozen.page.wait_for_function("() => document.querySelector('.toolbar input[type=number]').value === '9200'")
        show(frozen, page, "run/run/timeline")
        frozen.page.get_by_label("Step", exact=True).fill("9999")
        frozen.page.get_by_label("Step", exact=True).press("Enter")
        frozen.page.wait_for_function("() => document.querySelector('#view').innerText.includes('update weight')")


@pytest.mark.full
def test_every_part_of_the_page_in_a_file_says_what_the_live_one_says(chromium: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", [row(step) for step in range(60)], steps=6, finished=True)
    make_run(tmp_path / "runs" / "second", [row(step) for step in range(30)])
    tracer = Tracer(run / "traces", steps=(1,))
    tracer.begin(1)
    with tracer.span("forward", micro_batch=0, stage=0):
        pass
    tracer.begin(2)
    page = write_report([run], tmp_path / "report.html")
    both = write_report([run, tmp_path / "runs" / "second"], tmp_path / "both.html")
    view = "() => [...document.querySelector('#view').children].filter((each) => !each.matches('.notice')).map((each) => each.innerText).join('\\n')"
    with dashboard(tmp_path / "runs", tmp_path / "log") as served, tab(chromium) as live, opened(chromium, page) as frozen:
        for part in PARTS:
            go(live, served, f"run/first/{part}")
            show(frozen, page, f"run/first/{part}")
            for each in (live, frozen):
                each.page.wait_for_function("() => [...document.querySelectorAll('.chart')].slice(0, 2).every((each) => each.querySelector('canvas'))")
            assert live.page.evaluate(view) == frozen.page.evaluate(view), part
            assert frozen.violations() == [], part
        show(frozen, page, "run/first/samples")
        frozen.page.get_by_label("Which samples").select_option("correct")
        frozen.page.wait_for_function("() => document.querySelectorAll('.sample').length === 3")
        frozen.page.get_by_role("button", name="Tokens").first.click()
        frozen.page.wait_for_selector(".token")
        frozen.page.get_by_label("Colour by").select_option("entropy")
        frozen.page.locator(".token").nth(1).click()
        assert "entropy of the policy 1.5 nats" in frozen.page.locator(".token-detail").inner_text()
        frozen.page.get_by_role("button", name="The same prompt in all steps").first.click()
        frozen.page.wait_for_function("() => document.querySelectorAll('.sample .of').length === 24")
        show(frozen, page, "run/first/timeline")
        frozen.page.get_by_label("What is shown").select_option("1")
        frozen.page.wait_for_function("() => document.querySelector('#view').innerText.includes('forward')")
        show(frozen, page, "run/first/curves")
        frozen.page.get_by_label("From").fill("10")
        frozen.page.get_by_label("From").press("Enter")
        frozen.page.get_by_label("To", exact=True).fill("20")
        frozen.page.get_by_label("To", exact=True).press("Enter")
        first = f"in training: first {value('accuracy', 9):.4g}, last {value('accuracy', 21):.4g}"
        frozen.page.wait_for_function("(said) => document.querySelector('.chart .plot').getAttribute('aria-label').includes(said)", arg=first)
    with opened(chromium, both) as frozen:
        frozen.page.goto(both.as_uri())
        frozen.page.wait_for_selector(".chart canvas")
        assert frozen.page.locator("#title").inner_text() == "Comparison of 2 runs" and "Median time of each phase" in frozen.page.locator("#view").inner_text()


@pytest.mark.full
def test_a_hostile_run_is_text_in_its_report_and_nothing_else(chromium: Any, tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", [row(step) for step in range(5)], text=TEXT)], tmp_path / "report.html")
    with opened(chromium, page) as frozen:
        for part in ("samples", "events", "logs", "curves"):
            show(frozen, page, f"run/run/{part}")
            assert "<img src=x" in frozen.page.locator("#view").inner_text()
        assert frozen.page.evaluate("() => [window.hacked, document.querySelectorAll('#view img, #view b[id]').length]") == [None, 0]
