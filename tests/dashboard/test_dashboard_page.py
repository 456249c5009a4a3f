"""The dashboard in a real browser, over runs that the real writers have written, one of them while it is looked at."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from browser import Tab, browser, tab
from http_processes import LoggedProcess, serving_command, until
from recorded_runs import HOSTILE, make_run, row, write_rows, write_step

from tandem.dashboard.report import write_report
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.run_lock import RunLock

PARTS = ("curves", "samples", "timeline", "memory", "hardware", "nodes", "events", "logs", "recipe")
TEXT = HOSTILE.replace("\ud83d", "")


@contextlib.contextmanager
def dashboard(folder: Path, log: Path, *flags: str) -> Iterator[LoggedProcess]:
    """Runs ``tandem dashboard`` at a free port; kills it at the end if it still runs."""
    with serving_command(["dashboard", str(folder), "--port", "0", *flags], log, "dashboard at ") as (process, url, client):
        yield LoggedProcess(process, url.rstrip("/"), client, log)
        assert "Traceback" not in log.read_text(), log.read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "first", [row(step) for step in range(400)], finished=True)
    make_run(folder / "hostile", [row(step) for step in range(5)], text=TEXT)
    return folder


@pytest.fixture(scope="module")
def served(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoggedProcess]:
    with dashboard(runs, tmp_path_factory.mktemp("log") / "dashboard.log") as running:
        yield running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as started:
        yield started


@contextlib.contextmanager
def opened(chromium: Any, served: LoggedProcess, **options: Any) -> Iterator[Tab]:
    """The page in a new profile; at its end nothing may have gone wrong in it, and nothing may have been loaded from elsewhere."""
    with tab(chromium, **options) as page:
        yield page
        assert page.problems == []
        assert [address for address in page.addresses if not address.startswith(served.url)] == []


def go(page: Tab, served: LoggedProcess, address: str) -> None:
    """Opens ``address`` of the page, and waits until it is there."""
    page.page.goto(f"{served.url}/#/{address}")
    page.page.wait_for_function("(wanted) => document.body.dataset.ready === wanted", arg=f"#/{address}")


def test_the_page_runs_nothing_but_its_own_files(served: LoggedProcess) -> None:
    page = served.get("/")
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'" and policy["trusted-types"] == "'none'" and policy["frame-ancestors"] == "'none'"
    assert not re.search(r"<script(?! type=\"module\" src=\"assets/)|\sstyle=|\son\w+=|https?://", page.text)
    own = [each for each in files("tandem.dashboard").joinpath("assets").iterdir() if each.is_file()]
    parsers = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|https?://")
    assert not any(parsers.search(each.read_text()) for each in own) and sum(len(each.read_bytes()) for each in own) < 120_000
    for each in own:
        assert served.get(f"/assets/{each.name}").status_code == 200
    vendored = files("tandem.dashboard").joinpath("assets", "vendor")
    assert "Permission is hereby granted" in vendored.joinpath("uplot.LICENSE").read_text() and "(v1.6.32)" in vendored.joinpath("uplot.js").read_text()[:400]


def test_a_hostile_run_is_text_and_nothing_else(chromium: Any, served: LoggedProcess) -> None:
    with opened(chromium, served) as page:
        go(page, served, "run/hostile/samples")
        assert TEXT.replace("\x1b", "") in page.page.locator(".sample pre").first.inner_text().replace("\x1b", "")
        page.page.get_by_role("button", name="Tokens").first.click()
        page.page.wait_for_selector(".token")
        for part, expected in (("events", "<img src=x"), ("logs", "<img src=x"), ("curves", "<img src=x")):
            go(page, served, f"run/hostile/{part}")
            assert expected in page.page.locator("#view").inner_text()
        assert page.page.evaluate("() => [window.hacked, document.querySelectorAll('#view img, #view b[id]').length]") == [None, 0]


def test_the_report_in_a_file_without_a_network_has_the_figures_of_the_live_page(chromium: Any, served: LoggedProcess, runs: Path, tmp_path: Path) -> None:
    page = write_report([runs / "first"], tmp_path / "report.html")
    shown = "() => [...document.querySelectorAll('.cards > div, .chart .plot')].map((each) => each.getAttribute('aria-label') ?? each.innerText)"
    drawn = "() => [...document.querySelectorAll('.chart .plot')].slice(0, 2).every((each) => each.querySelector('canvas'))"
    size = {"width": 1280, "height": 900}
    with opened(chromium, served, viewport=size) as live, tab(chromium, offline=True, viewport=size) as frozen:
        go(live, served, "run/first/curves")
        frozen.page.goto(page.as_uri())
        for each in (live, frozen):
            each.page.wait_for_function(drawn)
        told = frozen.page.evaluate(shown)
        assert told == live.page.evaluate(shown) and len(told) > 8 and any("held out, sampled: first 0.25, last 0.65" in each for each in told)
        assert "Written at" in frozen.page.locator("#view .notice").first.inner_text() and frozen.problems == []
        assert [address for address in frozen.addresses if not address.startswith((page.as_uri(), "data:"))] == [], "nothing else is loaded"


@pytest.mark.full
def test_curves_are_drawn_enlarged_and_turned_off(chromium: Any, served: LoggedProcess) -> None:
    with opened(chromium, served, viewport={"width": 1280, "height": 900}) as page:
        go(page, served, "run/first/curves")
        accuracy = page.page.locator(".chart", has_text="Accuracy").first
        accuracy.locator("canvas").wait_for()
        label = accuracy.locator(".plot").get_attribute("aria-label")
        assert label is not None and label.startswith("Accuracy. in training: first") and "held out, sampled: first 0.25, last 0.65" in label
        with page.page.expect_request(lambda request: "/api/curves" in request.url and "from=100" in request.url and "to=200" in request.url):
            page.page.get_by_label("From").fill("100")
            page.page.get_by_label("From").press("Enter")
            page.page.get_by_label("To", exact=True).fill("200")
            page.page.get_by_label("To", exact=True).press("Enter")
        # The evaluations, which are beyond the range, are no longer drawn.
        page.page.wait_for_function("() => !document.querySelector('.chart .plot').getAttribute('aria-label').includes('held out')")
        box = accuracy.locator(".u-over").bounding_box()
        assert box is not None
        with page.page.expect_request(lambda request: "/api/curves" in request.url and "from=1" in request.url) as asked:
            page.page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
            page.page.mouse.down()
            page.page.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 60, steps=4)
            page.page.mouse.up()
        low, high = (float(httpx.URL(asked.value.url).params[name]) for name in ("from", "to"))
        assert 120 < low < 130 and 170 < high < 180, "a drag across a chart enlarges it"
        page.page.get_by_role("button", name="All", exact=True).click()
        assert page.page.get_by_label("From").input_value() == ""
        key = accuracy.get_by_role("button", name="in training")
        key.click()
        assert key.get_attribute("aria-pressed") == "false"
        page.page.locator("label", has_text="x axis").get_by_role("combobox").select_option("time")
        with page.page.expect_request(lambda request: "axis=time" in request.url):
            page.page.reload()
            page.page.wait_for_selector("body[data-ready]")
            page.page.locator("label", has_text="x axis").get_by_role("combobox").select_option("time")


@pytest.mark.full
def test_samples_are_filtered_searched_and_coloured_by_token(chromium: Any, served: LoggedProcess) -> None:
    with opened(chromium, served) as page:
        go(page, served, "run/first/samples")
        assert page.page.locator(".sample").count() == 12 and "mean reward 0.25" in page.page.locator("#view").inner_text()
        page.page.get_by_label("Which samples").select_option("correct")
        page.page.wait_for_function("() => document.querySelectorAll('.sample').length === 3")
        page.page.get_by_role("button", name="Tokens").first.click()
        page.page.wait_for_selector(".token")
        colour = "() => getComputedStyle(document.querySelectorAll('.token')[1]).backgroundColor"
        by_probability = page.page.evaluate(colour)
        assert "The stronger, the less likely the model thought the token." in page.page.locator(".colour").inner_text()
        page.page.get_by_label("Colour by").select_option("advantage")
        assert page.page.evaluate(colour) != by_probability and "Green: made more likely" in page.page.locator(".colour").inner_text()
        page.page.get_by_label("Colour by").select_option("entropy")
        shares = [page.page.evaluate(f"() => document.querySelectorAll('.token')[{number}].style.getPropertyValue('--share')") for number in range(3)]
        assert shares == ["2%", "49%", "0%"], "of 2 nats, at most 65 %; the last has none"
        page.page.locator(".token").first.focus()
        page.page.keyboard.press("ArrowRight")
        detail = page.page.locator(".token-detail").inner_text()
        assert "log-probability -1.5 (22.3 %), when it was drawn -1.2" in detail and "entropy of the policy 1.5 nats" in detail
        page.page.get_by_role("button", name="The same prompt in all steps").first.click()
        page.page.wait_for_function("() => document.querySelectorAll('.sample .of').length === 16")
        page.page.get_by_role("button", name="Back to the step").click()
        page.page.get_by_label("Text in prompt or completion").fill("answer 0 of step 1")
        page.page.get_by_role("button", name="Search all steps").click()
        page.page.wait_for_function("() => document.querySelectorAll('.sample .of').length === 3")
        assert "step 1" in page.page.locator(".of").first.inner_text()


@pytest.mark.full
def test_the_timeline_is_moved_with_the_keyboard_and_a_phase_is_described(chromium: Any, served: LoggedProcess) -> None:
    with opened(chromium, served, viewport={"width": 1280, "height": 900}) as page:
        go(page, served, "run/first/timeline")
        with page.page.expect_response(lambda response: "step=2" in response.url) as shown:
            page.page.get_by_label("Step", exact=True).fill("2")
            page.page.get_by_label("Step", exact=True).press("Enter")
        shown.value.finished()
        page.page.evaluate("() => new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
        canvas = page.page.locator("canvas")
        box = canvas.bounding_box()
        assert box is not None
        step = served.get("/api/phases?run=first&step=2").json()
        (bar,) = [bar for lane in step["lanes"] for bar in lane["bars"] if bar[2] == "train" and bar[3] == 2]
        share = ((bar[0] + bar[1]) / 2 - step["from"]) / (step["to"] - step["from"])
        canvas.click(position={"x": 84 + (box["width"] - 96) * share, "y": 29})
        assert "train of trainer, step 2" in page.page.locator(".phase").inner_text()
        page.page.wait_for_function("() => document.querySelector('.phase pre')?.textContent.includes('micro_batches')")
        canvas.focus()
        with page.page.expect_request(lambda request: "/api/phases" in request.url and "from=" in request.url):
            page.page.keyboard.press("+")
        with page.page.expect_request(lambda request: "/api/phases" in request.url):
            page.page.keyboard.press("Home")


@pytest.mark.full
def test_runs_are_chosen_and_compared_with_the_keyboard(chromium: Any, served: LoggedProcess) -> None:
    with opened(chromium, served) as page:
        go(page, served, "")
        for name in ("first", "hostile"):
            page.page.get_by_label(f"Compare {name}").focus()
            page.page.keyboard.press("Space")
        page.page.get_by_role("button", name="Compare 2 runs").focus()
        page.page.keyboard.press("Enter")
        page.page.wait_for_function("() => document.querySelector('#title').textContent === 'Comparison of 2 runs'")
        page.page.wait_for_selector(".chart canvas")
        assert page.page.locator(".chart", has_text="Accuracy").first.locator(".key").count() == 4, "of each run the curve and its evaluations"
        assert page.violations() == []


@pytest.mark.full
def test_a_run_that_grows_is_followed_and_shown_as_live(chromium: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "growing", [row(step) for step in range(3)], steps=0)
    stop = threading.Event()

    def train() -> None:
        with Journal(folder / "journal.sqlite") as journal:
            for step in range(3, 60):
                write_step(journal, step)
                write_rows(folder, [row(step)])
                if stop.wait(0.2):
                    return

    with dashboard(tmp_path / "runs", tmp_path / "log") as served, opened(chromium, served) as page:
        go(page, served, "run/growing/samples")
        assert page.page.locator("#badges").inner_text() == "not finished" and "has no samples" in page.page.locator("#view").inner_text()
        with RunLock(folder):
            training = threading.Thread(target=train)
            training.start()
            try:
                page.page.wait_for_function("() => document.querySelector('#badges').textContent === 'live'")
                page.page.wait_for_selector(".sample")
                go(page, served, "run/growing/curves")
                page.page.wait_for_function("() => parseInt(document.querySelector('#summary').textContent) > 8")
                go(page, served, "run/growing/samples")
                page.page.wait_for_function("() => Number(document.querySelector('.toolbar input[type=number]').value) > 10")
                go(page, served, "")
                page.page.wait_for_function("() => document.querySelector('.badge.live')")
            finally:
                stop.set()
                training.join()
        page.page.wait_for_function("() => !document.querySelector('.badge.live')")
        make_run(tmp_path / "runs" / "another", [row(0)], steps=0)
        page.page.wait_for_function("() => document.querySelector('#view').innerText.includes('another')")


@pytest.mark.full
def test_sizes_are_whole_no_chart_is_without_values_and_the_tab_is_on_the_screen(chromium: Any, served: LoggedProcess) -> None:
    with opened(chromium, served, viewport={"width": 360, "height": 900}) as page:
        go(page, served, "run/first/memory")
        shown = page.page.evaluate("() => [...document.querySelectorAll('#tabs a[aria-current]')].map((tab) => tab.getBoundingClientRect())[0]")
        assert shown["left"] >= 0 and shown["right"] <= 360, "the tab of the part is on the screen"
        assert page.page.locator("figcaption").all_inner_texts() == ["trainbytes"], "of the charts of the machine the run has no metric"
        ticks = "() => import('./assets/words.js').then((words) => words.byteTicks(0, 437 * 2 ** 20, 5).map(words.bytes))"
        assert page.page.evaluate(ticks) == ["0 B", "100 MiB", "200 MiB", "300 MiB", "400 MiB"]
        go(page, served, "run/100%/curves")
        assert "there is no run '100%'" in page.page.locator("#notice").inner_text()
        # The answer 404 is a message of the console.
        page.problems.clear()


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_core_finds_nothing(chromium: Any, served: LoggedProcess, scheme: str, width: int) -> None:
    with opened(chromium, served, color_scheme=scheme, viewport={"width": width, "height": 800}) as page:
        for address in ("", *(f"run/first/{part}" for part in PARTS), "run/hostile/samples", "compare/first/hostile"):
            go(page, served, address)
            if address.endswith("samples"):
                page.page.get_by_role("button", name="Tokens").first.click()
                page.page.wait_for_selector(".token")
            assert page.violations() == [], address
            assert page.page.evaluate("() => document.documentElement.scrollWidth <= innerWidth"), f"{address}: nothing is wider than the screen"
        background = page.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(18, 22, 27)" if scheme == "dark" else "rgb(247, 248, 250)")


@pytest.mark.full
def test_beyond_this_machine_the_page_asks_for_the_token_that_was_printed(chromium: Any, runs: Path, tmp_path: Path) -> None:
    with dashboard(runs, tmp_path / "log", "--host", "0.0.0.0") as served:
        address, token = re.findall(r"(http://\S+)/#token=(\S+)", served.log.read_text())[0]
        served.url = address.replace("0.0.0.0", "127.0.0.1")
        assert served.get("/api/runs").status_code == 401
        with tab(chromium) as page:
            page.open(f"{served.url}/")
            assert page.page.get_by_label("Token of the dashboard").is_visible()
            page.problems.clear()
            page.page.get_by_label("Token of the dashboard").fill(token)
            page.page.get_by_role("button", name="Open").click()
            page.page.wait_for_selector("text=hostile")
            assert page.problems == []
        with tab(chromium) as page:
            page.open(f"{served.url}/#token={token}")
            assert page.page.url == f"{served.url}/", "the token is in no history"
            page.page.wait_for_selector("text=hostile")


def test_events_tell_what_is_new_and_the_server_ends_at_once(runs: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "growing", [row(0)], steps=0)
    with dashboard(tmp_path / "runs", tmp_path / "log") as served:
        with served.client.stream("GET", f"{served.url}/api/stream?run=growing") as stream:
            lines = stream.iter_lines()
            assert next(lines) == "event: open"
            write_rows(folder, [row(1)])
            news = next(json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ") and line != "data: {}")
            assert news == {"runs": ["growing"], "live": []}
            # A stream that is open does not hold up the end.
            assert served.stop() == 0
        until(lambda: served.process.poll() == 0, "the end of the server")
