"""Create, list, rotate and revoke the API keys of a gateway.

The file has the digests of the keys, never the keys: a key is shown once, when it is made. A gateway whose 'keys_file' it is reads it again within
a second.

examples:
  tandem keys create --file keys.json --tenant research
  tandem keys create --file keys.json --tenant guests --models small --expires 30d --tokens-per-day 100000
  tandem keys create --file keys.json --tenant operators --role admin
  tandem keys list --file keys.json
  tandem keys rotate 4f1c09a2b7de --file keys.json --grace 24h
  tandem keys revoke 4f1c09a2b7de --file keys.json
"""

import argparse
import math
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from tandem.config.gateway import LIMITS, LimitConfig
from tandem.types import UserError

_UNITS = {"m": 60.0, "h": 3600.0, "d": 86_400.0}
_LONGEST_EXPIRY_S = 100 * 365 * 86_400.0
LOCK_S = 5.0
"""How long a command waits for another one that writes the key file."""


def arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=type(parser))
    create = actions.add_parser("create", help="make a key and print it")
    create.add_argument("--tenant", required=True, metavar="NAME", help="whose key it is")
    create.add_argument("--role", choices=("user", "admin"), default="user", help="admin: the key also opens the administration (default: user)")
    create.add_argument("--models", default="", metavar="NAME,NAME", help="the models that it may ask for (default: all)")
    create.add_argument("--expires", default="", metavar="TIME", help="when it ends: 30d, 12h or 5m from now (default: never)")
    for name in LIMITS:
        create.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"limit of the key: {name.replace('_', ' ')} (default: none)")
    show = actions.add_parser("list", help="list the keys by their ids")
    rotate = actions.add_parser("rotate", help="replace a key by a new one that may do the same, and print it; the old one ends")
    rotate.add_argument("--grace", default="", metavar="TIME", help="how long the old one still opens: 24h, 30m or 7d from now (default: it ends at once)")
    revoke = actions.add_parser("revoke", help="end a key")
    for command in (rotate, revoke):
        command.add_argument("id", help="the key's id: what stands between the first two dashes of a key")
    for command in (create, show, rotate, revoke):
        command.add_argument("--file", required=True, metavar="PATH", help="the key file, as the gateway's 'keys_file'")


def run(options: argparse.Namespace) -> int:
    from tandem.gateway.keys import new_key, read_keys, rotated, write_keys

    path = Path(options.file)
    if options.action == "list":
        return _list(path)
    if not path.parent.is_dir():
        raise UserError(f"the folder '{path.parent}' of the key file does not exist; make it first")
    # Two commands at once must not lose each other's key.
    with _locked(path):
        records = read_keys(path) if options.action != "create" or path.exists() else {}
        if options.action == "create":
            may = {"models": _models(options.models), "expires": _expires(options.expires), "limits": _limits(options), "role": options.role}
            key, record = new_key(_tenant(options.tenant), **may)
            records[record.id] = record
            print(key)
        else:
            if options.id not in records:
                raise UserError(f"there is no key '{options.id[:100]}' in '{path}'; 'tandem keys list --file {path}' lists them")
            old = records.pop(options.id)
            if options.action == "rotate":
                key, record = rotated(old)
                if options.grace:
                    ends = _expires(options.grace, "--grace")
                    records[old.id] = replace(old, expires=min(ends, old.expires or ends))
                records[record.id] = record
                print(key)
        write_keys(path, records)
    return 0


def _locked(path: Path) -> AbstractContextManager[object]:
    """Returns the lock on a key file, which it has taken."""
    from filelock import FileLock, Timeout

    try:
        return FileLock(f"{path}.lock", timeout=LOCK_S, fallback_to_soft=False).acquire()
    except Timeout:
        raise UserError(f"the key file '{path}' cannot be locked: another 'tandem keys' is writing it, or nobody can write '{path}.lock'") from None
    except OSError as error:
        raise UserError(f"the key file '{path}' cannot be locked: '{path}.lock': {error.strerror}") from None


def _list(path: Path) -> int:
    from tandem.gateway.keys import read_keys

    now = time.time()
    print("id            role   tenant            created           expires           models and limits")
    for record in read_keys(path).values():
        expires = "never" if not record.expires else f"{_date(record.expires)}{' EXPIRED' if record.is_expired(now) else ''}"
        limits = [f"{name.replace('_', ' ')} {value}" for name in LIMITS if (value := getattr(record.limits, name)) is not None]
        may = ", ".join([*(record.models or ("all models",)), *limits])
        print(f"{record.id}  {record.role:<5}  {record.tenant:<16}  {_date(record.created)}  {expires:<16}  {may}")
    return 0


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _tenant(given: str) -> str:
    if not given or not given.isprintable() or len(given) > 100:
        raise UserError(f"--tenant is {given[:100]!r}; give a name of 1 to 100 printable characters")
    return given


def _models(given: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in given.split(",") if name.strip())


def _expires(given: str, flag: str = "--expires") -> float:
    if not given:
        return 0.0
    try:
        seconds = float(given[:-1]) * _UNITS[given[-1]]
    except (ValueError, KeyError):
        seconds = math.nan
    if not 0 < seconds <= _LONGEST_EXPIRY_S:
        raise UserError(f"{flag} is '{given[:40]}'; give minutes, hours or days from now, for example 30d")
    return time.time() + seconds


def _limits(options: argparse.Namespace) -> LimitConfig:
    from tandem.config.load import build

    return build(LimitConfig, {name: value for name in LIMITS if (value := getattr(options, name)) is not None})
