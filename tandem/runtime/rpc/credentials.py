"""The secret of a pod, which the callers of its sidecars must send."""

import os
from pathlib import Path

from tandem.types.errors import UserError

LEAST_CHARACTERS = 16


def new_credential() -> str:
    """Returns 256 random bits in hexadecimal. A sidecar gets them by file or standard input, never on a command line."""
    return os.urandom(32).hex()


def write_credential(path: Path, credential: str) -> None:
    """Writes ``credential`` to a new file that only this user can read."""
    path.unlink(missing_ok=True)
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with os.fdopen(file, "w", encoding="ascii") as stream:
        stream.write(credential)


def read_credential(path: Path) -> str:
    """Returns the credential in a file. Raises ``UserError`` where the file is missing, others may read it, or what it holds is not a secret."""
    try:
        mode = path.stat().st_mode & 0o777
        credential = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise UserError(f"the pod's credential {path} cannot be read: {error}") from None
    if mode & 0o077:
        raise UserError(f"the pod's credential {path} has mode {mode:o}; make it readable by its owner only (chmod 600)")
    if len(credential) < LEAST_CHARACTERS or not credential.isprintable() or " " in credential:
        what = f"has {len(credential)} characters, which can be guessed" if len(credential) < LEAST_CHARACTERS else "is not one word of printable characters"
        raise UserError(f"the pod's credential {path} {what}; make one with: (umask 077; openssl rand -hex 32 > {path})")
    return credential
