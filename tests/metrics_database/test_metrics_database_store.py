"""The metrics database on the disk: what is kept, for how long, in how much room, and through kills and bad queries."""

import http.server
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_processes import COMMAND, end, until

from tandem.metrics_database.answers import Answers, number_text
from tandem.metrics_database.collect import opened
from tandem.metrics_database.promql.syntax import NAME, Matcher
from tandem.metrics_database.scrape import Scraper, Target, samples_of, targets_in
from tandem.metrics_database.store import MetricsReader, MetricsWriter, Retention
from tandem.types import RunError, UserError

NAN = float("nan")
UP = (Matcher(NAME, "=", "x"),)
LABELS = ((NAME, "x"), ("run", "sort"))


def values(path: Path, start: int = 0, end: int = 2**60) -> list[tuple[int, float | None]]:
    return [pair for series in MetricsReader(path).read(UP, start, end) for pair in zip(series.times, series.values, strict=True)]


def test_every_number_comes_back_with_its_bits_and_an_end_is_no_number(tmp_path: Path) -> None:
    given = [0.1, 0.0, 5e-324, 1.7976931348623157e308, float("inf"), float("-inf"), 2.0**53, None, NAN]
    writer = MetricsWriter(tmp_path / "metrics.sqlite", Retention())
    writer.append((LABELS, at, value) for at, value in enumerate(given))
    assert repr([value for _, value in values(tmp_path / "metrics.sqlite")]) == repr(given), "while it is written"
    writer.close()
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.sqlite"]
    assert repr([value for _, value in values(tmp_path / "metrics.sqlite")]) == repr(given)
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.sqlite"], "a reader leaves nothing"


