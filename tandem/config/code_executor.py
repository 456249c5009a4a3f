"""The section ``code`` of a reward function ``code_executor``: how a program is run, and with which limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.config.limits import check_seconds
from tandem.types.errors import UserError


@dataclass(frozen=True, slots=True)
class CodeExecutorConfig:
    """How the program in a completion is run against the tests in the ground truth. Programs run in a sandbox without a network, which sees the interpreter,
    `/usr` and an empty folder in memory."""

    extract: Literal["block", "whole"] = "block"
    """Where the program is: in the last block between lines of three backquotes (of an unclosed one, its rest), or the `whole` completion."""
    score: Literal["all", "share"] = "all"
    """`all`: 1 if every test passes, else 0. `share`: the share of the tests that pass."""
    sandbox: Literal["auto", "bubblewrap", "gvisor"] = "auto"
    """`bubblewrap` (`bwrap`), `gvisor` (`runsc`, stronger and about ten times slower to start), or `auto`: bubblewrap where it works, else gVisor. Without a
    sandbox the run is refused."""
    accept_unsafe_execution: bool = False
    """Run programs without a sandbox where none works: they can then read, change and send whatever this account can."""
    wall_s: float = 5.0
    """Maximum seconds of a completion, with all its tests; at most `rewards.sample_deadline_s`."""
    cpu_s: int = 5
    """Maximum CPU seconds of a process: one for each input; one for all calls and assertions."""
    memory_mib: int = 512
    """Maximum address space of a process."""
    processes: int = 16
    """Maximum processes and threads of a program."""
    open_files: int = 64
    """Maximum open files of a process."""
    disk_mib: int = 64
    """Size of the folder in memory in which a program may write."""
    output_kib: int = 256
    """Maximum output of a program for one input, and of a value that a function returns."""
    parallel: int = 0
    """Programs that each reward worker runs at the same time. 0: as many as there are cores."""
    python: str = ""
    """The interpreter of programs. Empty: the one that runs Tandem, or `/usr/bin/python3` where an ordinary user cannot read it. Packages are not visible."""
    read_only: tuple[str, ...] = ()
    """Further files and folders that programs may read, at the same paths."""
    file: str = "program"
    """For `run`: the name under which the program is written."""
    compile: str = ""
    """For `run`: a command that builds the program once, such as `g++ -O1 -o program program.cpp`."""
    run: str = ""
    """The command line of another language, such as `./program` or `node program.js`; it gets each input as standard input. Empty: Python."""

    def check(self) -> None:
        check_seconds("code", self, "wall_s")
        for name in ("cpu_s", "memory_mib", "processes", "open_files", "disk_mib", "output_kib"):
            if not 1 <= getattr(self, name) <= 10**6:
                raise UserError(f"'code.{name}' of a reward function is {getattr(self, name)}; it must be from 1 to 1000000")
        if self.open_files < 16:
            raise UserError(f"'code.open_files' of a reward function is {self.open_files}; a program needs at least 16")
        if not 0 <= self.parallel <= 1024:
            raise UserError(f"'code.parallel' of a reward function is {self.parallel}; it must be from 0 to 1024")
        if self.compile and not self.run:
            raise UserError("'code.compile' of a reward function is given without 'code.run', the command that runs what it builds")
        if Path(self.file).name != self.file:
            raise UserError(f"'code.file' of a reward function is '{self.file}'; write a file name without a folder")
        for path in self.read_only:
            if not Path(path).is_absolute():
                raise UserError(f"'code.read_only' of a reward function contains '{path}'; write an absolute path")
