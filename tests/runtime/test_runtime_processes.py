import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from tandem.runtime.process.processes import (
    Threads,
    available_cores,
    describe_exit,
    kill,
    kill_group,
    memory_of,
    spawn,
    terminate,
    wait,
)  # fmt: skip


def gone(pid: int, deadline_s: float = 10.0) -> bool:
    ends = time.monotonic() + deadline_s
    while time.monotonic() < ends:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


PARENT = """
    import sys, threading, time
    from tandem.runtime.process.processes import Threads, spawn
    from_thread = sys.argv[1] == "thread"
    def start():
        global child
        child = spawn(None, ["60"], program="sleep", threads=Threads(1), new_session=True)
    if from_thread:
        thread = threading.Thread(target=start)
        thread.start()
        thread.join()
        time.sleep(0.3)
    else:
        start()
    print(child.pid, child.poll(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_a_child_lives_with_its_parent_and_dies_with_its_kill_9(where):
    command = [sys.executable, "-c", textwrap.dedent(PARENT), where]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        pid, status = parent.stdout.readline().split()
        # The thread that started the child has ended; the child must still be alive.
        assert status == b"None"
        ends = time.monotonic() + 10
        while time.monotonic() < ends and b"sleep" not in Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0"):
            time.sleep(0.01)
        os.kill(int(pid), 0)
        parent.kill()
    assert gone(int(pid))


def test_a_child_whose_parent_is_gone_before_it_starts_ends_itself():
    done = subprocess.run([sys.executable, "-m", "tandem.runtime.process.child", "1", "exec", "sleep", "60"], timeout=20, check=False)
    assert done.returncode == -signal.SIGKILL


def test_a_module_is_run_with_its_arguments_and_threads():
    code = "import os, sys; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.environ['GOMP_SPINCOUNT'])"
    child = spawn(None, ["-c", code, "a b"], program=sys.executable, threads=Threads(3, 77), capture=True)
    assert child.stdout.read() == b"['a b'] 3 77\n"
    child.stdout.close()
    assert child.wait() == 0
    module = spawn("json.tool", ["--help"], threads=Threads(1), capture=True)
    assert b"usage:" in module.stdout.read()
    module.stdout.close()
    assert module.wait() == 0


def test_a_child_ends_with_its_status_output_threads_and_exit_handlers_and_is_not_torn_down(tmp_path, monkeypatch):
    (tmp_path / "ending_program.py").write_text(
        "import atexit, sys, threading, time\n"
        "class Held:\n    def __del__(self): print('torn down')\n"
        "held = Held()\n"
        "atexit.register(print, 'handler')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "print('main')\n"
        "if sys.argv[1] == 'fails': raise ValueError('why')\n"
        "sys.exit(int(sys.argv[1]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for argument, status, lines in (("3", 3, []), ("0", 0, []), ("fails", 1, ["torn down"])):
        output = tmp_path / argument
        child = spawn("ending_program", [argument], threads=Threads(1), output=output)
        assert child.wait() == status
        said = output.read_text().splitlines()
        assert [line for line in said if line in ("main", "thread", "handler", "torn down")] == ["main", "thread", "handler", *lines]
        assert ("ValueError: why" in said) is (argument == "fails")


def test_a_program_whose_output_the_caller_has_closed_ends_with_its_status_and_says_nothing():
    program = "import sys\nfrom tandem.runtime.process.fast_exit import fast_exit\nwith fast_exit(): sys.exit(3)"
    ended = subprocess.run(["bash", "-c", '"$0" -c "$1" >&-', sys.executable, program], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (3, "")


def test_thread_counts_reach_torch():
    code = "import torch; print(torch.get_num_threads())"
    child = spawn(None, ["-c", code], program=sys.executable, threads=Threads(2), capture=True)
    assert child.stdout.read() == b"2\n"
    child.stdout.close()
    child.wait()


def test_an_ending_child_may_clean_up_and_a_stubborn_one_is_killed(tmp_path):
    stubborn = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    child = spawn(None, ["-c", stubborn], program=sys.executable, threads=Threads(1), capture=True)
    child.stdout.readline()
    assert terminate(child, grace_s=0.3) == -signal.SIGKILL
    child.stdout.close()
    willing = spawn(None, ["60"], program="sleep", threads=Threads(1))
    assert wait(willing, 0.3) is None
    assert terminate(willing, grace_s=10) == -signal.SIGTERM
    assert terminate(willing) == -signal.SIGTERM and kill(willing) == -signal.SIGTERM


def test_a_group_goes_as_a_whole_and_this_process_stays():
    code = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '60']).pid, flush=True); time.sleep(60)"
    child = spawn(None, ["-c", code], program=sys.executable, threads=Threads(1), new_session=True, capture=True)
    grandchild = int(child.stdout.readline())
    assert kill_group(child) == -signal.SIGKILL
    child.stdout.close()
    assert gone(grandchild)
    same_group = spawn(None, ["60"], program="sleep", threads=Threads(1))
    assert kill_group(same_group) == -signal.SIGKILL


def test_output_goes_to_a_file_that_is_appended_to(tmp_path):
    log = tmp_path / "child.log"
    for word in ("one", "two"):
        spawn(None, [word], program="echo", threads=Threads(1), output=log).wait()
    assert log.read_text() == "one\ntwo\n"


def test_memory_of_a_process_grows_by_what_it_touches():
    code = (
        "import mmap, sys; m = mmap.mmap(-1, 64 << 20); print(flush=True); sys.stdin.readline(); "
        "m.write(b'x' * (64 << 20)); print(flush=True); sys.stdin.readline()"
    )
    child = spawn(None, ["-c", code], program=sys.executable, threads=Threads(1), stdin=subprocess.PIPE, capture=True)
    child.stdout.readline()
    before = memory_of(child.pid)
    child.stdin.write(b"\n")
    child.stdin.flush()
    child.stdout.readline()
    after = memory_of(child.pid)
    kill(child)
    child.stdin.close()
    child.stdout.close()
    # An anonymous mapping is shared memory.
    assert after.rss_bytes - before.rss_bytes >= 64 * 2**20 <= after.shm_bytes - before.shm_bytes < 65 * 2**20
    assert after.shm_bytes < after.rss_bytes
    with pytest.raises(ProcessLookupError):
        memory_of(child.pid)


def test_an_exit_is_described_in_words():
    assert [describe_exit(status) for status in (None, 0, 3, -9, -6)] == [
        "still running", "exit status 0", "exit status 3", "killed by SIGKILL", "killed by SIGABRT",
    ]  # fmt: skip


def test_the_cores_are_those_this_process_may_use():
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_threads_that_ask_together_each_get_their_child():
    children = []

    def start():
        children.append(spawn(None, ["60"], program="sleep", threads=Threads(1)))

    threads = [threading.Thread(target=start) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len({child.pid for child in children}) == 4
    assert [kill(child) for child in children] == [-signal.SIGKILL] * 4


def test_a_log_is_cut_into_parts_before_it_fills_a_disk(tmp_path):
    code = (
        "import logging, sys; from pathlib import Path; from tandem.runtime.records import logs; logs.MAX_LOG_BYTES = 10_000; "
        "logs.setup('controller', Path(sys.argv[1])); [logging.warning('line %05d', i) for i in range(2000)]"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    parts = [tmp_path / name for name in ("controller.log.2", "controller.log.1", "controller.log")]
    assert sorted(tmp_path.iterdir()) == sorted(parts)
    lines = [json.loads(line)["message"] for part in parts for line in part.read_text().splitlines()]
    assert all(part.stat().st_size <= 10_000 for part in parts)
    assert [int(line.rsplit(" ", 1)[1]) for line in lines] == list(range(2000 - len(lines), 2000))
