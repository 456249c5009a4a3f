"""Sandboxes for programs: which one works on this machine, and the command line that starts an interpreter in it.

A program sees ``/usr``, its interpreter and an empty folder in memory; no network, no process but its own, no device beyond the usual ones, and no variable of
this process. As root, programs are run by the user ``nobody``, for whom limits on processes hold.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tandem.config.code_executor import CodeExecutorConfig
from tandem.types import UserError

MIB = 2**20
NOBODY = 65534
PROBE_S = 30.0
RUNNER = (Path(__file__).parent / "runner.py").read_text(encoding="utf-8")
SYSTEM_PYTHON = "/usr/bin/python3"
ROOT_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64")
ETC_FILES = ("/etc/alternatives", "/etc/ld.so.cache")
"""What command lines of other languages need of ``/etc``; no file with names, addresses or keys."""
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}


@dataclass(frozen=True, slots=True)
class Sandbox:
    """How programs are started. ``name``: ``bubblewrap``, ``gvisor`` or ``none``; ``command``: the command line of the process that runs ``runner.py``;
    ``user``: the account of programs, ``None``: that of this process; ``bundle``: of gVisor, the
    ``config.json`` of a container."""

    name: str
    command: tuple[str, ...]
    user: int | None
    limits: dict[str, int] = field(default_factory=dict)
    bundle: str = ""


def find_sandbox(settings: CodeExecutorConfig) -> Sandbox:
    """Returns the first of the sandboxes that ``settings`` allow in which a program runs. Raises ``UserError`` if none does."""
    wanted = ("bubblewrap", "gvisor") if settings.sandbox == "auto" else (settings.sandbox,)
    problems = []
    for name in wanted:
        for python in _interpreters(settings):
            sandbox = _SANDBOXES[name](settings, python)
            problem = sandbox if isinstance(sandbox, str) else _problem_of(sandbox)
            if isinstance(sandbox, Sandbox) and not problem:
                return sandbox
            problems.append(f"{name}: {problem}")
    if settings.accept_unsafe_execution:
        return _unsafe(settings, _interpreters(settings)[0])
    raise UserError(
        f"code_executor has no sandbox for programs ({'; '.join(dict.fromkeys(problems))}); install bubblewrap (apt install bubblewrap) on a machine that "
        "allows user namespaces, or, to run them with all rights of this account, set 'code.accept_unsafe_execution: true'"
    )


def process_limits(settings: CodeExecutorConfig, *, counts_processes: bool = True) -> dict[str, int]:
    """Returns the resource limits of a program, by the name in ``resource`` without ``RLIMIT_``."""
    size, disk = settings.memory_mib * MIB, settings.disk_mib * MIB
    limits = {"CPU": settings.cpu_s, "AS": size, "NOFILE": settings.open_files, "FSIZE": disk, "CORE": 0}
    # Without a user namespace of its own, the limit would count the account's other processes.
    return {**limits, "NPROC": settings.processes} if counts_processes else limits


def _interpreters(settings: CodeExecutorConfig) -> list[str]:
    if settings.python:
        return [settings.python]
    own = Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    return list(dict.fromkeys(path for path in (str(own), SYSTEM_PYTHON) if os.path.exists(path))) or [sys.executable]  # noqa: PTH110


def _visible(settings: CodeExecutorConfig, python: str) -> list[str]:
    """Returns the files and folders outside of ``/usr`` that a program may read."""
    real = os.path.realpath(python)
    prefix = str(Path(real).parent.parent)
    own = [] if prefix.startswith("/usr") else [prefix]
    return [*own, *(path for path in ETC_FILES if os.path.exists(path)), *settings.read_only]  # noqa: PTH110


def _started(python: str) -> list[str]:
    return [os.path.realpath(python), "-I", "-S", "-c", RUNNER]


def _user() -> int | None:
    return NOBODY if os.geteuid() == 0 else None


def _bubblewrap(settings: CodeExecutorConfig, python: str) -> "Sandbox | str":
    program = shutil.which("bwrap")
    if program is None:
        return "bwrap is not installed"
    disk = str(settings.disk_mib * MIB)
    command = [program, "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    if "--disable-userns" in _bubblewrap_options(program):
        command.append("--disable-userns")
    for name, value in VARIABLES.items():
        command += ["--setenv", name, value]
    command += ["--ro-bind", "/usr", "/usr"]
    for folder in ROOT_FOLDERS:
        path = f"/{folder}"
        if os.path.islink(path):  # noqa: PTH114
            command += ["--symlink", str(Path(path).readlink()), path]
        elif os.path.exists(path):  # noqa: PTH110
            command += ["--ro-bind", path, path]
    for path in _visible(settings, python):
        command += ["--ro-bind", path, path]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", disk, "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    command += ["--size", disk, "--tmpfs", "/tmp", "--chdir", "/tmp", "--remount-ro", "/"]
    return Sandbox("bubblewrap", (*command, *_started(python)), _user(), process_limits(settings))


@cache
def _bubblewrap_options(program: str) -> str:
    return subprocess.run([program, "--help"], capture_output=True, text=True, check=False).stdout


def _gvisor(settings: CodeExecutorConfig, python: str) -> "Sandbox | str":
    program = shutil.which("runsc")
    if program is None:
        return "runsc is not installed"
    rootless = () if os.geteuid() == 0 else ("--rootless",)
    command = (program, *rootless, "--network=none", "--ignore-cgroups")
    return Sandbox("gvisor", command, None, process_limits(settings), bundle=json.dumps(_bundle(settings, python)))


def _bundle(settings: CodeExecutorConfig, python: str) -> dict[str, Any]:
    """Returns the configuration of a container, in the format of the Open Container Initiative."""
    user = os.geteuid() or NOBODY
    bind = lambda path, source: {"destination": path, "type": "bind", "source": source, "options": ["ro", "rbind"]}
    folders = [bind(path, os.path.realpath(path)) for path in (f"/{name}" for name in ROOT_FOLDERS) if os.path.exists(path)]  # noqa: PTH110
    empty = lambda path: {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": [f"size={settings.disk_mib * MIB}", "mode=1777"]}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": user, "gid": user}, "args": _started(python), "env": [f"{name}={value}" for name, value in VARIABLES.items()], "cwd": "/tmp",
            "capabilities": {}, "noNewPrivileges": True,
        },
        "root": {"path": "rootfs", "readonly": True},
        "hostname": "sandbox",
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"}, empty("/tmp"), bind("/usr", "/usr"), *folders,
            *(bind(path, path) for path in _visible(settings, python)),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }  # fmt: skip


def _unsafe(settings: CodeExecutorConfig, python: str) -> Sandbox:
    return Sandbox("none", tuple(_started(python)), None, process_limits(settings, counts_processes=False))


_SANDBOXES: dict[str, Callable[[CodeExecutorConfig, str], Sandbox | str]] = {"bubblewrap": _bubblewrap, "gvisor": _gvisor}


def _problem_of(sandbox: Sandbox) -> str:
    """Returns why a program does not run in ``sandbox``; empty if it does."""
    from tandem.rl.rewards.code.program import Program, ProgramEnded

    try:
        with Program(sandbox, {"mode": "calls", "program": "def answer():\n    return 6 * 7\n", "limits": sandbox.limits}, PROBE_S, MIB) as program:
            answer = program.ask({"call": "answer", "arguments": [], "named": {}})
    except ProgramEnded as end:
        return str(end)
    except OSError as error:
        return f"{error.filename or sandbox.command[0]}: {error.strerror}"
    return "" if answer.get("value") == 42 else f"a program answered {answer!r:.80}"
