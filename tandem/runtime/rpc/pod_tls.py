"""TLS between pods: both sides show a certificate of an authority of the pods (mutual TLS 1.3). Certificates that are renewed are read again.

The name in a certificate is not compared with an address: pods of a cluster have addresses of the moment, and any pod may call any other.
"""

import logging
import select
import socket
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tandem.config.pods import PodsConfig
from tandem.runtime.process.deadline import Deadline
from tandem.runtime.tls import ServerTls, TlsFiles, TlsNames
from tandem.types.errors import RunError, UserError

logger = logging.getLogger(__name__)

_LOOK_S = 0.25
"""How long a read waits before its caller looks at the clock."""


_NAMES = TlsNames(
    "'pods.tls_cert_file' and 'pods.tls_key_file'", "'pods.tls_cert_file'", "'pods.tls_key_file'", "'pods.tls_ca_file'"
)  # fmt: skip


def tls_files(cert_file: str, key_file: str, ca_file: str) -> TlsFiles:
    """Returns the files of this machine's certificate and of the pods' authorities."""
    return TlsFiles(cert_file, key_file, ca_file, names=_NAMES)


def tls_of(pods: PodsConfig) -> "PodTls | None":
    """Returns the certificates of section ``pods``; ``None``: nothing is encrypted. Raises ``UserError`` for files that cannot be used."""
    return PodTls(tls_files(pods.tls_cert_file, pods.tls_key_file, pods.tls_ca_file)) if pods.tls_cert_file else None


class PodTls:
    """The certificates of this machine. Raises ``UserError`` for files that cannot be used."""

    def __init__(self, files: TlsFiles) -> None:
        self._files, self._lock = files, threading.Lock()
        self._served, self._stamps = ServerTls(files), _stamps(files)
        self._served.before_each = self._renew
        self._served.context.sslsocket_class = TlsSocket
        self._client = _client_context(files)

    @property
    def server(self) -> ssl.SSLContext:
        """For a socket that listens; connections that begin have the newest certificate."""
        return self._served.context

    @property
    def client(self) -> ssl.SSLContext:
        """For a connection that this machine opens."""
        self._renew()
        return self._client

    def accept(self, connection: socket.socket, deadline: Deadline) -> "TlsSocket":
        """Returns ``connection``, which a pod has opened, under TLS. Raises ``RefusedTls`` if it is not one of a pod, ``TimeoutError`` past ``deadline``."""
        return _shake_hands(self.server, connection, deadline, is_server=True)

    def connect(self, connection: socket.socket, deadline: Deadline) -> "TlsSocket":
        """Returns ``connection``, which was opened to a pod, under TLS. Raises as ``accept``."""
        return _shake_hands(self.client, connection, deadline, is_server=False)

    def _renew(self) -> None:
        """Reads files that have changed. Those that cannot be used are left for the ones before."""
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return
        with self._lock:
            try:
                fresh = self._served.fresh(self._files)
                if fresh is not None:
                    self._client = _client_context(self._files)
                    self._served.follow(fresh)
                    logger.info("the certificate '%s' was read again", self._files.cert_file)
            except (UserError, OSError) as error:
                logger.warning("the certificate of before stays in use: %s", error)
            self._stamps = stamps


class RefusedTls(RunError):
    """The other side has no certificate of a pod, does not accept this one's, or speaks no TLS."""


class TlsSocket(ssl.SSLSocket):
    """A connected socket under TLS with the calls that a ``Channel`` and transfers of weights make. One thread at a time uses it, but for ``shutdown``."""

    def recv_into(self, buffer: Any, nbytes: int | None = None, flags: int = 0) -> int:
        """Fills ``buffer`` while bytes keep coming, and waits for the first. Raises ``BlockingIOError`` where none comes for a moment."""
        view, held = memoryview(buffer)[: nbytes or None], 0
        while held < len(view):
            try:
                count = super().recv_into(view[held:])
            except ssl.SSLWantReadError:
                if held:
                    return held
                if not wait_for(self, select.POLLIN, _LOOK_S):
                    raise BlockingIOError from None
                continue
            if not count:
                return held
            held += count
        return held

    def send(self, data: Any, flags: int = 0) -> int:
        """Raises ``BlockingIOError`` where nothing can be sent now; the next call must send the same bytes."""
        try:
            return super().send(data)
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def sendmsg(self, buffers: Any, ancdata: Any = (), flags: int = 0, address: Any = None) -> int:  # type: ignore[override]
        return self.send(buffers[0])

    def shutdown(self, how: int) -> None:
        """Ends the connection, also under a thread that reads: what has arrived is not read as if it were not encrypted."""
        socket.socket.shutdown(self, how)


def wait_for(connection: socket.socket, event: int, seconds: float | None) -> bool:
    """Waits until ``connection`` is ready for ``event`` of ``select.poll``; returns whether it is."""
    poll = select.poll()
    poll.register(connection, event)
    return bool(poll.poll(None if seconds is None else seconds * 1000))


def describe_tls(error: ssl.SSLError) -> str:
    """Returns in words why two pods could not speak TLS with each other."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not that of a pod ({error.verify_message})"
    reason = str(error.reason or error)
    if "ALERT" in reason:
        return f"it does not accept this machine's certificate ({reason.replace('_', ' ').lower()})"
    if "EOF" in reason or isinstance(error, ssl.SSLEOFError):
        return "it closed the connection while certificates were shown"
    return f"it does not speak TLS ({reason.replace('_', ' ').lower()}); give all machines of the run pods.tls_cert_file, or none"


def _shake_hands(context: ssl.SSLContext, connection: socket.socket, deadline: Deadline, *, is_server: bool) -> TlsSocket:
    connection.setblocking(False)
    secured = context.wrap_socket(connection, server_side=is_server, do_handshake_on_connect=False)
    assert isinstance(secured, TlsSocket)
    try:
        while True:
            try:
                secured.do_handshake()
                return secured
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            wait_for(secured, event, deadline.nap_s())
    except ssl.SSLError as error:
        secured.close()
        raise RefusedTls(describe_tls(error)) from None
    except BaseException:
        secured.close()
        raise


def _client_context(files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(files.client_ca_file)
    context.load_cert_chain(files.cert_file, files.key_file, password=lambda: b"")
    context.sslsocket_class = TlsSocket
    return context


def _stamps(files: TlsFiles) -> Sequence[tuple[int, int] | None]:
    """Returns what changes when a file does; ``None`` for one that is not there at the moment."""
    stamps: list[tuple[int, int] | None] = []
    for path in (files.cert_file, files.key_file, files.client_ca_file):
        try:
            status = Path(path).stat()
            stamps.append((status.st_mtime_ns, status.st_ino))
        except OSError:
            stamps.append(None)
    return stamps
