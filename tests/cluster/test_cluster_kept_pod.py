"""A launcher keeps the pod of a node: a process that dies is started again, and one that dies again and again is given up. Real processes."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from tandem.cluster.launch.kept_pod import KeptPod
from tandem.pod.joining_checks import has_died, process_space
from tandem.runtime.coordination.membership import Member


class Shell:
    """Begins the ``scripts`` one after the other, the last of them again and again."""

    def __init__(self, *scripts: str) -> None:
        self.scripts, self.begun = list(scripts), list[subprocess.Popen[bytes]]()

    @contextlib.contextmanager
    def start(self) -> "Iterator[subprocess.Popen[bytes]]":
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        self.begun.append(subprocess.Popen(["sh", "-c", script]))
        yield self.begun[-1]


def test_a_pod_that_dies_is_started_again_until_it_is_released() -> None:
    said, shell = list[str](), Shell("kill -9 $$", "exit 1", "exit 0")
    assert KeptPod(shell.start, said.append).run() == 0 and len(shell.begun) == 3
    assert said == ["ended (killed by SIGKILL); it starts again in 0 s", "ended (exit status 1); it starts again in 0.5 s"]
    # What is wrong with the command itself, such as another version of Tandem, stays so.
    refused = Shell("exit 2")
    assert KeptPod(refused.start, said.append).run() == 2 and len(refused.begun) == 1


def test_a_pod_that_dies_again_and_again_is_given_up() -> None:
    said, shell = list[str](), Shell("kill -9 $$")
    assert KeptPod(shell.start, said.append, most_deaths=2).run() == 137 and len(shell.begun) == 2
    assert said[-1] == "ended (killed by SIGKILL), 2 times without a minute of work in between; it is given up, and its node is lost to the run"


def test_a_pod_that_is_told_to_leave_leaves_and_is_not_started_again() -> None:
    said, shell = list[str](), Shell("while :; do sleep 0.05; done")
    pod = KeptPod(shell.start, said.append)
    thread = threading.Thread(target=pod.run)
    thread.start()
    while not shell.begun:
        time.sleep(0.01)
    pod.leave()
    thread.join(20)
    assert not thread.is_alive() and len(shell.begun) == 1 and said == []


def test_the_member_of_a_command_that_was_killed_is_told_from_one_that_lives_and_from_one_elsewhere() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    facts = {"pid": process.pid, "processes": process_space()}
    assert facts["processes"] and not has_died(Member("n2", facts, 1))
    os.kill(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert has_died(Member("n2", facts, 1)), "one that nothing has waited for yet has died too"
    process.wait()
    assert has_died(Member("n2", facts, 1))
    assert not has_died(Member("n2", {**facts, "processes": "another machine"}, 1)) and not has_died(Member("n2", {"pid": process.pid}, 1))
