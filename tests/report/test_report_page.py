"""The page of a run: its curves are those of the run's files, it is small, it needs no network, and it shows no secret."""

import itertools
import json
import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tandem.config.recipe import load_config
from tandem.jobs.run_files import write_recipe
from tandem.report.compare import compare_runs
from tandem.report.page import asset
from tandem.report.run_facts import read_facts
from tandem.report.run_report import report_run
from tandem.runtime.records.journal import Journal
from tandem.runtime.records.metrics import MetricsFile
from tandem.runtime.records.tracing import Tracer
from tandem.types import FinishReason, Sample, Score, ScoreState, UserError, WeightVersion

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><img src=x onerror=alert(1)> & \u2028 end"


def rl_row(step: int) -> dict[str, Any]:
    """Returns a row with every metric of reinforcement learning; each value is a known function of the step."""
    names = (
        "reward/mean", "reward/std", "reward/frac_zero_std", "reward/fault_share", "reward/correct", "reward/format", "accuracy", "kl", "actor/ppo_kl",
        "actor/entropy", "actor/pg_loss", "actor/pg_clipfrac", "actor/grad_norm", "actor/lr", "response_length/mean", "response_length/max",
        "response_length/clip_ratio", "perf/tokens_per_s", "perf/rollout_tokens_per_s", "timing_s/step", "timing_s/train", "timing_s/rollout",
        "memory/train/measured", "mine/own_metric",
    )  # fmt: skip
    return {"step": step, "mismatch_kl": 0.0, **{name: value(name, step) for name in names}}


def value(name: str, step: int) -> float:
    return len(name) + math.sin(step / 50 + len(name))


def make_run(folder: Path, rows: list[dict[str, Any]], *overrides: str, samples_at: tuple[int, ...] = (), text: str = "42") -> Path:
    """Writes the files of a run of the sort recipe."""
    folder.mkdir(parents=True)
    write_recipe(load_config(ROOT / "recipes" / "sort.yaml", overrides), folder)
    metrics = MetricsFile(folder / "metrics.jsonl")
    for row in rows:
        metrics.append(row)
    metrics.close()
    with Journal(folder / "journal.sqlite") as journal:
        for step in samples_at:
            version = (WeightVersion(1, step),)
            samples = [
                Sample(f"{step}/p{p}/{i}", f"p{p}", i, (5, 6, 7), (8, 9), (-1.0,) * 2, (-1.0,) * 2, version * 2, FinishReason.LENGTH, text)
                for p in range(4)
                for i in range(4)
            ]
            journal.commit_samples(step, samples)
            parts = {"correct": 0.5, HOSTILE: 0.25}
            journal.commit_scores(step, [Score(s.id, ScoreState.NUMBER, 0.75, parts, correct=True) for s in samples])
        for step in (0, 5):
            example = {"prompt": HOSTILE, "completion": HOSTILE, "ground_truth": "1", "correct": True, "reward": 1.0}
            result = {"accuracy": 0.25 + step / 100, "standard_error": 0.01, "count": 4, "examples": [example]}
            journal.commit_evaluation(step, "sampled", result)
    return folder


def data_of(page: str) -> dict[str, Any]:
    """Returns the data that the page's script draws. It must be JSON without NaN."""

    def refuse(name: str) -> None:
        raise AssertionError(f"the page's data has {name}")

    (text,) = re.findall(r"<script type='application/json' id='data'>(.*?)</script>", page, re.S)
    data: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return data


def charts_of(page: str) -> dict[str, dict[str, Any]]:
    """Returns the charts of a page by their title."""
    charts, found = data_of(page)["charts"], {}
    for number, title in re.findall(r"data-chart='(\d+)'><figcaption>(.*?)(?:<span>.*?</span>)?</figcaption>", page):
        found[title] = charts[int(number)]
    return found


