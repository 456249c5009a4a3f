"""Hostile programs in the sandboxes of the code executor: the table of ``docs/code-executor.md``. Each is run in bubblewrap by the account of the tests and, as
full proofs, in gVisor and by an ordinary user. ``benchmarks/hostile_programs.py`` writes the table of what passed."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import psutil
import pytest
from code_runs import SETTINGS, as_nobody, judged, marked, output_of

from tandem.config.code_executor import CodeExecutorConfig
from tandem.rl.rewards.code.sandbox import find_sandbox
from tandem.types import UserError

SECRET = "the-secret-of-the-tests"
IS_ROOT = os.geteuid() == 0


class Cell(NamedTuple):
    """A column of the table: a sandbox, and whether an ordinary user runs it or the account of the tests."""

    sandbox: str
    as_user: bool

    def settings(self, **changes: Any) -> CodeExecutorConfig:
        return replace(SETTINGS, **{"sandbox": self.sandbox, "wall_s": 10.0 if self.sandbox == "bubblewrap" else 30.0, **changes})

    def call(self, function: Callable[[], Any]) -> Any:
        return as_nobody(function) if self.as_user else function()


USER = pytest.mark.skipif(not IS_ROOT, reason="the tests are run by an ordinary user")
CELLS = [
    pytest.param(Cell("bubblewrap", False), id="bubblewrap"),
    pytest.param(Cell("bubblewrap", True), id="bubblewrap-user", marks=[pytest.mark.full, USER]),
    pytest.param(Cell("gvisor", False), id="gvisor", marks=pytest.mark.full),
    pytest.param(Cell("gvisor", True), id="gvisor-user", marks=[pytest.mark.full, USER]),
]


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> Cell:
    chosen: Cell = request.param
    try:
        chosen.call(lambda: find_sandbox(chosen.settings()).name)
    except (UserError, AssertionError) as error:
        pytest.skip(f"{chosen.sandbox} does not work here, so the code executor is NOT tested in it: {error}")
    return chosen


@pytest.fixture
def run(cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["Run"]:
    """Runs a program and checks that nothing of it is left. ``tmp_path`` is made before the folder of temporary files is another one."""
    mark = uuid4().hex
    with tempfile.TemporaryDirectory(suffix=mark) as folder:
        # On the command lines of gVisor's processes is the folder of the container.
        Path(folder).chmod(0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)

        def ran(program: str, **changes: Any) -> tuple[str, str]:
            settings = cell.settings(**changes)
            output, how = cell.call(lambda: output_of(textwrap.dedent(program), marked(find_sandbox(settings), mark), settings))
            return output, how

        yield ran
        ends = time.monotonic() + 60
        while left := [process.pid for process in psutil.process_iter() if any(mark in part for part in _command(process))]:
            assert time.monotonic() < ends, f"processes of the program are left: {left}"
            time.sleep(0.02)
        assert not [*Path(folder).iterdir()], "files of the sandbox are left"


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


Run = Callable[..., tuple[str, str]]


def test_a_fork_bomb_ends_at_its_limit_of_processes(run: Run) -> None:
    output, _ = run("""
        import os, time
        children = 0
        try:
            while True:
                if os.fork() == 0:
                    time.sleep(100)
                children += 1
        except OSError as error:
            print(children, type(error).__name__)
    """)
    children, error = output.split()
    assert error == "BlockingIOError" and 1 <= int(children) < SETTINGS.processes
    _, how = run("import os\nwhile True:\n    os.fork()")
    assert how


def test_a_thread_bomb_ends_at_the_same_limit(run: Run) -> None:
    output, _ = run("""
        import threading, time
        count = 0
        try:
            while True:
                threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
                count += 1
        except RuntimeError:
            print(count)
    """)
    assert 1 <= int(output) < SETTINGS.processes


def test_a_memory_bomb_gets_no_memory(run: Run) -> None:
    output, _ = run("""
        blocks = []
        try:
            while True:
                blocks.append(bytearray(2**20))
        except MemoryError:
            count = len(blocks)
            blocks.clear()
            print(count)
    """, cpu_s=60, wall_s=300.0)
    assert 1 <= int(output) <= SETTINGS.memory_mib


def test_a_zip_of_death_gets_no_memory(run: Run) -> None:
    output, _ = run("""
        import zlib
        packer = zlib.compressobj()
        bomb = b"".join(packer.compress(bytes(2**20)) for _ in range(320)) + packer.flush()
        try:
            print(len(zlib.decompress(bomb)))
        except MemoryError:
            print("no memory for", len(bomb) < 2**21)
    """, cpu_s=60, wall_s=300.0)
    assert output == "no memory for True\n"


def test_the_disk_is_as_large_as_its_limit_and_nothing_else_can_be_written(run: Run, cell: Cell) -> None:
    output, _ = run("""
        import os
        for folder in ("/tmp", "/dev/shm", "/", "/dev", "/usr", "/etc", "/proc", "/var", "/root", "/home"):
            written = 0
            try:
                for number in range(64):
                    with open(f"{folder}/{number}", "wb", buffering=0) as file:
                        written += file.write(bytes(2**20))
            except OSError:
                pass
            if written:
                print(folder, written // 2**20)
    """)
    writable = ("/tmp", "/dev/shm") if cell.sandbox == "bubblewrap" else ("/tmp",)
    assert dict(line.split() for line in output.splitlines()) == {folder: str(SETTINGS.disk_mib) for folder in writable}


def test_no_secret_of_the_machine_can_be_read(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text(SECRET)
    for folder in (file, *file.parents):
        if folder.stat().st_uid == os.geteuid() and str(folder) != "/":
            # The folder for temporary files stays one that all accounts may write to.
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) | 0o755)
    monkeypatch.setenv("TANDEM_SECRET", SECRET)
    output, _ = run(f"""
        import glob, os
        names = ["{file}", "/etc/passwd", "/etc/shadow", "/etc/hosts", "/root/.ssh", "{Path.cwd()}", *glob.glob("/proc/*/environ"), *glob.glob("/proc/*/cwd")]
        readable = []
        for name in names:
            try:
                text = os.listdir(name) if os.path.isdir(name) else open(name, errors="replace").read()
            except OSError:
                continue
            readable.append(f"{{name}}: {{text}}")
        print(dict(os.environ), readable, os.listdir("/"), len(glob.glob("/proc/[0-9]*")))
    """)
    assert SECRET not in output and "passwd" not in output and "root:" not in output
    # The folder of the interpreter is visible, with the names of those that it is in.
    hidden = {"home", "root", "work"} - set(Path(sys.base_prefix).parts)
    assert not [name for name in hidden if repr(name) in output]
    assert int(output.split()[-1]) <= 4, "it sees its own processes alone"


def test_there_is_no_network_not_even_to_this_machine(run: Run) -> None:
    abstract = f"\0tandem-{uuid4().hex}"
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(type=socket.SOCK_DGRAM) as udp, socket.socket(socket.AF_UNIX) as unix:
        udp.bind(("127.0.0.1", 0))
        unix.bind(abstract)
        unix.listen()
        for one in (tcp, udp, unix):
            one.setblocking(False)
        output, how = run(f"""
            import socket
            def attempt(family, kind, address):
                try:
                    with socket.socket(family, kind) as one:
                        one.settimeout(0.2)
                        one.connect(address)
                        one.send(b"hello")
                    return "connected"
                except OSError as error:
                    return type(error).__name__
            print(attempt(socket.AF_INET, socket.SOCK_STREAM, {tcp.getsockname()!r}))
            attempt(socket.AF_INET, socket.SOCK_DGRAM, {udp.getsockname()!r})
            print(attempt(socket.AF_UNIX, socket.SOCK_STREAM, {abstract!r}))
            print(attempt(socket.AF_INET, socket.SOCK_STREAM, ("10.0.0.1", 80)))
            print([name for _, name in socket.if_nameindex()])
        """)
        assert how == "" and "connected" not in output and output.splitlines()[-1] == "['lo']"
        with pytest.raises(BlockingIOError):
            tcp.accept()
        with pytest.raises(BlockingIOError):
            udp.recv(16)
        with pytest.raises(BlockingIOError):
            unix.accept()


@pytest.mark.parametrize("target", ["os.getppid()", "-1", "1"])
def test_killing_the_parent_ends_the_program_alone(run: Run, target: str) -> None:
    run(f"import os\nos.kill({target}, 9)\nprint('still here')")
    assert run("print('the next one')") == ("the next one\n", "")


def test_other_processes_can_neither_be_traced_nor_written_nor_signalled(run: Run) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    try:
        output, _ = run(f"""
            import ctypes, os, signal
            libc = ctypes.CDLL(None, use_errno=True)
            tried = []
            for pid in ({victim.pid}, {os.getpid()}):
                tried.append(libc.ptrace(16, pid, 0, 0))  # attach
                for name in ("mem", "environ", "root", "fd", "ns/net"):
                    tried.append(int(os.path.exists(f"/proc/{{pid}}/{{name}}")))
                try:
                    os.kill(pid, signal.SIGKILL)
                    tried.append("killed")
                except OSError:
                    pass
            print(tried)
        """)
        assert output.strip() == str([-1, 0, 0, 0, 0, 0] * 2)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_no_right_can_be_had_back(run: Run, cell: Cell) -> None:
    namespaces = "print([libc.unshare(flag) for flag in (0x10000000, 0x00020000, 0x40000000)])  # user, mount and network namespaces"
    output, _ = run(f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        {namespaces if cell.sandbox == "bubblewrap" else "print([-1, -1, -1])  # gVisor gives namespaces of its own kernel, see below"}
        print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.chroot(b"/tmp"), libc.umount2(b"/usr", 2), libc.sethostname(b"x", 1))
        try:
            os.setuid(1)
            print("setuid")
        except OSError:
            pass
        print([line.split()[1] for line in open("/proc/self/status") if line.startswith(("CapEff", "CapPrm", "CapBnd", "NoNewPrivs"))])
        for name in ("/dev/mem", "/dev/kmem", "/dev/sda", "/dev/vda", "/dev/kvm", "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern"):
            try:
                open(name, "r+b")
                print(name)
            except OSError:
                pass
    """)
    # gVisor does not list NoNewPrivs.
    flags = ["0000000000000000"] * 3 + (["1"] if cell.sandbox == "bubblewrap" else [])
    assert output.splitlines() == ["[-1, -1, -1]", "-1 -1 -1 -1", str(flags)]


