"""How a person starts the ``tandem`` of this process again."""

import shlex
import shutil
import sys
from pathlib import Path


def program() -> str:
    """Returns what a shell in this folder starts as ``tandem``: its name where the PATH leads to it, else its path, quoted."""
    script = Path(sys.executable).with_name("tandem")
    if not script.is_file():
        return f"{_shown(Path(sys.executable))} -m tandem"
    on_path = shutil.which("tandem")
    return "tandem" if on_path is not None and Path(on_path).samefile(script) else _shown(script)


def _shown(path: Path) -> str:
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))
