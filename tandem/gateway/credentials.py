"""What the gateway shows a backend: its key, and its certificate."""

import ssl
from pathlib import Path

from tandem.config.gateway import BackendConfig
from tandem.types import UserError
from tandem.types.input_file import read_input

_MOST_KEY_BYTES = 4096


def backend_key(backend: BackendConfig) -> str | None:
    """Returns the key of ``api_key_file``, ``None`` without one. Raises ``UserError`` for a file that cannot be read."""
    path = backend.api_key_file
    if not path:
        return None
    try:
        key = read_input(path, _MOST_KEY_BYTES, "a key is one line").decode("utf-8").split("\n")[0].strip()
    except (OSError, UnicodeError) as error:
        raise UserError(f"the key file '{path}' of backend {backend.label} cannot be read: {error}") from None
    if not key or not key.isprintable():
        raise UserError(f"the key file '{path}' of backend {backend.label} has no key in its first line")
    return key


def backend_tls(backend: BackendConfig) -> ssl.SSLContext | bool:
    """Returns how the backend's certificate is checked and which one it is shown; ``True``: the system's authorities, and none. Raises ``UserError`` for files
    that are no certificates."""
    if not backend.ca_file and not backend.cert_file:
        return True
    for path in (backend.ca_file, backend.cert_file, backend.cert_key_file):
        if path and not Path(path).is_file():
            raise UserError(f"the file '{path}' of backend {backend.label} does not exist")
    try:
        context = ssl.create_default_context(cafile=backend.ca_file or None)
        if backend.cert_file:
            # Without a password an encrypted key is an error, and no question in the terminal.
            context.load_cert_chain(backend.cert_file, backend.cert_key_file, password=lambda: b"")
    except (OSError, ValueError) as error:
        raise UserError(f"the certificates of backend {backend.label} cannot be used: {error}; its files must be PEM") from None
    return context
