"""Machines of their own on this one: network namespaces on a bridge, each with its own shared memory. Needs root."""

import contextlib
import functools
import itertools
import os
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

_NUMBERS = itertools.count()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@functools.cache
def why_not() -> str:
    """Returns why namespaces cannot be made here, in words; empty: they can."""
    name = f"tdm-try-{os.getpid()}"
    try:
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "exec", name, "unshare", "--mount", "true")
        _run("ip", "netns", "del", name)
        probe = f"tdp{os.getpid()}"[:15]
        _run("ip", "link", "add", probe, "type", "bridge")
        _run("ip", "link", "del", probe)
    except FileNotFoundError:
        return "ip or unshare is not installed (Debian: iproute2, util-linux), so pods in network namespaces are NOT tested"
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted here ({error.stderr.strip()}), so pods in network namespaces are NOT tested"
    return ""


@dataclass
class Host:
    """A namespace with ``addresses``, of which connections leave from the first one. ``link``: the end of its wire at the bridge. ``hidden``: a folder that
    is empty there."""

    name: str
    addresses: tuple[str, ...]
    link: str
    shm_mib: int = 48
    hidden: str = ""

    @property
    def address(self) -> str:
        return self.addresses[0]

    def inside(self, *command: str) -> list[str]:
        """Returns the command that runs ``command`` there, with a /dev/shm of its own."""
        hide = f"mount -t tmpfs tmpfs {self.hidden} && " if self.hidden else ""
        mount = f'{hide}mount -t tmpfs -o size={self.shm_mib}m tmpfs /dev/shm && exec "$@"'
        return ["ip", "netns", "exec", self.name, "unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh", *command]

    def cut(self, *others: str) -> None:
        """Nothing that is sent from here reaches the addresses ``others`` any more. Nobody is told."""
        for other in others:
            self._ip("route", "add", "blackhole", f"{other}/32")

    def heal(self, *others: str) -> None:
        for other in others:
            self._ip("route", "del", "blackhole", f"{other}/32")

    def plug(self, is_up: bool) -> None:
        """Pulls the wire, or plugs it in."""
        _run("ip", "link", "set", self.link, "up" if is_up else "down")

    def processes(self) -> list[int]:
        """Returns the ids of all that runs there."""
        done = subprocess.run(["ip", "netns", "pids", self.name], check=True, capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    def signal(self, number: int) -> set[int]:
        """Sends a signal to all that runs there, also to what begins meanwhile. Returns the ids."""
        sent = set[int]()
        while new := set(self.processes()) - sent:
            for process in new:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            sent |= new
        return sent

    def pause(self, seconds: float) -> None:
        """The machine stands still for a while: every process, the daemons of schedulers too."""
        assert self.signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.signal(signal.SIGCONT)

    def fill_disk(self, process: int) -> None:
        """Leaves no byte in the folder ``hidden``, as ``process`` there sees it."""
        disk = Path(f"/proc/{process}/root{self.hidden}")
        sizes = os.statvfs(disk)
        size = max(1 << 24, (sizes.f_blocks - sizes.f_bfree) * sizes.f_frsize + (1 << 20))
        subprocess.run(["nsenter", f"--target={process}", "--mount", "mount", "-o", f"remount,size={size}", self.hidden], check=True)
        filled = subprocess.run(["dd", "if=/dev/zero", f"of={disk}/fill", "bs=1M"], capture_output=True, text=True)
        assert "No space left" in filled.stderr and os.statvfs(disk).f_bavail == 0

    def empty_disk(self, process: int) -> None:
        """Makes room again."""
        Path(f"/proc/{process}/root{self.hidden}/fill").unlink()

    def slow_down(self, kbit_s: int) -> None:
        """Everything that leaves here goes through at ``kbit_s``; 0: as fast as it can."""
        if kbit_s:
            self._tc("add", "dev", "eth0", "root", "tbf", "rate", f"{kbit_s}kbit", "burst", "8kb", "latency", "5s")
        else:
            self._tc("del", "dev", "eth0", "root")

    def _ip(self, *arguments: str) -> None:
        _run("ip", "-n", self.name, *arguments)

    def _tc(self, *arguments: str) -> None:
        _run("tc", "-n", self.name, "qdisc", *arguments)


@dataclass
class Network:
    """``hosts`` on one bridge, which this machine reaches as well. Removed by ``close``."""

    hosts: dict[str, Host] = field(default_factory=dict)

    def __post_init__(self) -> None:
        number = next(_NUMBERS)
        self._id = f"{os.getpid() % 100000}{'abcdefghijklmnop'[number % 16]}"
        self._bridge = f"tb{self._id}"
        # Runs beside each other have networks of their own.
        self._subnet = f"10.{64 + os.getpid() % 128}.{(os.getpid() // 128 + number) % 256}"
        _run("ip", "link", "add", self._bridge, "type", "bridge")
        _run("ip", "address", "add", f"{self._subnet}.254/24", "dev", self._bridge)
        _run("ip", "link", "set", self._bridge, "up")

    def add(self, name: str, *places: int) -> Host:
        """Adds a host with the last numbers ``places`` of its addresses."""
        host = Host(f"td{self._id}-{name}", tuple(f"{self._subnet}.{place}" for place in places), f"tv{self._id}{len(self.hosts)}")
        _run("ip", "netns", "add", host.name)
        self.hosts[name] = host
        _run("ip", "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _run("ip", "link", "set", host.link, "master", self._bridge, "up")
        for address in host.addresses:
            host._ip("address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            host._ip("link", "set", device, "up")
        return host

    def close(self) -> None:
        for host in self.hosts.values():
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            subprocess.run(["ip", "link", "del", host.link], capture_output=True)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True)
