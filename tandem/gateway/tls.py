"""TLS of the gateway's own address: its certificate is checked before it serves, and exchanged while it does."""

import contextlib
import hashlib
import ssl
import time
from pathlib import Path

from tandem.config.tls import TlsConfig
from tandem.types import UserError

_NOT_YET_VALID, _EXPIRED = 9, 10
"""OpenSSL's ``X509_V_ERR_CERT_NOT_YET_VALID`` and ``X509_V_ERR_CERT_HAS_EXPIRED``."""
_SOON_S = 14 * 86_400
_DAY_S = 86_400


class ServerTls:
    """The certificates in use. ``context``: for the listening socket; it hands each connection that begins to the newest certificate."""

    def __init__(self, config: TlsConfig) -> None:
        """Raises ``UserError`` for files that cannot be used."""
        self.context = _context(config)
        self._current, self._digest = self.context, _digest(config)
        # OpenSSL calls it for every connection, also for clients that name no server.
        self.context.sni_callback = self._choose

    def fresh(self, config: TlsConfig) -> "tuple[ssl.SSLContext, str] | None":
        """Returns what ``follow`` takes if the files have changed, else ``None``. Raises ``UserError`` for files that cannot be used."""
        digest = _digest(config)
        return None if digest == self._digest else (_context(config), digest)

    def follow(self, fresh: tuple[ssl.SSLContext, str]) -> None:
        """Takes another certificate for connections from now on; those that are open keep theirs."""
        self._current, self._digest = fresh

    def _choose(self, connection: ssl.SSLObject, name: str | None, first: ssl.SSLContext) -> None:
        connection.context = self._current


def expiry_warning(config: TlsConfig) -> str | None:
    """Returns words for a certificate that expires within two weeks, else ``None``. Its files must be right."""
    left_s = _expires(_context(config), config) - time.time()
    return f"the certificate '{config.cert_file}' expires in {max(0, int(left_s // _DAY_S))} days" if left_s < _SOON_S else None


def check_tls(config: TlsConfig) -> None:
    """Raises ``UserError`` for files that cannot be used."""
    if config.is_on:
        _context(config)


def _context(config: TlsConfig) -> ssl.SSLContext:
    """Raises ``UserError``."""
    for name in ("cert_file", "key_file", "client_ca_file"):
        _bytes(name, getattr(config, name))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password an encrypted key is an error, and no question in the terminal.
        context.load_cert_chain(config.cert_file, config.key_file, password=lambda: b"")
    except (OSError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise UserError(f"the key '{config.key_file}' ('tls.key_file') is not that of the certificate '{config.cert_file}'; give the two that were made "
                            "together") from None  # fmt: skip
        raise UserError(f"'{config.cert_file}' and '{config.key_file}' ('tls') are not a certificate and its key: {_words(error)}; both must be PEM, "
                        "the key not encrypted") from None  # fmt: skip
    _expires(context, config)
    if config.client_ca_file:
        try:
            context.load_verify_locations(config.client_ca_file)
        except (OSError, ValueError) as error:
            raise UserError(f"'{config.client_ca_file}' ('tls.client_ca_file') has no certificates: {_words(error)}; it must be PEM") from None
        context.verify_mode = ssl.CERT_REQUIRED
        # A client whose authority was taken out must not go on with a session of before: no tickets, and no TLS 1.2, whose sessions the server keeps.
        context.minimum_version, context.num_tickets = ssl.TLSVersion.TLSv1_3, 0
    return context


def _expires(context: ssl.SSLContext, config: TlsConfig) -> float:
    """Returns when the certificate of ``context`` expires, in seconds since the epoch: a client in this process shakes hands with it. Raises ``UserError``
    if it has expired or is not valid yet."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.load_verify_locations(config.cert_file)
    client.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    plain = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    plain.load_cert_chain(config.cert_file, config.key_file, password=lambda: b"")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking = client.wrap_bio(to_client, to_server)
    answering = plain.wrap_bio(to_server, to_client, server_side=True)
    try:
        for side in (asking, answering, asking):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in (_NOT_YET_VALID, _EXPIRED):
            state = "has expired" if error.verify_code == _EXPIRED else "is not valid yet"
            raise UserError(f"the certificate '{config.cert_file}' ('tls.cert_file') {state}; renew it, or correct the clock of this machine") from None
        return float("inf")  # What else clients may miss, for example an authority, is theirs to judge.
    shown = asking.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"])))


def _digest(config: TlsConfig) -> str:
    """Returns a digest of the contents of the files. Raises ``UserError`` if one cannot be read."""
    contents = [_bytes(name, getattr(config, name)) for name in ("cert_file", "key_file", "client_ca_file")]
    return hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in contents)).hexdigest()


def _bytes(name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes() if path else b""
    except OSError as error:
        raise UserError(f"the file '{path}' ('tls.{name}') cannot be read: {error.strerror}") from None


def _words(error: Exception) -> str:
    """Returns what OpenSSL says, without the place in its source."""
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()
