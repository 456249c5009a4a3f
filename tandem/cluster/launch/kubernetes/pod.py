"""What the further pods of a JobSet run: ``python -m tandem.cluster.launch.kubernetes.pod RUN``, a pod that joins the run wherever its controller is.

When the controller is replaced, the pod joins it again, so it does not end with the run: the JobSet ends it. SIGTERM lets it leave after its iteration, with
exit status 75. The keeper of this node's checkpoints belongs to this process, so that the next controller finds what it has.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from tandem.cluster.launch.job import SAVED, read_job
from tandem.cluster.launch.kubernetes.in_pod import (
    ADDRESS,
    CALLS_PORT,
    CERTIFICATES,
    NAME,
    SECRETS,
    Meeting,
    private_secrets,
    read_meeting,
    tls_overrides,
)
from tandem.cluster.launch.node_keeper import NodeKeeper, keeps_checkpoints
from tandem.cluster.launch.node_pod import node_pod
from tandem.cluster.launch.record import CREDENTIAL, PASSWORD
from tandem.config.recipe import load_config
from tandem.runtime.process.processes import terminate
from tandem.runtime.process.temporary import choose_temporary_folder, temporary_folder
from tandem.types import RunError, UserError

_LOOK_S = 1.0
_REFUSED = 2
_LEAVES_S = 60.0


class JoiningPod:
    """The pod of the run in ``directory`` on this node. ``mounted`` and ``certificates``: the folders of its Secrets."""

    def __init__(self, directory: Path, mounted: Path, certificates: Path) -> None:
        self.directory, self._mounted, self._certificates = directory, mounted, certificates
        self._stopped = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Joins the run again and again, until this process is asked to end or the pod's process fails. Returns the exit status."""
        last: Meeting | None = None
        with contextlib.ExitStack() as stack:
            files = private_secrets(stack.enter_context(temporary_folder(prefix="tandem-secrets")), self._mounted)
            own = [f"--pods.credential_file={files[CREDENTIAL]}", f"--pods.port={CALLS_PORT}", *tls_overrides(self._certificates)]
            keeper = stack.enter_context(self._keeping(own))
            while not self._stopped.is_set():
                meeting = read_meeting(self.directory)
                if meeting is None or meeting == last:
                    self._stopped.wait(_LOOK_S)
                    continue
                password = [f"--coordination.password_file={files[PASSWORD]}"] if meeting.overrides else []
                status = self._join(meeting, [*meeting.overrides, *password, *own], keeper)
                if status not in (0, _REFUSED):
                    return status
                # It was released, or refused for good (another version of Tandem): until there is another controller.
                last = meeting
        return SAVED

    @contextlib.contextmanager
    def _keeping(self, own: list[str]) -> Iterator[NodeKeeper | None]:
        """Yields the keeper of this node, ``None`` without checkpoints in memory."""
        record, _ = read_job(self.directory)
        recipe = load_config(self.directory / "config.yaml", [*record.overrides, *own])
        if not keeps_checkpoints(recipe):
            yield None
            return
        with contextlib.closing(NodeKeeper(self.directory, recipe, os.environ[NAME], os.environ[ADDRESS])) as keeper:
            yield keeper

    def _join(self, meeting: Meeting, overrides: list[str], keeper: NodeKeeper | None) -> int:
        """Returns the exit status of the pod's process; 0 if it was ended here, because the controller is another one now or the node is wanted back."""
        path = keeper.path if keeper is not None and keeper.look() else None
        with node_pod(self.directory, meeting.host, os.environ[NAME], overrides, keeper=path) as process:
            while process.poll() is None:
                if keeper is not None:
                    keeper.look()
                if self._stopped.is_set():
                    process.send_signal(signal.SIGTERM)
                    process.wait()
                    return 0
                if read_meeting(self.directory) != meeting:
                    terminate(process, _LEAVES_S)
                    return 0
                _wait(process)
            status = process.wait()
        return status if status >= 0 else 128 - status

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopped.set()


def _wait(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(_LOOK_S)
    except subprocess.TimeoutExpired:
        return


def main(arguments: list[str], mounted: Path = SECRETS, certificates: Path = CERTIFICATES) -> int:
    try:
        choose_temporary_folder()
        if not os.environ.get(ADDRESS) or not os.environ.get(NAME):
            raise UserError(f"{ADDRESS} and {NAME} are not set; this is what a pod of a JobSet runs")
        return JoiningPod(Path(arguments[0]), mounted, certificates).run()
    except (UserError, RunError) as error:
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
