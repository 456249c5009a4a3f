"""Keeps the series of all processes in the targets folder without a Prometheus, and answers its queries for Grafana."""

import threading
from collections.abc import Callable
from pathlib import Path

from tandem.metrics_database.answers import Answers
from tandem.metrics_database.collect import collect
from tandem.metrics_database.rules import AlertRule, RecordingRule, Rules
from tandem.metrics_database.scrape import targets_in
from tandem.metrics_database.server import ApiServer
from tandem.metrics_database.store import FILE, MetricsReader, Retention
from tandem.observability.alerts import ALERTS
from tandem.observability.programs import SWEEP_S
from tandem.observability.recording import RECORDS
from tandem.runtime.exposition.targets import sweep
from tandem.runtime.rpc.listener import listen
from tandem.types import RunError, UserError

_DAY_S = 86_400.0


def shipped_rules() -> Rules:
    """Returns the recording rules and the alert rules that Prometheus is given."""
    return Rules(
        [RecordingRule.of(record.name, record.expr) for record in RECORDS],
        [AlertRule.of(alert.name, alert.expr, alert.wait, severity=alert.severity) for alert in ALERTS],
    )


def run_embedded(folder: Path, targets: Path, port: int, interval_s: float, days: float, most_mib: float, say: Callable[[str], None]) -> int:
    """Scrapes the targets folder into ``folder``, and answers on ``port`` of 127.0.0.1, until Ctrl-C. Raises ``UserError`` where the port is taken or
    the folder cannot be written, ``RunError`` where the database cannot be any more."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the folder '{folder}' cannot be written ({error.strerror}); name another one with --folder") from None
    path, stop, failed = folder / FILE, threading.Event(), list[RunError]()
    retention = Retention(all_s=min(_DAY_S, days * _DAY_S), whole_s=days * _DAY_S, most_bytes=round(most_mib * 2**20))

    def keep() -> None:
        try:
            collect(path, lambda: targets_in(targets), interval_s, retention, stop, shipped_rules())
        except RunError as error:
            failed.append(error)
        finally:
            stop.set()

    with listen("127.0.0.1", port) as listener:
        address = listener.getsockname()
        server = ApiServer(listener, Answers(MetricsReader(path).read))
        keeping = threading.Thread(target=keep, name="collect")
        keeping.start()
        say(f"metrics in {path}; Prometheus' API at http://127.0.0.1:{address[1]} (Grafana takes it as a data source of Prometheus)")
        say("alerts are kept as the series ALERTS; to be sent somewhere they need a Prometheus with Alertmanager")
        say(f"runs, servers and gateways name themselves in {targets}; Ctrl-C stops it")
        try:
            while not stop.wait(SWEEP_S):
                sweep(targets)
        except KeyboardInterrupt:
            pass
        finally:
            stop.set()
            keeping.join()
            server.close()
    if failed:
        raise failed[0]
    say("stopped")
    return 0
