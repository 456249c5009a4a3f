"""MkDocs hooks: puts the help of every command into ``reference/commands.md``."""

import argparse
import os
from typing import Any

MARKER = "<!-- commands -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Returns ``markdown`` with ``MARKER`` replaced by the help of every command."""
    return markdown.replace(MARKER, _commands()) if MARKER in markdown else markdown


def _commands() -> str:
    from tandem.cli.main import parser

    # argparse wraps its help to the width of the terminal.
    os.environ["COLUMNS"] = "120"
    (subcommands,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    return "\n".join(f"## tandem {name}\n\n```text\n{command.format_help()}```\n" for name, command in subcommands.choices.items())
