"""The settings of an application of Ray Serve, a section ``servers`` of the gateway's file, and the file that has them."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tandem.config.load import build
from tandem.config.servers import ServersConfig
from tandem.config.yaml_text import read_mapping
from tandem.types import UserError

_APPLICATION = "tandem.cluster.ray_serve.application:application"
_MOST_BYTES = 2**22
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


def read_file(path: Path) -> list[str]:
    """Returns the names of the applications in a file of Ray Serve. Raises ``UserError`` for one that could not be served."""
    content = read_mapping(
        str(path), f"'{path}'", _MOST_BYTES, why_short="a file of Ray Serve is a short YAML file", missing="name a file of 'serve run'",
        wrong="has no applications; 'tandem emit --topology inference --on ray' writes one",
    )  # fmt: skip
    applications = content.get("applications")
    if not isinstance(applications, list) or not applications or not all(isinstance(each, Mapping) and each.get("name") for each in applications):
        raise UserError(f"'{path}' has no list of applications with names; 'tandem emit --topology inference --on ray' writes one")
    for each in applications:
        if each.get("import_path") == _APPLICATION:
            args = each.get("args") or {}
            if not isinstance(args, Mapping):
                raise UserError(f"'args' of application '{each['name']}' in '{path}' are not a mapping; write those of a section 'servers'")
            read_section(args)
    return [str(each["name"]) for each in applications]
