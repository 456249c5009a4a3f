"""The process that reads the tasks of a ``verifiers`` environment: ``python -m tandem.data.tasks.verifiers_host --channel FD``."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.data.tasks.verifiers_package import environment_config, import_verifiers, tasks_of, why_episodes
from tandem.runtime.process.worker import serve
from tandem.runtime.rpc.calls import Blobs, Meta, Progress, Reply, message_from, message_meta
from tandem.storage.digests import bytes_digest


@dataclass(frozen=True, slots=True)
class Environment:
    """The call ``read``: the environment ``name`` with its settings. The answer is ``EnvironmentTasks``."""

    name: str
    settings: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EnvironmentTasks:
    """``tasks``: the data of each task, as JSON. ``episodes``: why a completion of its prompt alone cannot be scored; empty where it can. ``version``: of
    the package. ``files``: the digest of the module that defines the environment."""

    tasks: list[dict[str, Any]]
    episodes: str
    version: str
    files: dict[str, str]


def read_tasks(environment: Environment) -> EnvironmentTasks:
    """Returns the tasks of ``environment``. Raises ``UserError``."""
    import_verifiers()
    from verifiers import __version__
    from verifiers.v1.utils.loaders import import_taskset

    config = environment_config(environment.name, environment.settings)
    tasks = list(tasks_of(config, environment.settings))
    reasons = (why_episodes(config, task) for task in tasks)
    data = [task.data.model_dump(mode="json", exclude_defaults=True) for task in tasks]
    file = str(import_taskset(environment.name).__file__)
    return EnvironmentTasks(data, next((reason for reason in reasons if reason), ""), __version__, {file: bytes_digest(Path(file).read_bytes())})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--channel", type=int, required=True)

    def read(meta: Meta, blobs: Blobs, progress: Progress) -> Reply:
        return message_meta(read_tasks(message_from(Environment, meta))), {}

    serve({"read": read}, parser.parse_args().channel)


if __name__ == "__main__":
    main()
