"""Queries of the metrics database beside those of a real Prometheus that has the same samples."""

import contextlib
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_processes import end, until
from prometheus_process import need_programs

from tandem.metrics_database.answers import Answers
from tandem.metrics_database.store import MetricsReader, MetricsWriter, Retention
from tandem.observability.alerts import ALERTS
from tandem.observability.dashboards.all import DASHBOARDS
from tandem.observability.recording import RECORDS
from tandem.runtime.rpc.listener import listen

START_S, SAMPLES, EVERY_S = 1_700_000_000, 80, 15
LABELS = {
    "": [{"run": run, "job": "grpo", "instance": f"127.0.0.1:{port}"} for run, port in (("sort", 1), ("other", 2))],
    "tandem_gateway": [{"job": "gateway", "instance": "g:1", "model": model, "backend": f"b{at}", "code": code, "outcome": "ok"}
                       for at, (model, code) in enumerate((("m", "200"), ("m", "503"), ("n", "200")))],
    "vllm": [{"job": "server", "instance": f"s:{at}", "model_name": "tiny", "engine": str(at)} for at in range(2)],
    "tandem_rank": [{"run": "sort", "job": "grpo", "instance": "127.0.0.1:1", "rank": str(rank)} for rank in range(2)],
    "tandem_phase": [{"run": "sort", "job": "grpo", "instance": "127.0.0.1:1", "phase": phase} for phase in ("train", "rollout")],
    "tandem_events": [{"run": "sort", "job": "grpo", "instance": "127.0.0.1:1", "kind": kind} for kind in ("recovery", "damage")],
}  # fmt: skip
BOUNDS = ("0.01", "0.1", "1.0", "10.0", "+Inf")
MORE = (
    "up",
    "-up",
    "1 + 2 * 3 ^ 2 ^ 0.5",
    "time()",
    "up == bool 1",
    "2 * up > 1",
    "sum(up)",
    "sum without (instance) (up)",
    "avg by (job) (tandem_step)",
    "up * on (run) up",
    "tandem_step / on (run) group_left (job) max by (run, job) (tandem_step)",
    "up and on (run) tandem_step > 50",
    "tandem_step unless up",
    "irate(tandem_steps_total[1m])",
    "delta(tandem_reward_mean[2m])",
    "increase(tandem_steps_total[10m])",
    "rate(tandem_phase_seconds_total[20s])",
    "max_over_time(tandem_reward_mean[3m])",
    "min_over_time(tandem_reward_mean[3m])",
    "avg_over_time(tandem_reward_mean[3m])",
    "sum_over_time(tandem_step[1m])",
    "count_over_time(tandem_step[5m])",
    "last_over_time(tandem_step[5m])",
    'label_replace(up, "short", "$1-x", "run", "(..).*")',
    'up{run!="sort"}',
    'up{run=~"s.*|x"}',
    'up{run!~"s.*"}',
    'up{none=""}',
    "abs(-tandem_step)",
    "clamp_max(tandem_step, 40)",
    "clamp_min(tandem_step, 40)",
    "histogram_quantile(1.5, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))",
    "tandem_step % 7",
    "tandem_step / 0",
    "count by (job) (up)",
    "min(tandem_step) or max(tandem_step)",
    "1 / (up - 1)",
    'sum(rate({__name__=~"tandem_s.*_total"}[2m]))',
)


def filled(expr: str) -> str:
    return re.sub(r"\$(run|model|route|job)\b", ".*", expr).replace("$__rate_interval", "1m")


QUERIES = [*dict.fromkeys([filled(query) for dashboard in DASHBOARDS for query in dashboard.queries() if "ALERTS" not in query])]
RULES = [*(record.expr for record in RECORDS), *(alert.expr for alert in ALERTS)]


def names_in(expr: str) -> set[str]:
    text = re.sub(r"\[[^\]]*\]|\{[^}]*\}|\b(by|on|group_left|without)\s*\([^)]*\)", "", re.sub(r'"[^"]*"', "", expr))
    return {name for name in re.findall(r"[a-zA-Z_:][\w:]*(?!\s*\(|[\w:])", text) if name not in ("and", "or", "unless", "bool")}


