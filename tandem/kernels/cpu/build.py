"""Builds the C++ kernels on first use and caches them.

A library is named by its inputs: the sources, the compiler's version and the instruction set. Its file ends with the SHA-256 of the rest,
because loading a damaged library would crash the process instead of raising. Builders write to a directory of their own and rename the
result into place, so any number may build at once, on machines that share the directory; on one machine, where that would take each of them
as many times as long, one builds and the others wait for it.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tandem.runtime.process.temporary import temporary_folder
from tandem.types import RunError, UserError

SOURCES = Path(__file__).parent / "csrc"
FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno",
    "-ffp-contract=off",  # a multiply-add is fused where the source says so and nowhere else
)  # fmt: skip
DIGEST_BYTES = hashlib.sha256().digest_size


def default_directory() -> Path:
    return Path.home() / ".cache" / "tandem" / "kernels"


def built_library(compiler: str, directory: Path) -> Path:
    """Returns the built library. Raises ``UserError`` if it cannot be built on this machine, and ``RunError`` if the compiler was killed twice."""
    program = shutil.which(compiler)
    if program is None:
        raise UserError(f"kernels cpu: no compiler {compiler!r} on this machine; install g++ or use kernels reference")
    path = directory / f"kernels-{_identity(program)}.so"
    if not is_intact(path):
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with _one_builder(directory):
                if not is_intact(path):
                    with temporary_folder(directory, "building") as scratch:
                        built = _build(program, scratch)
                        built.replace(path)
        except OSError as error:
            reason = f"cannot write to {directory} ({error.strerror})"
            raise UserError(f"kernels cpu: {reason}; make it writable, or use kernels reference") from error
    return path


@contextmanager
def _one_builder(directory: Path) -> Iterator[None]:
    """Waits until no other process of this machine builds in ``directory``; one that is killed no longer does."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_intact(path: Path) -> bool:
    """Returns whether the library exists and ends with its own digest."""
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return len(data) > DIGEST_BYTES and hashlib.sha256(data[:-DIGEST_BYTES]).digest() == data[-DIGEST_BYTES:]


def _identity(program: str) -> str:
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    digest.update(_run([program, "--version"]).encode())
    digest.update(_run([program, "-march=native", "-Q", "--help=target", "-S", "-o", os.devnull]).encode())
    return digest.hexdigest()[:32]


def _build(program: str, scratch: Path) -> Path:
    def compile_one(source: Path) -> str:
        target = scratch / f"{source.stem}.o"
        _run([program, *FLAGS, "-w", "-c", str(source), "-o", str(target)], scratch)
        return str(target)

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compile_one, sorted(SOURCES.glob("*.cpp"))))
    built = scratch / "kernels.so"
    _run([program, "-shared", "-fopenmp", *objects, "-o", str(built)], scratch)
    with built.open("ab") as file:
        file.write(hashlib.sha256(built.read_bytes()).digest())
        file.flush()
        os.fsync(file.fileno())
    return built


def _run(command: list[str], scratch: Path | None = None) -> str:
    """Returns what ``command`` prints. ``scratch``: for its temporary files, which it would leave behind where it is killed. One that is killed is
    run once more: its death says nothing about the compiler."""
    # What a compiler prints depends on the language and, of its options, on the width of the terminal, for neither of which a library is another one.
    environment = {**os.environ, "LC_ALL": "C", "COLUMNS": "80"} | ({} if scratch is None else {"TMPDIR": str(scratch)})
    name = Path(command[0]).name
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        if done.returncode == 0:
            return done.stdout
        lines = done.stderr.splitlines() or ["no message"]
        reason = next((line for line in lines if "error" in line), lines[0]).strip()
        # The compiler's driver reports so that a program it had started was killed.
        if done.returncode > 0 and "signal terminated program" not in done.stderr:
            raise UserError(f"kernels cpu: {name} failed ({reason}); repair the compiler or use kernels reference")
    raise RunError(f"kernels cpu: {name} was killed twice ({reason}); free memory, or use kernels reference")
