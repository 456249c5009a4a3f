"""The life of a dashboard: listen, say where it is, serve until a signal."""

import asyncio
import secrets
from pathlib import Path

import uvicorn

from tandem.dashboard.app import make_app
from tandem.dashboard.guard import is_loopback
from tandem.dashboard.runs import Runs
from tandem.runtime.rpc.listener import listen
from tandem.serving.http_process import BACKLOG, HttpServer, host_of, say, stop_events
from tandem.types import UserError

_SHORTEST_TOKEN = 16


def run_dashboard(folder: Path, host: str, port: int, token_file: Path | None = None) -> int:
    """Serves the dashboard of the runs in ``folder`` until SIGTERM or SIGINT; returns the exit status. Raises ``UserError`` where the folder, the port or the
    token cannot be used. Beyond this machine clients need a token: that of ``token_file``, or a new one, which is printed."""
    runs = Runs(folder)
    given = read_token(token_file) if token_file is not None else ""
    with listen(host, port, backlog=BACKLOG) as listener:
        address = listener.getsockname()
        token = given or ("" if is_loopback(address[0]) else secrets.token_urlsafe(24))
        url = f"http://{host_of(address)}:{address[1]}/"
        say(f"dashboard at {url}" + (f"#token={token}" if token and not given else "") + f" (runs in {folder})")
        return asyncio.run(_serve(make_app(runs, token), listener))


def read_token(path: Path) -> str:
    """Returns the token in the file ``path``. Raises ``UserError``."""
    try:
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file is '{path}', which cannot be read ({getattr(error, 'strerror', None) or 'it is not ASCII text'})") from None
    if len(token) < _SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise UserError(f"--token-file is '{path}', whose token is not {_SHORTEST_TOKEN} or more letters and digits on one line")
    return token


async def _serve(app: object, listener: object) -> int:
    settings = uvicorn.Config(
        app, log_level="critical", access_log=False, lifespan="off", loop="asyncio", server_header=False, timeout_graceful_shutdown=1, ws="none"  # type: ignore[arg-type]
    )
    server = HttpServer(settings)
    stop, _ = stop_events()
    serving = asyncio.create_task(server.serve([listener]))  # type: ignore[list-item]
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = True
    # Streams of events never end by themselves.
    server.force_exit = True
    stopping.cancel()
    await serving
    return 0
