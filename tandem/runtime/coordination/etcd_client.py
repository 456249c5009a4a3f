"""Calls of etcd's API (v3) as JSON over HTTP, the form that every etcd since 3.4 answers beside gRPC. Standard library alone.

gRPC would need grpcio, whose threads do not survive the forks of agent workers, and aetcd (1.0.0), the maintained client on top of it, has no TLS, one
endpoint, and an error in place of a wait when etcd restarts. Measured with etcd 3.5 on one machine: a put takes 0.6 ms in either form, a read 0.4 and
0.3 ms, a watch 2.9 and 1.3 ms. A client's certificate is no user here: where etcd authenticates, it needs a user and a password.
"""

import base64
import contextlib
import http.client
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlsplit

from tandem.config.coordination import CoordinationConfig
from tandem.runtime.process.waits import WAITS, Wait
from tandem.types.errors import RunError, UserError

logger = logging.getLogger(__name__)

CONNECT_S = 2.0
REPLY_S = 5.0
"""How long an endpoint may take to connect and to answer before the next is asked; the defaults of etcdctl's --dial-timeout and --command-timeout."""
_PAUSE_S = (0.02, 1.0)
_ATTEMPT_S = CONNECT_S + REPLY_S + _PAUSE_S[1]
_CANCELED, _UNKNOWN, _TIMED_OUT, _DENIED, _INTERNAL, _UNAVAILABLE, _UNAUTHENTICATED = 1, 2, 4, 7, 13, 14, 16
_TRY_AGAIN = (_CANCELED, _UNKNOWN, _TIMED_OUT, _INTERNAL, _UNAVAILABLE)
"""gRPC's codes of the answers of a member that is about to stop, has no leader or lost one."""
_T = TypeVar("_T")


class EtcdError(Exception):
    """etcd refused a call. ``code``: gRPC's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Patience:
    """``seconds`` from now. What passes between two looks counts for one attempt at most, so that a pause of this process does not use them up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = self._left_s = seconds
        self._looked_s = time.monotonic()

    def left_s(self) -> float:
        """Returns the seconds that are left, 0 or fewer past the deadline."""
        now = time.monotonic()
        self._left_s -= min(now - self._looked_s, _ATTEMPT_S)
        self._looked_s = now
        return self._left_s

    @property
    def passed(self) -> bool:
        return self.left_s() <= 0


@dataclass
class _Line:
    """A connection to the endpoint number ``place``. ``is_reused``: whether it had a call before, so that the other end may have closed it since."""

    place: int
    connection: http.client.HTTPConnection
    is_reused: bool


