"""The one process that keeps the metrics of others in a database: scrapes, writes, thins, until its standard input ends.

    python -m tandem.metrics_database.collect DATABASE --url http://127.0.0.1:9000/metrics --label run=sort --label job=grpo --interval 15
"""

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tandem.metrics_database.rules import Rules
from tandem.metrics_database.scrape import Scraper, Target
from tandem.metrics_database.store import MetricsWriter, Retention
from tandem.runtime.records.sqlite_file import DAMAGED
from tandem.types import RunError

logger = logging.getLogger(__name__)
THIN_EVERY_S = 300.0


def collect(
    path: Path, targets: Callable[[], Sequence[Target]], interval_s: float, retention: Retention, stop: threading.Event, rules: Rules | None = None
) -> None:
    """Scrapes ``targets`` each ``interval_s`` into the database ``path``, and evaluates ``rules`` after it, until ``stop``, and once more then. Raises
    ``RunError`` where it cannot be written."""
    writer, scraper = opened(path, retention), Scraper(timeout_s=min(interval_s, 10.0))
    thinned, due = -THIN_EVERY_S, time.monotonic()
    try:
        while True:
            is_last = stop.is_set()
            now = list(targets())
            writer.append(scraper.leave(now))
            for samples in scraper.scrape(now):
                writer.append(samples)
            if rules is not None:
                writer.evaluate(rules, round(time.time() * 1000))
            if time.monotonic() - thinned >= THIN_EVERY_S:
                writer.thin()
                thinned = time.monotonic()
            if is_last:
                return
            due = max(due + interval_s, time.monotonic())
            stop.wait(due - time.monotonic())
    finally:
        writer.close()


def opened(path: Path, retention: Retention) -> MetricsWriter:
    """Returns the writer of ``path``. No result depends on its samples, so a file that is damaged is kept as ``NAME.damaged``, and a new one begun."""
    try:
        return MetricsWriter(path, retention)
    except RunError as error:
        if DAMAGED not in str(error):
            raise
        logger.warning("%s; it is kept as %s.damaged, and a new one begins", error, path.name)
        for name in (f"{path.name}-wal", f"{path.name}-shm"):
            path.with_name(name).unlink(missing_ok=True)
        path.replace(path.with_name(f"{path.name}.damaged"))
        return MetricsWriter(path, retention)


def _wait_end_of_input(stop: threading.Event) -> None:
    """Sets ``stop`` when the process that started this one closes its input, or ends."""
    while os.read(0, 4096):
        pass
    stop.set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("database", type=Path)
    parser.add_argument("--url", required=True)
    parser.add_argument("--label", action="append", default=[])
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--retention-s", type=float, required=True)
    parser.add_argument("--most-bytes", type=int, required=True)
    given = parser.parse_args()
    stop = threading.Event()
    threading.Thread(target=_wait_end_of_input, args=(stop,), daemon=True).start()
    address = given.url.removeprefix("http://").partition("/")[0]
    target = Target.of(address, dict(each.split("=", 1) for each in given.label))
    retention = Retention(whole_s=given.retention_s, most_bytes=given.most_bytes)
    try:
        collect(given.database, lambda: [target], given.interval, retention, stop)
    except RunError as error:
        sys.exit(f"the metrics database ends here, the run goes on: {error}")


if __name__ == "__main__":
    main()
