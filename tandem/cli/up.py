"""Start what watches over Tandem: Prometheus and Alertmanager, with alert rules and dashboards.

They find every run, server and gateway in the targets folder, where those name themselves. The folder gets their configuration, rules, Grafana's dashboards
and a docker compose file with Grafana, Prometheus, Alertmanager, Jaeger and Loki. Ctrl-C ends what was started.

examples:
  tandem up observability
  tandem up observability --folder /srv/tandem --webhook http://127.0.0.1:9000/alerts
  tandem up observability --embedded              without Prometheus: one SQLite file, the same queries
  tandem up observability --emit                  only write the files
  tandem train sort --metrics.port=0              a run that names itself; also: tandem serve MODEL --targets-folder
"""

import argparse
import contextlib
import sys
from pathlib import Path

from tandem.runtime.exposition.targets import DEFAULT_FOLDER
from tandem.runtime.records.logs import DEFAULT_LOGS
from tandem.types import UserError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("observability",), metavar="observability", help="what to start")
    parser.add_argument("--folder", default="observability", metavar="DIR", help="for configuration, rules, dashboards and data (default: observability)")
    parser.add_argument("--targets-folder", default=DEFAULT_FOLDER, metavar="DIR", help=f"where processes name themselves (default: {DEFAULT_FOLDER})")
    parser.add_argument("--port", type=int, default=9090, help="of Prometheus, on 127.0.0.1; 0 selects a free one (default: 9090)")
    parser.add_argument("--alertmanager-port", type=int, default=9093, metavar="PORT", help="0 selects a free one (default: 9093)")
    parser.add_argument("--interval", type=float, default=15.0, metavar="SECONDS", help="between two scrapes (default: 15)")
    parser.add_argument("--retention", default="15d", metavar="TIME", help="how long Prometheus keeps series, for example 12h or 30d (default: 15d)")
    parser.add_argument("--runs-folder", default="runs", metavar="DIR", help="in which runs have their folders, whose logs Alloy sends to Loki (default: runs)")
    parser.add_argument("--log-folder", default=DEFAULT_LOGS, metavar="DIR", help=f"where servers and gateways write logs, for Alloy (default: {DEFAULT_LOGS})")
    parser.add_argument("--webhook", metavar="URL", help="gets the alerts from Alertmanager (default: they are only shown)")
    parser.add_argument("--embedded", action="store_true", help="no Prometheus: the series are in FOLDER/metrics.sqlite, and the port answers its queries")
    parser.add_argument("--database-size", type=float, default=256.0, metavar="MIB", help="of metrics.sqlite, with --embedded (default: 256)")
    parser.add_argument("--emit", action="store_true", help="only write the files")


def run(options: argparse.Namespace) -> int:
    from tandem.observability.files import observability_files, write_files
    from tandem.observability.programs import ALERTMANAGER, PROMETHEUS, alertmanager_arguments, keep, prometheus_arguments, started

    _check(options)
    folder, targets = Path(options.folder).expanduser().resolve(), Path(options.targets_folder).expanduser().resolve()
    runs, logs = (Path(each).expanduser().resolve() for each in (options.runs_folder, options.log_folder))
    if options.emit:
        # A port that is chosen when the programs start is not known yet.
        written = observability_files(
            targets, options.port or 9090, options.alertmanager_port or 9093, interval_s=options.interval, webhook=options.webhook, runs_folder=runs,
            log_folder=logs,
        )  # fmt: skip
        write_files(folder, written)
        print(f"wrote {len(written)} files to {folder}; 'docker compose up' there starts Grafana, Prometheus, Alertmanager, Jaeger, Loki and Alloy")
        return 0
    from tandem.runtime.exposition.targets import check_folder

    if options.embedded:
        from tandem.observability.embedded import run_embedded

        return run_embedded(folder, check_folder(targets), options.port, options.interval, _days(options.retention), options.database_size, _say)
    if PROMETHEUS.path is None:
        raise UserError(f"Prometheus is not on the PATH; {PROMETHEUS.how_to_install}, keep the series without it with --embedded, or write the files for "
                        "another one with --emit")  # fmt: skip
    check_folder(targets)
    port, alertmanager_port = _port(options.port, "--port"), _port(options.alertmanager_port, "--alertmanager-port")
    has_alertmanager = ALERTMANAGER.path is not None
    if not has_alertmanager:
        _say(f"Alertmanager is not on the PATH, so nobody is told of alerts; {ALERTMANAGER.how_to_install}")
    write_files(
        folder,
        observability_files(
            targets, port, alertmanager_port, interval_s=options.interval, webhook=options.webhook, has_alertmanager=has_alertmanager, runs_folder=runs,
            log_folder=logs,
        ),
    )
    with contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        running = []
        if has_alertmanager:
            running.append(stack.enter_context(started(ALERTMANAGER, alertmanager_arguments(folder, alertmanager_port), folder, alertmanager_port)))
        running.append(stack.enter_context(started(PROMETHEUS, prometheus_arguments(folder, port, options.retention), folder, port)))
        for each in running:
            _say(f"{each.program.title} at {each.url}")
        _say(f"Grafana, Jaeger, Loki and Alloy are not started here; 'docker compose up' in {folder} has them, and dashboards/ is for any Grafana")
        _say(f"runs, servers and gateways name themselves in {targets}; Ctrl-C stops it")
        keep(running, targets)
    _say("stopped")
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ``UserError`` for a value that cannot work."""
    import re
    from urllib.parse import urlsplit

    if not 1 <= options.interval <= 3600:
        raise UserError(f"--interval is {options.interval:g}; it must be between 1 and 3600 seconds")
    if not re.fullmatch(r"[1-9]\d{0,5}[hdwy]", options.retention):
        raise UserError(f"--retention is '{options.retention}'; write a number and h, d, w or y, for example 15d")
    if not 1 <= options.database_size <= 1e6:
        raise UserError(f"--database-size is {options.database_size:g}; it must be between 1 and 1000000 MiB")
    for name in ("port", "alertmanager_port"):
        value = getattr(options, name)
        if not 0 <= value < 2**16:
            raise UserError(f"--{name.replace('_', '-')} is {value}; it must be between 0 (a free one) and 65535")
    if options.port and options.port == options.alertmanager_port:
        raise UserError(f"--port and --alertmanager-port are both {options.port}; give each its own")
    if options.webhook is not None and (urlsplit(options.webhook).scheme not in ("http", "https") or not urlsplit(options.webhook).netloc):
        raise UserError(f"--webhook is '{options.webhook}'; write http://HOST:PORT/PATH or https://")


def _days(retention: str) -> float:
    return int(retention[:-1]) * {"h": 1 / 24, "d": 1.0, "w": 7.0, "y": 365.0}[retention[-1]]


def _port(given: int, option: str) -> int:
    """Returns the port, or a free one for 0. Raises ``UserError`` where it is taken."""
    from tandem.runtime.rpc.listener import listen

    try:
        with listen("127.0.0.1", given) as listener:
            return int(listener.getsockname()[1])
    except UserError:
        raise UserError(f"{option} {given} is taken on 127.0.0.1; choose a free port, or 0 for any free one") from None


def _say(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr, flush=True)
