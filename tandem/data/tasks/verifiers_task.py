"""Prompts of ``verifiers`` environments by name. Their tasks are read in a process of their own, which ends then."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.config.task import VERIFIERS, TaskConfig
from tandem.data.tasks.base import TaskItem
from tandem.data.tasks.dataset import DatasetTask, divided
from tandem.data.tasks.verifiers_host import Environment, EnvironmentTasks
from tandem.runtime.import_path import path_for_children
from tandem.runtime.process.processes import Threads
from tandem.runtime.process.worker import Worker
from tandem.runtime.rpc.calls import RpcTimeout, WorkerDied, message_from, message_meta
from tandem.types import RunError, UserError

DEADLINE_S = 600.0


@dataclass(frozen=True)
class VerifiersTask(DatasetTask):
    """The tasks of an environment. ``columns`` contain what is needed to make a task again (``environment``, ``settings`` and ``data``). ``episodes``: why a
    completion of a prompt alone cannot be scored; empty where it can."""

    episodes: str = ""


def verifiers_task(config: TaskConfig, seed: int) -> VerifiersTask:
    """Returns the task that ``config`` names. Raises ``UserError`` for a package, an environment or settings that cannot be used, and ``RunError``."""
    name, settings = config.name.removeprefix(VERIFIERS), dict(config.settings)
    read = _read(config.name, Environment(name, settings))
    has_messages = any("system_prompt" in data or not isinstance(data.get("prompt"), str) for data in read.tasks)
    items = [_item(config.name, number, data, settings, has_messages) for number, data in enumerate(read.tasks)]
    digest = hashlib.blake2b(json.dumps(read.tasks, sort_keys=True).encode(), digest_size=16).hexdigest()
    fingerprint = f"{config.name} {read.version} {json.dumps(settings, sort_keys=True)} {digest} {config.share_held_out} {seed}"
    splits = divided(items, config.share_held_out, config.name, "choose more with task.settings")
    return VerifiersTask(config.name, fingerprint, splits, read.files, read.episodes)


def _read(name: str, environment: Environment) -> EnvironmentTasks:
    host = Worker(
        f"the process that reads the tasks of '{name}'",
        "tandem.data.tasks.verifiers_host",
        threads=Threads(),
        output=Path(os.devnull),
        environment={"PYTHONHASHSEED": "0", "PYTHONPATH": path_for_children()},
        new_session=True,
    )
    try:
        return message_from(EnvironmentTasks, host.call("read", message_meta(environment), deadline_s=DEADLINE_S).meta)
    except RpcTimeout:
        raise RunError(f"'{name}' did not load its tasks within {DEADLINE_S:.0f} s; choose fewer with task.settings.select") from None
    except WorkerDied as death:
        raise RunError(f"the process that reads the tasks of '{name}' ended: {death}") from None
    finally:
        host.stop(0.0)


def _item(name: str, number: int, data: Mapping[str, Any], settings: Mapping[str, Any], has_messages: bool) -> TaskItem:
    columns = {"environment": name.removeprefix(VERIFIERS), "settings": settings, "data": data}
    where, answer = f"{name}, task {number}", data.get("answer")
    prompt = data.get("prompt")
    if not has_messages:
        return TaskItem(str(prompt), where, answer, columns)
    messages: list[Mapping[str, Any]] = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
    messages += [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [_message(each, where) for each in prompt or []]
    # The user of a task without a prompt speaks first, in its episode.
    messages = messages or [{"role": "user", "content": json.dumps(data, sort_keys=True, ensure_ascii=False)}]
    return TaskItem(json.dumps(messages, ensure_ascii=False), where, answer, columns, tuple(messages))


def _message(message: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        raise UserError(f"{where}: a message of the prompt has parts that are no text; only text is read")
    return {"role": message["role"], "content": content}
