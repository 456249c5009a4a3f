"""The code blocks of a document, and what is done with each.

A comment in the line before a block says how it differs from a command or a program that is run as it is written:

    <!-- run: no, REASON -->      it is not run
    <!-- run: file PATH -->       it is written to the file PATH
    <!-- run: short -->           each `tandem train` in it ends after STEPS steps
    <!-- run: server PORT -->     it is started and stays until the end of the document; PORT is the one it listens on
"""

import re
from dataclasses import dataclass
from pathlib import Path

SHELL = ("bash", "sh")
STEPS = 30
PLAIN = ("text", "json", "")
"""Languages of blocks that show output or data."""
_BLOCK = re.compile(r"(?:^<!-- run: (?P<how>[^\n]*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block at ``line`` of ``document``. ``how``: what its comment says, empty without one."""

    document: Path
    line: int
    language: str
    text: str
    how: str

    def __str__(self) -> str:
        return f"{self.document.name}:{self.line}"


def code_blocks(document: Path) -> list[Block]:
    """Returns the code blocks of a Markdown file, in order."""
    text = document.read_text(encoding="utf-8")
    return [
        Block(document, text.count("\n", 0, match.start("language")) + 1, match["language"], match["text"], match["how"] or "")
        for match in _BLOCK.finditer(text)
    ]