def test_a_namespace_of_its_own_shows_no_more_of_the_machine(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    output, _ = run(f"""
        import ctypes, os
        libc = ctypes.CDLL(None, use_errno=True)
        libc.unshare(0x10000000 | 0x00020000)
        libc.sethostname(b"changed", 7)
        libc.mount(b"/", b"/tmp", None, 0x1000, None)
        libc.mount(b"none", b"/usr", None, 0x20, None)
        for name in ("{secret}", "/etc/passwd", "/tmp/etc/passwd", "/tmp{secret}"):
            if os.path.exists(name):
                print(name)
        try:
            open("/usr/changed", "w")
            print("written")
        except OSError:
            pass
    """)
    assert output == "" and socket.gethostname() != "changed" and not Path("/usr/changed").exists()


def test_links_lead_nowhere(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "kept"
    file.write_text("as it was")
    file.chmod(0o666)
    output, _ = run(f"""
        import os
        for place, target in enumerate(("{file}", "/etc/shadow", "/proc/1/root{file}", "/../..{file}")):
            os.symlink(target, f"/tmp/link-{{place}}")
            try:
                with open(f"/tmp/link-{{place}}", "r+") as opened:
                    opened.write("changed")
                    print("opened", target)
            except OSError:
                pass
            try:
                os.link(target, f"/tmp/hard-{{place}}")
                print("linked", target)
            except OSError:
                pass
    """)
    assert output == "" and file.read_text() == "as it was"


def test_a_flood_of_output_is_cut(run: Run) -> None:
    before = psutil.Process().memory_info().rss
    output, how = run("while True:\n    print('x' * 10000)")
    assert how and len(output) <= SETTINGS.output_kib * 1024
    assert psutil.Process().memory_info().rss - before < 64 * 2**20


def test_ignored_signals_do_not_prolong_it(run: Run, cell: Cell) -> None:
    ignore = "import signal, time, contextlib\nfor number in range(1, 65):\n    with contextlib.suppress(OSError, ValueError):\n"
    ignore += "        signal.signal(number, signal.SIG_IGN)\n"
    assert run(f"{ignore}while True:\n    pass")[1] == "killed by SIGKILL", "its CPU time"
    # Enough for the sandbox to start on a busy machine.
    wall_s = 3.0 if cell.sandbox == "bubblewrap" else 7.0
    assert run(f"{ignore}while True:\n    time.sleep(1)", wall_s=wall_s)[1] == f"it ran longer than {wall_s:g} s"


def test_a_daemon_does_not_outlive_the_program(run: Run) -> None:
    output, how = run("""
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.closerange(0, 3)
                time.sleep(1000)
            os._exit(0)
        print("done")
    """)
    assert (output, how) == ("done\n", "")


WRITES = """
    import os
    def f(x):
        for descriptor in range(3, 64):
            try:
                os.write(descriptor, ANSWER)
            except OSError:
                pass
"""
FORGERIES = {
    "equality": """
    class Anything(int):
        def __eq__(self, other): return True
        def __hash__(self): return 0
    def f(x): return Anything()
    """,
    "an early end": "import sys\nsys.exit(0)\ndef f(x): return 0",
    "the real exit": "import os\ndef f(x): os._exit(0)",
    "builtins": """
    import builtins
    builtins.AssertionError = KeyError
    builtins.compile = builtins.exec = builtins.eval = lambda *_: None
    def f(x): raise SystemExit(0)
    """,
    "answers of its own": WRITES.replace("ANSWER", repr(b'{"passed":true}\n{"finished":true}\n{"value":true}\n' * 99)),
    "nested answers": WRITES.replace("ANSWER", r"b'[' * 60000 + b'\n'"),
    "frames and objects": """
    import gc, sys
    def f(x):
        for each in gc.get_objects():
            if isinstance(each, dict) and 'tests' in each:
                return 3
        return sys._getframe(1).f_locals.get('wanted', 0)
    """,
    "files of tests": """
    import os
    for folder in ('/tmp', '.', os.path.expanduser('~')):
        for name in os.listdir(folder):
            os.remove(f'{folder}/{name}')
        open(f'{folder}/test.py', 'w').close()
    def f(x): return 0
    """,
}


TRUTHS: dict[str, Any] = {"assertion": ["assert f(1) == 3"], "call": {"fn_name": "f", "inputs": [[1]], "outputs": [3]}}


@pytest.mark.parametrize("program", FORGERIES.values(), ids=FORGERIES)
@pytest.mark.parametrize("truth", TRUTHS.values(), ids=TRUTHS)
def test_no_program_can_pass_by_changing_the_tests(program: str, truth: Any, cell: Cell) -> None:
    judgement = cell.call(lambda: asdict(judged(textwrap.dedent(program), truth, cell.settings())))
    assert judgement["value"] in (0.0, -1.0) and judgement["correct"] is False


def test_the_right_program_passes_the_same_tests(cell: Cell) -> None:
    assert cell.call(lambda: [judged("def f(x): return 3", truth, cell.settings()).value for truth in TRUTHS.values()]) == [1.0, 1.0]
