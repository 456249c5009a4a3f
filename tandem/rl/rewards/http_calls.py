"""Requests of reward functions to servers: with a token, repeated where a server is busy or silent."""

import http.client
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from urllib.parse import urlsplit

from tandem.config.rewards import EndpointConfig
from tandem.types import UserError

FIRST_WAIT_S = 0.5
MOST_WAIT_S = 8.0
MARGIN_S = 0.2
"""Seconds before the process is ended in which a server's fault is still reported as its own."""
MOST_RESPONSE_BYTES = 2**28
CONNECT_S = 5.0
RETRIED = (408, 425, 429, 500, 502, 503, 504)
"""Statuses of a server that is busy or restarting."""

# A proxy of the environment is for addresses outside, which a reward's seldom is.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class NoAnswer(Exception):
    """Raised when no answer could be had; the message says why."""


class Refused(NoAnswer):
    """Raised when a server refused a request, which is not repeated."""


def json_headers(label: str, settings: EndpointConfig) -> dict[str, str]:
    """Returns the headers of a request of reward function ``label``. Raises ``UserError`` if the variable with its token is not set."""
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    if settings.token_variable:
        token = os.environ.get(settings.token_variable)
        if not token:
            raise UserError(f"reward function '{label}' takes its token from the environment variable {settings.token_variable}, which is not set")
        headers["Authorization"] = f"Bearer {token}"
    return headers


def check_reachable(label: str, url: str) -> None:
    """Raises ``UserError`` if nothing listens at ``url``."""
    parts = urlsplit(url)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), timeout=CONNECT_S):
            pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"reward function '{label}': nothing answers at '{url}' ({reason}); start it, or correct the address") from None


def post(url: str, content: bytes, headers: Mapping[str, str], settings: EndpointConfig, ends: float) -> bytes:
    """Returns the body of the answer to a ``POST``. Raises ``NoAnswer`` when it could not be had until ``ends``, of the monotonic clock, and ``Refused``."""
    request = urllib.request.Request(url, content, dict(headers), method="POST")
    wait_s, problem, attempts = FIRST_WAIT_S, "was not asked", 0
    while attempts <= settings.retries and (left := ends - time.monotonic()) > 0:
        attempts += 1
        try:
            with _OPENER.open(request, timeout=min(settings.timeout_s, left)) as response:
                return bytes(response.read(MOST_RESPONSE_BYTES + 1))
        except urllib.error.HTTPError as error:
            with error:
                problem = f"answered {error.code}: {error.read(200).decode(errors='replace')}"
            if error.code not in RETRIED:
                raise Refused(problem) from None
        except (OSError, http.client.HTTPException) as error:
            problem = f"does not answer: {getattr(error, 'reason', error)}"
        if attempts <= settings.retries:
            time.sleep(max(min(wait_s, ends - time.monotonic()), 0.0))
            wait_s = min(2 * wait_s, MOST_WAIT_S)
    raise NoAnswer(f"{problem} (after {attempts} attempt{'s' if attempts != 1 else ''})")
