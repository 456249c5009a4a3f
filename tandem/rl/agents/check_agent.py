"""Checks before a run that its agent can be served and loaded. Imports no torch."""

import importlib.util
from dataclasses import replace
from pathlib import Path

from tandem.config.agent import AgentConfig
from tandem.rl.agents.agent_pool import AgentPool
from tandem.rl.agents.conversations import Conversations
from tandem.types import UserError

PACKAGES = ("fastapi", "uvicorn")
_TOOL = {"type": "function", "function": {"name": "example", "description": "An example.", "parameters": {"type": "object", "properties": {}}}}
"""Of which is told whether a template shows tools: those of an agent are in its requests alone."""


def check_packages() -> None:
    """Raises ``UserError`` without the packages of the server that an agent calls."""
    missing = next((name for name in PACKAGES if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise UserError(f"rollout.agent needs the package '{missing}', which is not installed; pip install 'tandem-rl[serve]'")


def check_agent(config: AgentConfig, folder: Path) -> tuple[list[str], list[str]]:
    """Returns the columns of a prompt that the agent cannot do without, and a warning where the chat template of the tokenizer in ``folder`` shows no tools.
    Raises ``UserError`` where the agent cannot be loaded, or there is no chat template."""
    check_packages()
    template = Conversations.open(folder, config.tool_call_parser).templates[True]
    warnings = [f"warning: {template.without_tools(1)}; a request of the agent that has tools is refused"] if template.ignores_tools([_TOOL]) else []
    # One worker shows whether the agent loads.
    pool = AgentPool(replace(config, workers=1), None)
    pool.close()
    return pool.columns, warnings
