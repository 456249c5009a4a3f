"""The versions that are in the stages of the model registry now."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from tandem.model_registry.local import LocalRegistry
from tandem.types import RunError, UserError

_PERIOD_S = 1.0


def read_stages(folder: Path) -> dict[str, str]:
    """Returns the version in each stage, for example ``qwen@production``: ``qwen/3``; of several in one stage the newest. Raises ``UserError`` or ``RunError``
    if the registry cannot be read."""
    registry = LocalRegistry(folder)
    try:
        return {f"{version.entry.name}@{version.stage}": version.reference for version in registry.versions()}
    finally:
        registry.close()


async def follow_stages(folder: Path, stages: dict[str, str], say: Callable[[str], None]) -> None:
    """Keeps ``stages`` as they are in the registry, for ever. While it cannot be read they stay as they were."""
    problem = None
    while True:
        await asyncio.sleep(_PERIOD_S)
        before = problem
        try:
            now, problem = await asyncio.to_thread(read_stages, folder), None
        except (UserError, RunError) as error:
            now, problem = dict(stages), str(error)
        for stage, version in now.items():
            if stages.get(stage) != version:
                say(f"{stage} is {version} now")
        stages.clear()
        stages.update(now)
        if problem != before:
            say(f"the stages of models stay as they were: {problem}" if problem else "the registry can be read again")
