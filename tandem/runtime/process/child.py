"""The first thing that runs in a process started by ``tandem.runtime.process.processes.spawn``.

``python -m tandem.runtime.process.child PARENT_PID module NAME [ARG...]`` runs a Python module, ``... worker NAME [ARG...]`` one that calls
``tandem.runtime.process.worker.serve``, ``... exec PROGRAM [ARG...]`` a program, after asking the kernel to kill this process when its parent
ends, also by ``kill -9``. The request is made here and not between fork and exec, where a parent with threads must not run Python.
"""

import gc
import os
import runpy
import signal
import sys
from collections.abc import Sequence


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel to kill this process when its parent ends (``prctl(PR_SET_PDEATHSIG)``; does nothing outside of Linux). Kept over exec."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1
    if ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:
        # The parent ended before the request.
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parent_pid, kind, target, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4:]
    die_with_parent(parent_pid)
    if kind == "exec":
        os.execvp(target, [target, *arguments])
    run(kind, target, arguments)


def run(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Runs the Python module ``target`` as the program of this process, which asked before to be killed with its parent: that must not wait for an import."""
    prepare(kind, target, arguments)
    from tandem.runtime.process.fast_exit import fast_exit

    with fast_exit():
        runpy.run_module(target, run_name="__main__", alter_sys=True)


def prepare(kind: str, target: str, arguments: Sequence[str]) -> None:
    """Sets up this process for the program ``target``."""
    sys.argv = [target, *arguments]
    from pathlib import Path

    from tandem.runtime.process.stacks import STACKS_VARIABLE, answer_with_stacks
    from tandem.runtime.process.temporary import choose_temporary_folder

    choose_temporary_folder()
    if STACKS_VARIABLE in os.environ:
        answer_with_stacks(Path(os.environ[STACKS_VARIABLE]))
    if kind == "worker":
        # What its imports make lives as long as the process, and to visit it again and again takes a tenth of the start. ``serve`` turns the
        # garbage collector on.
        gc.disable()


if __name__ == "__main__":
    main()