class EtcdClient:
    """Calls one of the endpoints of ``config`` and, if it does not answer, the next, until a call's deadline. Thread-safe. ``on_wait`` is called again and
    again while no endpoint answers."""

    def __init__(self, config: CoordinationConfig, on_wait: Callable[[], None] = lambda: None) -> None:
        self.config, self._on_wait = config, on_wait
        self._endpoints = [urlsplit(endpoint) for endpoint in config.endpoints]
        self._tls = _tls(config) if any(endpoint.scheme == "https" for endpoint in self._endpoints) else None
        self._lock = threading.Lock()
        self._current = 0
        self._idle: list[_Line] = []
        self._token: str | None = None
        self._silent_since: float | None = None

    @property
    def name(self) -> str:
        """The endpoints, for messages."""
        return ", ".join(self.config.endpoints)

    def call(self, method: str, body: Mapping[str, Any], deadline: Patience) -> dict[str, Any]:
        """Returns the reply to ``method``, for example ``kv/range``. An endpoint that failed may have executed the call before the next one does.

        Raises ``EtcdError`` if etcd refuses it, ``RunError`` if no endpoint answers within the deadline, and ``UserError`` for what no repetition mends."""

        def attempt(line: _Line) -> dict[str, Any]:
            response = self._post(line, method, body, deadline)
            reply = _message(response.read())
            self._give_back(line, response)
            return reply

        return self._patiently(method, attempt, deadline)

    @contextlib.contextmanager
    def stream(self, method: str, body: Mapping[str, Any], deadline: Patience, silence_s: float) -> Iterator[Iterator[dict[str, Any]]]:
        """The messages of the stream that ``method`` opens. They end with the connection, or after ``silence_s`` without one."""
        line, response = self._patiently(method, lambda line: (line, self._post(line, method, body, deadline)), deadline)

        def messages() -> Iterator[dict[str, Any]]:
            if line.connection.sock is not None:
                line.connection.sock.settimeout(silence_s)
            try:
                while data := response.readline():
                    yield _message(data)
            except (OSError, http.client.HTTPException, ValueError):
                return
            except EtcdError as error:
                if error.code not in _TRY_AGAIN:
                    raise

        try:
            yield messages()
        finally:
            response.close()
            line.connection.close()

    def close(self) -> None:
        """Closes the connections that no call uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for line in idle:
            line.connection.close()

    # -- one call: connections, authentication, what to do after a failure --------------------------------------------

    def _patiently(self, method: str, attempt: Callable[[_Line], _T], deadline: Patience) -> _T:
        """Returns the result of ``attempt`` of a call of ``method`` at the first endpoint that gives one."""
        with WAITS.wait(f"etcd at {self.name}", method, deadline.seconds) as wait:
            return self._repeated(attempt, deadline, wait)

    def _repeated(self, attempt: Callable[[_Line], _T], deadline: Patience, wait: Wait) -> _T:
        pause_s, is_new_token = 0.0, False
        while True:
            line = self._take(deadline)
            try:
                result = attempt(line)
            except EtcdError as error:
                line.connection.close()
                if error.code == _UNAUTHENTICATED and self.config.user and not is_new_token:
                    self._token, is_new_token = None, True
                    continue
                if error.code not in _TRY_AGAIN:
                    self._refuse(error)
                trouble = str(error)
            except ssl.SSLCertVerificationError as error:
                line.connection.close()
                raise UserError(
                    f"the certificate of etcd at {self.config.endpoints[line.place]} is not valid here: {error.verify_message}; correct coordination.cacert or "
                    "the host in the endpoint"
                ) from None
            except (OSError, http.client.HTTPException, ValueError) as error:
                line.connection.close()
                if line.is_reused:
                    continue
                trouble = str(error) or type(error).__name__
                is_secure = self._endpoints[line.place].scheme == "https"
                # A server without TLS may close with what it has not read, which resets the connection.
                if isinstance(error, ssl.SSLError) or (is_secure and isinstance(error, ConnectionResetError)):
                    trouble += ", as where TLS is not spoken (http://) or a client's certificate is wanted (coordination.cert)"
                elif isinstance(error, http.client.BadStatusLine) and not is_secure:
                    trouble += ", as where TLS is expected (https://)"
            except BaseException:
                line.connection.close()
                raise
            else:
                self._heard()
                return result
            self._unheard(line.place, trouble, deadline)
            WAITS.troubled(wait, trouble)
            self._on_wait()
            time.sleep(max(0.0, min(pause_s, deadline.left_s())))
            pause_s = min(max(2 * pause_s, _PAUSE_S[0]), _PAUSE_S[1])

    def _post(self, line: _Line, method: str, body: Mapping[str, Any], deadline: Patience) -> http.client.HTTPResponse:
        """Sends a call and returns its response, whose body is not read. Raises ``EtcdError`` for another status than 200."""
        if self.config.user and self._token is None:
            self._token = self._authenticate(line, deadline)
        return self._exchange(line, method, body, deadline, {} if self._token is None else {"Authorization": self._token})

    def _exchange(
        self, line: _Line, method: str, body: Mapping[str, Any], deadline: Patience, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        connection, left_s = line.connection, max(0.01, deadline.left_s())
        connection.timeout = min(CONNECT_S, left_s)
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(min(REPLY_S, left_s))
        connection.request("POST", f"/v3/{method}", json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        if response.status != 200:
            self._raise(line.place, response.status, response.read())
        return response

    def _authenticate(self, line: _Line, deadline: Patience) -> str:
        user, path = self.config.user, Path(self.config.password_file)
        try:
            password = path.read_text(encoding="utf-8").strip("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"'coordination.password_file' {path} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8'}") from None
        try:
            reply = _message(self._exchange(line, "auth/authenticate", {"name": user, "password": password}, deadline, {}).read())
        except EtcdError as error:
            if "authentication is not enabled" in str(error):
                raise UserError(
                    f"'coordination.user' is '{user}' and etcd at {self.name} has no authentication; remove user and password_file, or turn it on: "
                    "etcdctl auth enable"
                ) from None
            if "authentication failed" in str(error):
                raise UserError(
                    f"etcd at {self.name} refused user '{user}': user or password is wrong; correct coordination.user or the password in {path}"
                ) from None
            raise
        return str(reply["token"])

    def _raise(self, place: int, status: int, body: bytes) -> None:
        """Raises the error of a response with another ``status`` than 200."""
        try:
            told = json.loads(body)
            raise EtcdError(int(told["code"]), str(told.get("message") or told["error"]))
        except (ValueError, KeyError, TypeError):
            text = " ".join(body.decode("utf-8", "replace").split())[:200]
        endpoint = self.config.endpoints[place]
        if status in (500, 502, 503, 504):
            raise EtcdError(_UNAVAILABLE, f"status {status} {text}")
        raise UserError(
            f"{endpoint} answers, but not as etcd 3.4 or later does (status {status} for /v3/); correct coordination.endpoints, or start etcd with "
            "--enable-grpc-gateway=true"
        )

    def _refuse(self, error: EtcdError) -> None:
        """Raises what the user can do about ``error``, or ``error`` itself, which the caller knows."""
        text, user = str(error), self.config.user
        if error.code == _DENIED:
            raise UserError(
                f"etcd at {self.name}: user '{user}' has no permission for keys under {self.config.prefix}; grant it to one of the user's roles: etcdctl role "
                f"grant-permission ROLE --prefix readwrite {self.config.prefix}"
            )
        if "user name is empty" in text or error.code == _UNAUTHENTICATED:
            fix = "set coordination.user and coordination.password_file" if not user else "see etcd's log"
            raise UserError(f"etcd at {self.name} asks for authentication ({text}); {fix}")
        if "space exceeded" in text:
            raise RunError(f"etcd at {self.name} is full ({text}); compact and defragment it, then: etcdctl alarm disarm")
        if "too large" in text:
            raise RunError(f"etcd at {self.name} refuses a value of this size ({text}); start its members with a larger --max-request-bytes")
        raise error

    # -- endpoints and connections -------------------------------------------------------------------------------------

    def _take(self, deadline: Patience) -> _Line:
        """Returns an idle connection to the current endpoint, or a new one."""
        with self._lock:
            place = self._current
            found = next((line for line in reversed(self._idle) if line.place == place), None)
            if found is not None:
                self._idle.remove(found)
                return found
        endpoint: SplitResult = self._endpoints[place]
        assert endpoint.hostname is not None
        if endpoint.scheme == "https":
            return _Line(place, http.client.HTTPSConnection(endpoint.hostname, endpoint.port, context=self._tls), False)
        return _Line(place, http.client.HTTPConnection(endpoint.hostname, endpoint.port), False)

    def _give_back(self, line: _Line, response: http.client.HTTPResponse) -> None:
        if response.will_close:
            line.connection.close()
            return
        with self._lock:
            self._idle.append(_Line(line.place, line.connection, True))

    def _heard(self) -> None:
        since, self._silent_since = self._silent_since, None
        if since is not None:
            logger.info("etcd answers again after %.1f s", time.monotonic() - since)

    def _unheard(self, place: int, trouble: str, deadline: Patience) -> None:
        """Moves on to the next endpoint. Raises ``RunError`` past the deadline."""
        with self._lock:
            if self._current == place:
                self._current = (place + 1) % len(self._endpoints)
            stale = [line for line in self._idle if line.place == place]
            self._idle = [line for line in self._idle if line.place != place]
        for line in stale:
            line.connection.close()
        if self._silent_since is None:
            self._silent_since = time.monotonic()
            # A command that only asks whether etcd answers has its own line for it.
            logger.info("etcd at %s does not serve calls (%s); waiting for it, or for another endpoint", self.config.endpoints[place], trouble)
        if deadline.passed:
            raise RunError(
                f"etcd at {self.name} did not answer within {deadline.seconds:g} s ({trouble}); start it, or correct "
                "coordination.endpoints"
            )


def encoded(text: str | bytes) -> str:
    """Returns bytes as the JSON form has them."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode("ascii")


