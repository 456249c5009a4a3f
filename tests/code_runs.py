"""Programs that are run as the code executor runs them, for its tests."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tandem.config.code_executor import CodeExecutorConfig
from tandem.rl.rewards.code.executor import judge_program
from tandem.rl.rewards.code.program import Program, ProgramEnded
from tandem.rl.rewards.code.sandbox import NOBODY, Sandbox, find_sandbox
from tandem.rl.rewards.judgement import Item, Judgement
from tandem.types import UserError

SETTINGS = CodeExecutorConfig(extract="whole", sandbox="bubblewrap", wall_s=10.0, cpu_s=1, memory_mib=256, processes=8, disk_mib=8, output_kib=64)
UNAVAILABLE = ""
try:
    BUBBLEWRAP = find_sandbox(SETTINGS)
except UserError as error:
    UNAVAILABLE = f"bubblewrap does not work here, so the code executor is NOT tested: {error}"
needs_bubblewrap = pytest.mark.skipif(bool(UNAVAILABLE), reason=UNAVAILABLE)
needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")


def judged(program: str, truth: Any, settings: CodeExecutorConfig = SETTINGS, **columns: Any) -> Judgement:
    item = Item("0/p0/0", "?", program, (), truth, "dataset", columns)
    return judge_program(item, settings, find_sandbox(settings), -1.0)


def output_of(program: str, sandbox: Sandbox, settings: CodeExecutorConfig = SETTINGS) -> tuple[str, str]:
    """Returns what ``program`` prints and how it ended."""
    request = {"mode": "inputs", "program": program, "limits": sandbox.limits, "output_bytes": settings.output_kib * 1024, "run": "", "compile": ""}
    try:
        with Program(sandbox, request, settings.wall_s, 2**20) as running:
            answer = running.ask({"input": ""})
    except ProgramEnded as end:
        assert end.started, end
        return "", str(end)
    return answer["output"], answer["how"]


def marked(sandbox: Sandbox, mark: str) -> Sandbox:
    """Returns ``sandbox`` with ``mark`` on the command line of each of its processes; of gVisor's, a container's folder is there already."""
    return sandbox if sandbox.bundle else replace(sandbox, command=(*sandbox.command, mark))


def as_nobody(function: Callable[[], Any]) -> Any:
    """Returns what ``function`` returns, as JSON data, in a process of the account ``nobody``. Raises ``AssertionError`` with what it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            answer = {"value": function()}
        except BaseException as error:
            answer = {"raised": f"{type(error).__name__}: {error}"}
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answers:
        answer = json.loads(answers.read())
    os.waitpid(child, 0)
    assert "raised" not in answer, answer["raised"]
    return answer["value"]
