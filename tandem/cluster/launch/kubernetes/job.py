"""What the first pod of a JobSet runs: ``python -m tandem.cluster.launch.kubernetes.job RUN``. It starts the run's etcd beside the run's process, says where it
is to the pods that join, passes on SIGTERM, and returns an exit status that the JobSet acts on (``tandem.cluster.launch.job``): with 75 the pod is replaced and
continues, unless the JobSet is being deleted. What it says is in the pod's log and in the run's folder, where it stays. Imports no torch.
"""

import contextlib
import os
import secrets
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tandem.cluster.launch.job import RunProcess, exit_status, read_job, store_of_run
from tandem.cluster.launch.kubernetes.in_pod import (
    ADDRESS,
    CERTIFICATES,
    METRICS_PORT,
    SECRETS,
    WEIGHTS_PORT,
    Meeting,
    private_secrets,
    tls_overrides,
    write_meeting,
)
from tandem.cluster.launch.record import CREDENTIAL, PASSWORD, Record
from tandem.config.recipe import AnyRecipe
from tandem.runtime.process.temporary import choose_temporary_folder, temporary_folder
from tandem.runtime.records.logs import setup

_PART = 1 << 16


def output_of(directory: Path, job: str) -> Path:
    """Returns the file with what the run's process tells its user, of all pods of ``job`` one after another."""
    return directory / "logs" / f"kubernetes-{job.rpartition('/')[2]}.out"


class Job:
    """The run in ``directory`` as the first pod of a JobSet. ``mounted`` and ``certificates``: the folders of its Secrets."""

    def __init__(self, directory: Path, mounted: Path, certificates: Path) -> None:
        self.directory, self._mounted, self._certificates = directory, mounted, certificates
        self._process = RunProcess(directory)
        # From the first moment on: a pod may be evicted while it starts.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self, record: Record, recipe: AnyRecipe) -> int:
        """Returns the exit status of the pod."""
        with self._beside(record, recipe) as overrides:
            return self._process.run(recipe, [*record.overrides, *overrides])

    @contextlib.contextmanager
    def _beside(self, record: Record, recipe: AnyRecipe) -> Iterator[list[str]]:
        """Inside, the run has its etcd, and the pods know where it is. Yields the new values of the controller."""
        host = os.environ[ADDRESS]
        own = [] if recipe.metrics is not None else [f"--metrics={{host: '{host}', port: {METRICS_PORT}, targets_folder: ''}}"]
        if not recipe.pods.may_join:
            yield own
            return
        with contextlib.ExitStack() as stack:
            files = private_secrets(stack.enter_context(temporary_folder(prefix="tandem-secrets")), self._mounted)
            own += [f"--pods.host={host}", f"--pods.port={WEIGHTS_PORT}", f"--pods.credential_file={files[CREDENTIAL]}", *tls_overrides(self._certificates)]
            shared = stack.enter_context(store_of_run(self.directory, record, recipe, host, self._process, _say, files[PASSWORD]))
            # Each pod has the password in a file of its own.
            told = tuple(each for each in shared if not each.startswith("--coordination.password_file="))
            write_meeting(self.directory, Meeting(secrets.token_hex(8), host, told))
            yield [*own, *shared]

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._process.stop()


def _say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def copied_output(path: Path) -> Iterator[None]:
    """Inside, what this process and its children write to standard output and error is also appended to ``path``."""
    kept = [os.dup(number) for number in (1, 2)]
    reading, writing = os.pipe()
    with path.open("ab", buffering=0) as file:

        def copy() -> None:
            while part := os.read(reading, _PART):
                os.write(kept[0], part)
                # A full volume ends the run, not its log.
                with contextlib.suppress(OSError):
                    file.write(part)

        thread = threading.Thread(target=copy)
        thread.start()
        try:
            for number in (1, 2):
                os.dup2(writing, number)
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            for number, old in zip((1, 2), kept, strict=True):
                os.dup2(old, number)
            os.close(writing)
            thread.join()
            for number in (reading, *kept):
                os.close(number)


def main(arguments: list[str], mounted: Path = SECRETS, certificates: Path = CERTIFICATES) -> int:
    directory = Path(arguments[0])
    job = Job(directory, mounted, certificates)

    def run() -> int:
        choose_temporary_folder()
        record, recipe = read_job(directory)
        setup("job", directory / "logs")
        with copied_output(output_of(directory, record.job)):
            return exit_status(lambda: job.run(record, recipe))

    return exit_status(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
