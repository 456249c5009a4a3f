"""Opens the store of a run, from a plain string that processes can be sent."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from tandem.config.coordination import CoordinationConfig
from tandem.runtime.coordination.cordons import cluster_prefix
from tandem.runtime.coordination.embedded import EmbeddedStore
from tandem.runtime.coordination.store import Store

_ETCD = "etcd:"
_FILES = ("cacert", "cert", "key", "password_file")


def store_address(config: CoordinationConfig, directory: Path) -> str:
    """Returns where the store of the run in ``directory`` is: the file of the embedded one, or ``etcd:`` with the section and the prefix of its keys. Paths are
    absolute, for processes that work in other folders."""
    if config.store == "embedded":
        return str((directory / "pod" / "store.sqlite").absolute())
    return _address(config, run_prefix(config, directory))


def cluster_address(config: CoordinationConfig) -> str:
    """Returns where in etcd the keys are that all runs with this ``coordination.prefix`` share."""
    return _address(config, cluster_prefix(config))


def _address(config: CoordinationConfig, prefix: str) -> str:
    files = {name: str(Path(value).absolute()) for name in _FILES if (value := getattr(config, name))}
    return _ETCD + json.dumps([{**asdict(config), **files}, prefix])


def run_prefix(config: CoordinationConfig, directory: Path) -> str:
    """Returns the beginning of the keys of the run in ``directory``, ``/tandem/RUN_NAME/``."""
    return f"{config.prefix.rstrip('/')}/{directory.name}/"


def with_deadline(address: str, deadline_s: float) -> str:
    """Returns ``address`` with calls that wait at most ``deadline_s`` for an etcd that does not answer."""
    if not address.startswith(_ETCD):
        return address
    section, prefix = json.loads(address.removeprefix(_ETCD))
    return _ETCD + json.dumps([{**section, "deadline_s": min(deadline_s, section["deadline_s"])}, prefix])


def open_store(address: str, on_wait: Callable[[], None] = lambda: None) -> Store:
    """Opens the store at ``address``. ``on_wait`` is called again and again while it does not answer. Raises ``UserError``."""
    if not address.startswith(_ETCD):
        return EmbeddedStore(Path(address))
    # Its client is a megabyte of modules in each process of a pod, and most runs have an embedded store.
    from tandem.runtime.coordination.etcd import EtcdStore

    section, prefix = json.loads(address.removeprefix(_ETCD))
    return EtcdStore(CoordinationConfig(**{**section, "endpoints": tuple(section["endpoints"])}), prefix, on_wait)
