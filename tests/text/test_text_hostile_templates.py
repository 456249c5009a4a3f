"""Chat templates that grow without end are refused in bounded time and memory, each in one line: in a child process that has little of both."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.text import rendering_limits
from tandem.text.chat import ChatTemplate
from tandem.types import UserError
from tests.text.hostile_templates import ENDLESS, GROW, TOO_LARGE

SECONDS, MOST_BYTES = 1.0, 2**28
SAID = {
    "a value": r".*(makes? too large a value|makes a text of more than 16,777,216 characters|chains more than 100 filters|maximum recursion depth).*",
    "memory": r"it takes more than 256 MiB of memory, as one that grows without end",
    "time": r"it takes more than 1 seconds of processor time, as one that loops without end",
}


def render_all(folder: str) -> None:
    """Prints what each template says, in this process, which has 1 GiB more than it begins with."""
    rendering_limits.MOST_SECONDS, rendering_limits.MOST_BYTES = SECONDS, MOST_BYTES
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + 2**30
    resource.setrlimit(resource.RLIMIT_AS, (size, size))
    for name, source in {**TOO_LARGE, **GROW, **ENDLESS}.items():
        before = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
        try:
            said = f"rendered {ChatTemplate.from_folder(folder, source=source).render([{'role': 'user', 'content': 'Hi'}])[:80]!r}"
        except UserError as error:
            said = str(error).partition(" refuses these messages: ")[2] or str(error)
        print(json.dumps([name, said, sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) - before]), flush=True)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, float]]:
    """What each hostile template says, and after how many seconds of processor time."""
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "tokenizer_config.json").write_text("{}")
    program = f"from tests.text.test_text_hostile_templates import render_all; render_all({str(folder)!r})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[2], check=False)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert ended.returncode == 0, f"after {rows[-1:]}: {ended.returncode} {ended.stderr[-500:]}"
    return {name: (text, seconds) for name, text, seconds in rows}


@pytest.mark.full
@pytest.mark.parametrize(("kind", "templates"), [("a value", TOO_LARGE), ("memory", GROW), ("time", ENDLESS)])
def test_a_template_that_grows_without_end_is_refused_in_one_line_in_little_memory_and_time(
    kind: str, templates: dict[str, str], said: dict[str, tuple[str, float]]
) -> None:
    others = {name: said[name] for name in templates if not re.fullmatch(SAID[kind], said[name][0]) or said[name][1] > 4 * SECONDS}
    assert others == {}
