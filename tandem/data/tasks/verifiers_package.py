"""The ``verifiers`` package of Prime Intellect (version 0.4), for the processes that use it: environments by name, and their tasks by their data.

An environment is a taskset (an installed package or a module on the path) and the ``Env`` that plays an episode of one of its tasks; ``task.settings`` are
the keys of its ``EnvConfig``, and ``select`` those of ``SelectConfig``. The package takes seconds and 160 MB to import, so this module imports it only where
a function is called.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tandem.types import UserError
from tandem.types.one_line import describe

if TYPE_CHECKING:
    import verifiers.v1 as vf

SELECT = "select"
"""The key of ``task.settings`` that chooses among the tasks."""


def import_verifiers() -> Any:
    """Returns the package's module ``v1``. Raises ``UserError`` where it is not installed."""
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise UserError(f"tasks of verifiers need a package ({error}); install it with: pip install 'tandem-rl[verifiers]'") from None
    return vf


def environment_config(name: str, settings: Mapping[str, Any]) -> "vf.EnvConfig":
    """Returns the configuration of environment ``name``. Raises ``UserError``."""
    import_verifiers()
    from verifiers.v1.utils.loaders import resolve_env_config

    given = {key: value for key, value in settings.items() if key != SELECT}
    taskset = given.get("taskset") or {}
    if not isinstance(taskset, Mapping):
        raise UserError(f"'task.settings.taskset' is {taskset!r}; it must be a mapping of settings of the taskset")
    try:
        return resolve_env_config({**given, "taskset": {**taskset, "id": name}})
    except Exception as error:  # Settings are checked by the package and the environment, each in its own way.
        raise UserError(f"environment 'verifiers:{name}' cannot be used with these 'task.settings': {describe(error)}") from None


def tasks_of(config: "vf.EnvConfig", settings: Mapping[str, Any]) -> Iterator["vf.Task[Any, Any, Any]"]:
    """Yields the tasks of the environment that ``settings.select`` chooses. Raises ``UserError``."""
    vf = import_verifiers()
    from verifiers.v1.utils.loaders import load_taskset

    name = config.taskset.id
    try:
        taskset = load_taskset(config.taskset).select(vf.SelectConfig.model_validate(settings.get(SELECT) or {}))
        if not taskset.bounded:
            raise UserError(f"environment 'verifiers:{name}' has tasks without end; set task.settings.select.limit to how many are used")
        yield from taskset
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"environment 'verifiers:{name}' failed to load its tasks: {describe(error)}") from None


def task_from(config: "vf.EnvConfig", data: Mapping[str, Any]) -> "vf.Task[Any, Any, Any]":
    """Returns the task that has ``data``, the JSON form of its ``TaskData``."""
    from verifiers.v1.utils.loaders import task_type

    kind = task_type(config.taskset.id)
    return kind(kind.data_type().model_validate(data), config.taskset.task)


def why_episodes(config: "vf.EnvConfig", task: "vf.Task[Any, Any, Any]") -> str:
    """Returns why a completion of the prompt of ``task`` alone cannot be scored, so that episodes are needed; empty where it can."""
    vf = import_verifiers()
    from verifiers.v1.utils.loaders import environment_class, taskset_class

    if environment_class(config.taskset.id, config.id) is not vf.SingleAgentEnv:
        return "plays its tasks in turns of its own"
    if type(task).toolsets(config.taskset.task) or taskset_class(config.taskset.id).toolsets(config.taskset):
        return "has tools"
    if task.data.prompt is None:
        return "has tasks without a prompt"
    needs_runtime = lambda function: getattr(inspect.signature(function).parameters.get("runtime"), "default", None) is inspect.Parameter.empty
    if any(map(needs_runtime, task.hooks("reward"))) or type(task).setup is not vf.Task.setup or type(task).finalize is not vf.Task.finalize:
        return "scores what an agent leaves on its machine"
    return ""
