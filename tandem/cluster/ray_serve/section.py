"""The settings of an application of Ray Serve: a section ``servers`` of the gateway's file."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from tandem.config.load import build
from tandem.config.servers import ServersConfig
from tandem.types import UserError

_NOT_READ = ("role", "gpus", "servers_per_gpu", "update", "log_folder")


def read_section(args: Mapping[str, Any]) -> ServersConfig:
    """Returns ``args`` as a section. Raises ``UserError`` for one that cannot be served by Ray."""
    known = {field.name for field in fields(ServersConfig)}
    if unknown := next((name for name in args if name not in known), None):
        raise UserError(f"'args' has the unknown key '{unknown}'; they are those of a section 'servers' of the gateway's file")
    if unread := next((name for name in _NOT_READ if name in args), None):
        raise UserError(f"'args' has the key '{unread}', which is not read: Ray Serve places, updates and logs replicas itself; leave it out")
    config = build(ServersConfig, args, "servers")
    if config.model.startswith("models/"):
        raise UserError(f"'servers.model' is '{config.model}'; replicas have no model registry: name a folder or a model of the Hub")
    return config