def decoded(text: str) -> bytes:
    """Returns the bytes of ``encoded``."""
    return base64.b64decode(text)


def _message(data: bytes) -> dict[str, Any]:
    """Returns the first message in ``data``; those of streams are wrapped. Raises ``EtcdError`` for an error in it."""
    lines = data.splitlines()
    if not lines:
        raise EtcdError(_UNAVAILABLE, "an empty answer")
    message: dict[str, Any] = json.loads(lines[0])
    if isinstance(error := message.get("error"), dict):
        raise EtcdError(int(error["grpc_code"] if "grpc_code" in error else error.get("code", _UNKNOWN)), str(error.get("message", error)))
    result: dict[str, Any] = message["result"] if isinstance(message.get("result"), dict) else message
    return result


def _tls(config: CoordinationConfig) -> ssl.SSLContext:
    """Raises ``UserError`` if a certificate's file cannot be used."""
    context = ssl.create_default_context()
    read_authority, read_own = lambda: context.load_verify_locations(config.cacert), lambda: context.load_cert_chain(config.cert, config.key)
    for names, load in (("cacert",), read_authority), (("cert", "key"), read_own):
        files = [str(getattr(config, name)) for name in names]
        if not files[0]:
            continue
        try:
            load()
        except (OSError, ssl.SSLError) as error:
            keys = " and ".join(f"'coordination.{name}'" for name in names)
            reason = error.strerror if not isinstance(error, ssl.SSLError) and error.strerror else "it is not a certificate in PEM form with its key"
            raise UserError(f"{keys}: {' and '.join(files)} cannot be used: {reason}") from None
    return context
