"""The version of a model that servers serve: a folder, or what the model registry has under a name."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config.servers import ServersConfig
from tandem.model_registry.local import LocalRegistry
from tandem.model_registry.versions import Version, find
from tandem.runtime.process.processes import Threads, available_cores, describe_exit, spawn
from tandem.types import RunError, UserError, WeightVersion

_REGISTERED = re.compile(r"models/([^/@]+(?:/\d+|@\w+)?)")
_DESCRIPTION = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json", "generation_config.json")
"""Files beside the weights on which answers depend."""
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
"""Files that a Hugging Face folder has, and a checkpoint of Tandem's trainer has not."""
_UNREAD = ("_name_or_path", "transformers_version")
"""Keys of ``config.json`` on which nothing depends."""


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """``name``: ``qwen/4`` of the registry, or what the file or an administrator named. ``path``: as ``tandem serve`` takes it. ``weights``: what answers call
    its weights: of the registry the number of the version and its step; of a folder one more than before, and 0."""

    name: str
    path: str
    weights: WeightVersion

    @property
    def weights_text(self) -> str:
        return f"{self.weights.incarnation}.{self.weights.step}"


def stage_of(given: str) -> str | None:
    """Returns the stage that ``given`` names, for example ``qwen@production``; ``None`` for another model."""
    match = _REGISTERED.fullmatch(given)
    return match[1] if match is not None and "@" in match[1] else None


def check_stages(servers: Mapping[str, ServersConfig], stages: Mapping[str, str]) -> None:
    """Raises ``UserError`` for servers whose stage of the registry no version is in."""
    for name, config in servers.items():
        stage = stage_of(config.model)
        if stage is not None and stage not in stages:
            known = ", ".join(f"models/{each}" for each in stages) or "none"
            raise UserError(f"'servers.{name}.model' is '{config.model}', and no version is in that stage; promote one (there is {known})")


def find_version(given: str, registry: str, folder: Path, before: WeightVersion | None) -> ModelVersion:
    """Returns the version ``given``: ``models/NAME@STAGE``, ``models/NAME/NUMBER`` or ``models/NAME`` of ``registry`` (a folder; empty: there is none), else a
    model as ``tandem serve`` takes it. A checkpoint is converted to a Hugging Face folder in ``folder``. ``before``: of the weights that are served now. Raises
    ``UserError``."""
    match = _REGISTERED.fullmatch(given)
    if match is None or not registry or Path(given).is_dir():
        return ModelVersion(given, given, WeightVersion(0, 0) if before is None else WeightVersion(before.incarnation + 1, 0))
    try:
        opened = LocalRegistry(Path(registry))
        try:
            found = find(opened, match[1])
        finally:
            opened.close()
    except RunError as error:
        raise UserError(str(error)) from None
    return ModelVersion(found.reference, _model_folder(found, folder), WeightVersion(found.number, found.entry.step))


def with_own_weights(version: ModelVersion, used: Mapping[WeightVersion, str]) -> ModelVersion:
    """Returns ``version`` with a number of its weights that no other path has had. ``used``: the path of each number."""
    if used.get(version.weights, version.path) == version.path:
        return version
    return replace(version, weights=WeightVersion(max(used).incarnation + 1, version.weights.step))


def have_equal_descriptions(left: str, right: str) -> bool:
    """Returns whether the models in two folders differ in nothing but their weights, so that an engine of one can take those of the other."""
    if not (Path(left, "config.json").is_file() and Path(right, "config.json").is_file()):
        return False
    return _config(left) == _config(right) and all(_bytes(Path(left, name)) == _bytes(Path(right, name)) for name in _DESCRIPTION)


def _config(folder: str) -> Any:
    try:
        content = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        return {key: value for key, value in content.items() if key not in _UNREAD}
    except (OSError, ValueError, AttributeError):
        return folder


def _bytes(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def _model_folder(version: Version, folder: Path) -> str:
    """Returns a Hugging Face folder with the model of ``version``. Raises ``UserError``."""
    source = Path(version.entry.path)
    if any((source / name).is_file() for name in _WEIGHTS):
        return str(source)
    target = folder / f"{version.entry.name}-{version.number}"
    if not target.is_dir():
        fresh, log = folder / f".{target.name}.tmp", folder / f"{target.name}.convert.log"
        shutil.rmtree(fresh, ignore_errors=True)
        process = spawn("tandem", ["convert", str(source), str(fresh)], threads=Threads(available_cores()), output=log)
        if process.wait() != 0:
            lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()] if log.exists() else []
            why = lines[-1].removeprefix("tandem: ") if lines else describe_exit(process.returncode)
            raise UserError(f"the version {version.reference} cannot be converted to a Hugging Face folder: {why}")
        fresh.rename(target)
    return str(target)