class Tags(HTMLParser):
    """Collects the tags and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_has_the_curve_of_every_metric_with_the_values_of_the_rows(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [rl_row(step) for step in range(7)])
    page = report_run(run).read_text()
    charts, data = charts_of(page), data_of(page)
    drawn = {
        "Reward": ("reward/mean", "reward/std"), "Reward function correct": ("reward/correct",), "Reward function format": ("reward/format",),
        "KL divergence": ("kl", "actor/ppo_kl"), "Entropy": ("actor/entropy",), "Policy loss": ("actor/pg_loss",), "Gradient norm": ("actor/grad_norm",),
        "Learning rate": ("actor/lr",), "Response length": ("response_length/mean", "response_length/max"),
        "Truncated responses": ("response_length/clip_ratio",), "Throughput": ("perf/tokens_per_s", "perf/rollout_tokens_per_s"),
        "Groups without spread": ("reward/frac_zero_std",), "mine/own_metric": ("mine/own_metric",),
    }  # fmt: skip
    for title, keys in drawn.items():
        for series, key in zip(charts[title]["series"], keys, strict=True):
            assert series["y"] == pytest.approx([value(key, step) for step in range(7)], rel=1e-4), title
    accuracy = {series["name"]: series for series in charts["Accuracy"]["series"]}
    assert accuracy["in training"]["y"] == pytest.approx([value("accuracy", step) for step in range(7)], rel=1e-4)
    held_out = accuracy["held out, sampled"]
    assert (held_out["x"], held_out["y"], held_out["error"]) == ([0, 5], [0.25, 0.3], [0.01, 0.01])
    assert charts["Accuracy"]["lines"] == [{"y": 0.9, "name": "target"}]
    assert data["runs"][0]["steps"] == list(range(7))
    assert data["runs"][0]["seconds"][2] == pytest.approx(sum(value("timing_s/step", step) for step in range(3)), rel=1e-4)
    assert {series["name"] for series in charts["Time of each phase"]["series"]} == {"train", "rollout"}


def test_page_of_a_long_run_is_below_a_megabyte_and_needs_no_network(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [rl_row(step) for step in range(3000)], samples_at=tuple(range(0, 3000, 150)), text="word " * 4000)
    tracer = Tracer(run / "traces", steps=(1,))
    tracer.begin(1)
    for number in range(4000):
        with tracer.span("forward", micro_batch=number, stage=0):
            pass
    page = report_run(run).read_bytes()
    assert len(page) < 1_000_000
    text = page.decode()
    assert "1,000 of the shortest spans are left out" in text
    tags = Tags(text).tags
    assert not [tag for tag, given in tags if "src" in given or tag in ("link", "iframe", "img", "object")]
    assert not [given["href"] for tag, given in tags if not given.get("href", "#").startswith("#")]  # type: ignore[union-attr]
    assert "fetch(" not in text and "import(" not in text and "url(" not in text.replace("url(#clip", "")
    reward = charts_of(text)["Reward"]["series"][0]
    assert len(reward["y"]) == 600 == len(data_of(text)["runs"][0]["steps"])
    first = [value("reward/mean", step) for step in range(5)]
    assert (reward["y"][0], reward["low"][0], reward["high"][0]) == pytest.approx((sum(first) / 5, min(first), max(first)), rel=1e-4)


def test_texts_of_models_and_users_are_escaped(tmp_path: Path) -> None:
    rows = [{**rl_row(0), f"reward/{HOSTILE}": 1.0}]
    run = make_run(tmp_path / "run", rows, samples_at=(0,), text=HOSTILE)
    with Journal(run / "journal.sqlite") as journal:
        journal.record_event("recovery", {"reason": HOSTILE})
        journal.set("commands", [HOSTILE])
    page = report_run(run).read_text()
    assert "<img" not in page and page.count("</script>") == 2
    shown = Tags(page)
    assert not [tag for tag, given in shown.tags if "onerror" in given] and shown.text.count(HOSTILE) >= 12
    assert "step 0: mean reward 0.750 of 16 samples" in shown.text and "token ids 5 6 7" in shown.text and "2 tokens, truncated" in shown.text


def test_samples_are_taken_evenly_over_the_run_with_its_first_and_last_step(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [rl_row(step) for step in range(100)], samples_at=(*range(0, 100, 2), 99, 100))
    steps = [int(step) for step in re.findall(r"data-label='step (\d+):", report_run(run).read_text())]
    assert len(steps) == 20 and steps[0] == 0 and steps[-1] == 99, "step 100 has samples and was not trained on yet"
    assert all(4 <= after - before <= 6 for before, after in itertools.pairwise(steps[:-1]))


def test_page_has_no_nan_where_there_is_no_value(tmp_path: Path) -> None:
    rows = [{**rl_row(0), "actor/grad_norm": math.nan, "kl": math.inf, "perf/tokens_per_s": None}, rl_row(1)]
    run = make_run(tmp_path / "run", rows)
    with Journal(run / "journal.sqlite") as journal:
        journal.commit_evaluation(1, "greedy", {"accuracy": math.nan, "standard_error": 0.1, "count": 1})
    page = report_run(run).read_text()
    charts = charts_of(page)
    assert charts["Accuracy"]["series"][2]["y"] == [None]
    assert charts["Gradient norm"]["series"][0]["y"][0] is None and charts["KL divergence"]["series"][0]["y"][0] is None
    assert not re.search(r"\bnan\b|\binf\b", Tags(re.sub(r"<(script|style).*?</\1>", "", page, flags=re.S)).text, re.I)
    empty = report_run(make_run(tmp_path / "empty", [])).read_text()
    assert "No step was completed." in empty and "not finished" in empty


def test_configuration_has_every_key_and_its_default_and_never_a_secret(tmp_path: Path) -> None:
    overrides = (
        "rewards.functions=[{function: 'mine.py:judge', arguments: {api_key: aaa111, token: bbb222, url: 'https://u:ccc333@host/x', "
        "note: 'hf_abcdefghijklmnopqrst', "
        "deep: {password: ddd444}, eos_token: '<|end|>'}}]",
        "trainer.learning_rate=1e-3", "checkpoint.keep=7",
    )  # fmt: skip
    run = make_run(tmp_path / "run", [rl_row(0)], *overrides)
    other = make_run(tmp_path / "other", [rl_row(0)], "trainer.learning_rate=2e-3")
    page = report_run(run).read_text()
    both = compare_runs([run, other], tmp_path / "both.html").read_text()
    for text in (page, both):
        assert not re.search("aaa111|bbb222|ccc333|ddd444|abcdefghijklmnop", text)
        assert "(hidden)" in text and "&lt;|end|&gt;" in text
    assert "<tr class='changed'><td><code>checkpoint.keep</code></td><td><code>7</code></td><td class='quiet'><code>2</code></td></tr>" in page
    facts = read_facts(run)
    assert facts.recipe is not None and len(facts.recipe) > 100
    assert all(f"<code>{key}</code>" in page for key in facts.recipe)


def test_two_runs_share_each_chart_and_a_table_has_the_keys_that_differ(tmp_path: Path) -> None:
    first = make_run(tmp_path / "first", [rl_row(step) for step in range(3)], "trainer.learning_rate=1e-3")
    second = make_run(tmp_path / "second", [rl_row(step) for step in range(5)], "trainer.learning_rate=2e-3", "run.name=second")
    page = compare_runs([first, second], tmp_path / "compare.html").read_text()
    assert [run["name"] for run in data_of(page)["runs"]] == ["first", "second"]
    entropy = charts_of(page)["Entropy"]["series"]
    assert [series["run"] for series in entropy] == [0, 1] and [len(series["y"]) for series in entropy] == [3, 5]
    assert "Reward, mean" in charts_of(page) and "Accuracy, held out, sampled" in charts_of(page)
    (table,) = re.findall(r"Differences of the recipes</h2>.*?<table>(.*?)</table>", page)
    assert re.findall(r"<code>(.*?)</code>", table) == ["trainer.learning_rate", "0.001", "0.002"]
    nested = make_run(tmp_path / "more" / "first", [rl_row(0)])
    names = [run["name"] for run in data_of(compare_runs([first, nested], tmp_path / "x.html").read_text())["runs"]]
    assert names == [f"{tmp_path.name}/first", "more/first"]
    with pytest.raises(UserError, match="is named twice"):
        compare_runs([first, first], tmp_path / "x.html")
    with pytest.raises(UserError, match="is not a run"):
        compare_runs([first, tmp_path], tmp_path / "x.html")


def test_alarms_are_at_the_top_of_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [{**rl_row(0), "mismatch_kl": 1e-3}])
    with Journal(run / "journal.sqlite") as journal:
        for kind, reason in (("damage", "a file lost its digest"), ("damage", "another"), ("mismatch", "they disagree"), ("resume", "no alarm")):
            journal.record_event(kind, {"step": 0, "reason": reason})
    page = report_run(run).read_text()
    assert data_of(page)["marks"] == [[0, "mismatch"], [0, "resume"]]
    top = page[: page.index("<main>")]
    assert "a file lost its digest (and 1 more, below)" in top and "they disagree" in top and "no alarm" not in top
    assert "another" in page and "mismatch_kl is not 0: at most 0.001" in page


# -- colours -----------------------------------------------------------------------------------------------------------

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
    for block in re.findall(r":root \{(.*?)\}", asset("report.css"), re.S):
        yield dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


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


@pytest.mark.full
def test_script_draws_every_chart_in_a_browser(tmp_path: Path) -> None:
    browser = next((found for name in ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    run = make_run(tmp_path / "run", [rl_row(step) for step in range(50)], samples_at=(0, 49))
    tracer = Tracer(run / "traces", steps=(1,))
    tracer.begin(1)
    with tracer.span("forward", micro_batch=0, stage=0):
        pass
    for path in (report_run(run), compare_runs([run, make_run(tmp_path / "other", [rl_row(0)])], tmp_path / "both.html")):
        done = subprocess.run(
            [
                browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2000",
                "--dump-dom", path.as_uri(),
            ],
            capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        drawn = done.stdout
        count = len(data_of(path.read_text())["charts"])
        figures = re.findall(r"<figure.*?</figure>", drawn, re.S)
        assert len(figures) == count and all("<svg role=" in figure and ("<path" in figure or "<rect data-group" in figure) for figure in figures)
        assert "NaN" not in "".join(figures)