def test_old_samples_become_one_each_minute_and_then_none(tmp_path: Path) -> None:
    path, now_s = tmp_path / "metrics.sqlite", 10_000
    writer = MetricsWriter(path, Retention(all_s=1000, coarse_s=60, whole_s=5000))
    writer.append((LABELS, when * 1000, float(when)) for when in range(0, now_s, 7))
    for _ in range(2):
        writer.thin(now_s)
        kept = [when // 1000 for when, _ in values(path)]
        coarse = (now_s - 1000) // 60 * 60
        assert [when for when in kept if when >= coarse] == [when for when in range(0, now_s, 7) if when >= coarse], "the newest are all there"
        old = [when for when in range(0, now_s, 7) if 5000 <= when < coarse]
        assert [when for when in kept if when < coarse] == [when for when, after in zip(old, [*old[1:], coarse], strict=True) if when // 60 != after // 60]
    writer.close()


def test_the_file_stays_within_its_size_and_loses_the_oldest(tmp_path: Path) -> None:
    path, most = tmp_path / "metrics.sqlite", 2**20
    writer = MetricsWriter(path, Retention(all_s=1e9, whole_s=1e9, most_bytes=most))
    for block in range(30):
        writer.append((((NAME, "x"), ("at", str(series))), block * 100_000 + at * 1000, 1.0 * at) for series in range(50) for at in range(100))
        writer.thin(3000)
    writer.close()
    kept = [when for when, _ in values(path)]
    assert path.stat().st_size <= 1.3 * most and max(kept) == 2_999_000 and min(kept) > 1_000_000 and len(kept) > 10_000


def test_a_second_process_that_is_killed_loses_nothing_that_was_written(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
from tandem.metrics_database.store import MetricsWriter, Retention
writer = MetricsWriter(Path(sys.argv[1]), Retention())
for at in range(10**6):
    writer.append([((("__name__", "x"),), at, float(at))])
    print(at, flush=True)
"""
    path = tmp_path / "metrics.sqlite"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(100)]
        process.kill()
        said += [int(line) for line in process.stdout.read().splitlines() if line]
    kept = [when for when, _ in values(path)]
    assert kept[: len(said)] == said and len(kept) <= len(said) + 1
    MetricsWriter(path, Retention()).close()
    assert [when for when, _ in values(path)] == kept


@contextmanager
def exposing(texts: list[str]) -> Iterator[str]:
    """Answers ``/metrics`` with each of ``texts`` once, then with an error; yields the address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = texts.pop(0).encode() if texts else b""
            self.send_response(200 if body else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_series_that_is_missing_ends_and_so_do_all_of_a_target_that_does_not_answer(tmp_path: Path) -> None:
    first = '# TYPE a counter\na_total{run="own",kind="x y\\"z"} 3\nb{le="+Inf"} NaN\n'
    with exposing([first, 'b{le="+Inf"} 2\n']) as address:
        (tmp_path / "one.json").write_text(json.dumps([{"targets": [address], "labels": {"job": "grpo", "run": "sort", "__scheme__": "http"}}]))
        (tmp_path / "damaged.json").write_text("[{")
        (target,) = targets_in(tmp_path)
        scraper = Scraper()
        told = [
            {(dict(labels)[NAME], dict(labels).get("run")): value for samples in scraper.scrape([target]) for labels, _, value in samples} for _ in range(3)
        ]
    assert told[0]["a_total", "own"] == 3 and told[0]["b", "sort"] != told[0]["b", "sort"] and told[0]["up", "sort"] == 1.0
    assert told[1]["a_total", "own"] is None and told[1]["b", "sort"] == 2.0
    assert told[2]["b", "sort"] is None and told[2]["up", "sort"] == 0.0
    gone = scraper.leave([])
    assert {dict(labels)[NAME] for labels, _, value in gone if value is None} == {"up", "scrape_duration_seconds", "scrape_samples_scraped"}


class Patient(http.server.ThreadingHTTPServer):
    request_queue_size = 32
    """Of connections that are not accepted yet: one more is tried again by the kernel a second later, which is no fault of the target."""


class Slow(http.server.BaseHTTPRequestHandler):
    """Answers ``/good``; ``/silent`` gets nothing, ``/slow`` a byte now and then for good, ``/cut`` half of an answer."""

    stop = threading.Event()

    def do_GET(self) -> None:
        if self.path == "/silent":
            self.stop.wait(60)
            return
        self.send_response(200)
        body = b"x 1\n"
        if self.path != "/slow":
            self.send_header("Content-Length", str(len(body) * (2 if self.path == "/cut" else 1)))
        self.end_headers()
        self.wfile.write(body)
        while self.path == "/slow" and not self.stop.wait(0.05):
            self.wfile.write(b"#")

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_targets_that_are_silent_slow_or_cut_off_have_no_value_and_hold_up_no_other() -> None:
    server = Patient(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever).start()
    try:
        targets = [Target(f"http://127.0.0.1:{server.server_port}/{name}", (("run", name),)) for name in (*["silent"] * 6, "slow", "cut", "good")]
        began = time.monotonic()
        answered = [{dict(labels)[NAME]: value for labels, _, value in samples} for samples in Scraper(timeout_s=2.0).scrape(targets)]
        assert [each["up"] for each in answered] == [0.0] * 8 + [1.0] and [each.get("x") for each in answered] == [None] * 8 + [1.0]
        assert time.monotonic() - began < 6 * 2.0, "all are asked at the same time"
    finally:
        Slow.stop.set()
        server.shutdown()
        server.server_close()


def test_an_exposition_is_read_as_prometheus_does_it() -> None:
    labels = Target.of("h:1", {"job": "grpo"}).labels
    found = samples_of('x{instance="mine"} 1\ny 2\n', labels)
    assert found == {((NAME, "x"), ("instance", "mine"), ("job", "grpo")): 1.0, ((NAME, "y"), ("instance", "h:1"), ("job", "grpo")): 2.0}


@pytest.mark.parametrize(
    "query",
    ["", "up(", "{}", "rate(up)", "up[5m]", "foo(up)", "1 == 2", "1 and up", 'up{run="a}', "up{run~1}", "sum(up, up)", "up + on (job) x",
     "label_replace(up)", "(" * 500, "topk(1, up)", 'up{run=~"("}', "up offset 5m", "x" * 30_000, "'text' + 1"],
    ids=lambda query: query[:20] or "empty",
)  # fmt: skip
def test_a_query_that_cannot_be_is_one_line(tmp_path: Path, query: str) -> None:
    path = tmp_path / "metrics.sqlite"
    writer = MetricsWriter(path, Retention())
    writer.append((((NAME, name), ("instance", instance), ("job", "j")), 1000, 1.0) for name in ("up", "x") for instance in ("a", "b"))
    writer.close()
    with pytest.raises(UserError) as raised:
        Answers(MetricsReader(path).read).answer("query", {"query": [query], "time": ["1"]})
    assert "\n" not in str(raised.value)


def test_numbers_are_written_as_prometheus_writes_them() -> None:
    assert [number_text(value) for value in (1.0, 0.1, 1e-7, 1e22, NAN, float("inf"), -float("inf"), -2.5)] == [
        "1", "0.1", "0.0000001", "10000000000000000000000", "NaN", "+Inf", "-Inf", "-2.5",
    ]  # fmt: skip


def test_a_damaged_database_is_kept_beside_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.sqlite"
    for damage in (b"no database" * 1000, b"other"):
        path.write_bytes(damage)
        writer = opened(path, Retention())
        writer.append([(LABELS, 1, 2.0)])
        writer.close()
        assert values(path) == [(1, 2.0)] and (tmp_path / "metrics.sqlite.damaged").read_bytes() == damage
    again = opened(path, Retention())
    assert values(path) == [(1, 2.0)]
    again.close()


def test_no_database_and_a_damaged_one_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="does not exist"):
        MetricsReader(tmp_path / "metrics.sqlite").read(UP, 0, 1)
    (tmp_path / "metrics.sqlite").write_bytes(b"no database" * 1000)
    with pytest.raises(RunError, match="damaged"):
        MetricsReader(tmp_path / "metrics.sqlite").read(UP, 0, 1)


@pytest.mark.full
def test_the_command_keeps_what_processes_expose_and_answers_for_grafana(tmp_path: Path) -> None:
    targets = tmp_path / "targets"
    targets.mkdir()
    texts = [f"x {number}\n" for number in range(1000)]
    with exposing(texts) as address:
        (targets / "one.json").write_text(json.dumps([{"targets": [address], "labels": {"job": "j"}}]))
        log = tmp_path / "log"
        with log.open("wb") as sink:
            given = ["up", "observability", "--embedded", "--folder", str(tmp_path / "o"), "--targets-folder", str(targets), "--port", "0", "--interval", "1"]
            process = subprocess.Popen([COMMAND, *given], stdout=sink, stderr=sink)
        try:
            until(lambda: b"API at" in log.read_bytes() or process.poll() is not None, "the database")
            found = re.search(r"API at (http://\S+)", log.read_text())
            assert found is not None, log.read_text()
            url = found[1]
            ask = lambda path, **form: httpx.post(f"{url}/api/v1/{path}", data=form, timeout=30).json()
            until(lambda: len(ask("query", query="count_over_time(x[1m])")["data"]["result"]) and
                  float(ask("query", query="count_over_time(x[1m])")["data"]["result"][0]["value"][1]) > 2, "three samples")  # fmt: skip
            assert httpx.get(f"{url}/api/v1/label/__name__/values").json()["data"] == ["scrape_duration_seconds", "scrape_samples_scraped", "up", "x"]
            (targets / "two.json").write_text(json.dumps([{"targets": ["127.0.0.1:9"], "labels": {"job": "down"}}]))
            of_alerts = 'count_over_time(ALERTS{alertname="TandemTargetDown"}[1m])'
            until(lambda: any(float(each["value"][1]) > 1 for each in ask("query", query=of_alerts)["data"]["result"]), "two evaluations of the rules")
            [alert] = ask("query", query="ALERTS")["data"]["result"]
            rest = {"alertname": "TandemTargetDown", "alertstate": "pending", "severity": "critical", "job": "down", "instance": "127.0.0.1:9"}
            assert alert["metric"] == {NAME: "ALERTS", **rest} and alert["value"][1] == "1"
            assert ask("query", query="up")["data"]["result"][0]["metric"] == {NAME: "up", "instance": address, "job": "j"}
            assert ask("query", query="nonsense(")["errorType"] == "bad_data"
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0, log.read_text()
        finally:
            end(process)
    assert sorted(each.name for each in (tmp_path / "o").iterdir()) == ["metrics.sqlite"]