def made_samples(seed: int) -> list[tuple[dict[str, str], int, float]]:
    """Returns samples of every series that the dashboards and rules read, at uneven times: counters that begin again, gauges, and series that pause."""
    rng, recorded = random.Random(seed), {record.name for record in RECORDS}
    names = sorted(set().union(*map(names_in, [*QUERIES, *RULES])) - recorded)
    found = []
    for name in names:
        prefix = max((each for each in LABELS if name.startswith(each)), key=len)
        for labels in LABELS[prefix]:
            histogram = name.endswith("_bucket")
            counts = [0.0] * len(BOUNDS)
            value = rng.choice((0.0, rng.random() * 50))
            for at in range(SAMPLES):
                when = (START_S + at * EVERY_S) * 1000 + rng.randrange(0, 900)
                if rng.random() < 0.01:
                    value, counts = 0.0, [0.0] * len(BOUNDS)
                if 30 < at < 55 and labels.get("run") == "other":
                    continue
                if histogram:
                    for place in range(len(BOUNDS)):
                        counts[place:] = [count + 1 for count in counts[place:]] if rng.random() < 0.5 else counts[place:]
                    found += [({**labels, "__name__": name, "le": bound}, when, count) for bound, count in zip(BOUNDS, counts, strict=True)]
                    continue
                value = value + rng.random() * 5 if name.endswith(("_total", "_sum", "_count")) else rng.choice((0.0, 1.0, rng.gauss(0, 3)))
                found.append(({**labels, "__name__": name}, when, value))
    return found


@contextlib.contextmanager
def prometheus_with(folder: Path, samples: list[tuple[dict[str, str], int, float]]) -> Iterator[str]:
    """Runs Debian's Prometheus over a database of ``samples``, made by ``promtool``; yields its address."""
    need_programs()
    by_name: dict[str, list[str]] = {}
    for labels, when, value in samples:
        shown = ",".join(f"{name}={json.dumps(text)}" for name, text in labels.items() if name != "__name__")
        by_name.setdefault(labels["__name__"], []).append(f"{labels['__name__']}{{{shown}}} {value!r} {when / 1000:.3f}")
    text = "".join(f"# TYPE {name} unknown\n" + "\n".join(lines) + "\n" for name, lines in by_name.items()) + "# EOF\n"
    (folder / "samples.txt").write_text(text)
    made = subprocess.run(["promtool", "tsdb", "create-blocks-from", "openmetrics", folder / "samples.txt", folder / "data"], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    (folder / "prometheus.yml").write_text("global: {}\n")
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}", "--storage.tsdb.retention.time=100y"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: _is_ready(url) or process.poll() is not None, "Prometheus")
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        end(process)


def _is_ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/-/ready", timeout=5).status_code == 200
    return False


def series_of(data: Any) -> dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]:
    return {tuple(sorted(each["metric"].items())): [(when, float(value)) for when, value in each["values"]] for each in data["result"]}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Answers]]:
    folder, samples = tmp_path_factory.mktemp("both"), made_samples(1)
    writer = MetricsWriter(folder / "metrics.sqlite", Retention())
    writer.append((tuple(sorted(labels.items())), when, value) for labels, when, value in samples)
    writer.close()
    with prometheus_with(folder, samples) as url:
        yield url, Answers(MetricsReader(folder / "metrics.sqlite").read)


def compare(both: tuple[str, Answers], query: str) -> int:
    """Asks both for ``query`` over the time of the samples; returns how many series the answer has."""
    url, answers = both
    # Between samples, at them, before the first and after the last.
    given = {"query": query, "start": str(START_S - 60), "end": str(START_S + SAMPLES * EVERY_S + 400), "step": "97"}
    told = httpx.get(f"{url}/api/v1/query_range", params=given, timeout=60).json()
    assert told["status"] == "success", told
    expected, found = series_of(told["data"]), series_of(answers.answer("query_range", {name: [value] for name, value in given.items()}))
    assert found.keys() == expected.keys(), query
    for labels, points in expected.items():
        assert [when for when, _ in found[labels]] == [when for when, _ in points], (query, labels)
        for (when, mine), (_, theirs) in zip(found[labels], points, strict=True):
            assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-12, nan_ok=True), (query, labels, when)
    return len(expected)


@pytest.mark.full
def test_every_query_of_the_dashboards_and_rules_has_the_values_of_prometheus(both: tuple[str, Answers]) -> None:
    recorded = {record.name for record in RECORDS}
    counts = {query: compare(both, query) for query in [*QUERIES, *RULES] if not names_in(query) & recorded}
    assert len(counts) > 100 and sum(1 for count in counts.values() if count) > 0.95 * len(counts), [query for query, count in counts.items() if not count]


@pytest.mark.parametrize("query", MORE)
def test_the_language_is_that_of_prometheus(both: tuple[str, Answers], query: str) -> None:
    if "time()" in query or "2 ^" in query:
        url, answers = both
        told = httpx.get(f"{url}/api/v1/query", params={"query": query, "time": str(START_S)}, timeout=60).json()["data"]
        found = answers.answer("query", {"query": [query], "time": [str(START_S)]})
        assert found["resultType"] == told["resultType"] == "scalar" and float(found["result"][1]) == pytest.approx(float(told["result"][1]), rel=1e-14)
    else:
        compare(both, query)
