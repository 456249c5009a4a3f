"""Show runs in the browser while they train: curves, samples, phases, memory, faults and logs.

The page is served on this machine alone unless --host says otherwise; then it needs a token, which is printed. Runs are only read.

examples:
  tandem dashboard                         the runs in runs/
  tandem dashboard runs/sort               one run
  tandem dashboard /data/runs --host 0.0.0.0 --port 7000
"""

import argparse
import importlib.util
from pathlib import Path

from tandem.types import UserError

DEFAULT_PORT = 6060


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="?", default="runs", help="the folder with the runs, or one run (default: runs)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help=f"port to listen on; 0 takes a free one (default: {DEFAULT_PORT})")
    parser.add_argument("--token-file", metavar="FILE", help="a file with the token that clients need; without it a new one beyond this machine, none on it")


def run(options: argparse.Namespace) -> int:
    for module in ("starlette", "uvicorn"):
        if importlib.util.find_spec(module) is None:
            raise UserError(f"'tandem dashboard' needs {module}, which is not installed; pip install 'tandem-rl[dashboard]'")
    if not 0 <= options.port <= 65535:
        raise UserError(f"--port is {options.port}; ports are 1 to 65535, or 0 for a free one")
    from tandem.dashboard.server import run_dashboard

    return run_dashboard(Path(options.runs), options.host, options.port, None if options.token_file is None else Path(options.token_file))
