"""What a machine and its processes use, from files as the kernel writes them and from real processes."""

import os
import subprocess
import sys
from pathlib import Path

from tandem.runtime.machine.usage import node_usage, processes_below

TICKS = os.sysconf("SC_CLK_TCK")


def test_a_node_is_what_the_kernel_counts(tmp_path: Path) -> None:
    proc, block = tmp_path / "proc", tmp_path / "block"
    (proc / "net").mkdir(parents=True)
    for name in ("sda", "nvme0n1", "loop0", "dm-0"):
        (block / name).mkdir(parents=True)
    (proc / "stat").write_text("cpu  300 0 100 700 50 0 1 2 0 0\ncpu0 1 2 3 4\ncpu1 1 2 3 4\nintr 5\n")
    (proc / "meminfo").write_text("MemTotal:       16384 kB\nMemFree:  1 kB\nMemAvailable:    8192 kB\n")
    sectors = (("sda", 100, 10), ("sda1", 90, 9), ("nvme0n1", 8, 4), ("loop0", 7, 7), ("dm-0", 5, 5))
    (proc / "diskstats").write_text("".join(f"   8 0 {name} 1 2 {read} 4 5 6 {written} 8 9 10 11\n" for name, read, written in sectors))
    heads = "Inter-|   Receive   |  Transmit\n face |bytes packets\n"
    interfaces = (("    lo: ", 1000, 1000), ("  eth0: ", 70, 30), ("  ib0:", 5, 6))
    (proc / "net" / "dev").write_text(heads + "".join(f"{name}{received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0\n" for name, received, sent in interfaces))
    usage = node_usage(proc, block)
    assert usage.cpu_s["user"] == 300 / TICKS and usage.cpu_s["idle"] == 700 / TICKS and usage.cores == 2
    assert (usage.memory_bytes, usage.memory_available_bytes) == (2**24, 2**23)
    assert (usage.disk_read_bytes, usage.disk_written_bytes) == (512 * 108, 512 * 14), "whole disks with hardware, each once"
    assert (usage.received_bytes, usage.sent_bytes) == (75, 36), "the loopback is left out"


def test_this_machine_has_what_other_programs_say() -> None:
    import psutil

    usage = node_usage()
    assert usage.memory_bytes == psutil.virtual_memory().total and usage.cores == psutil.cpu_count()
    assert abs(usage.cpu_s["user"] - psutil.cpu_times().user) < 10


def test_processes_are_found_with_those_that_they_started_and_what_they_used() -> None:
    inner = "import time\ndata = b'1' * (80 << 20)\nwhile time.process_time() < 0.3: pass\nprint('ready', flush=True)\ninput()"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    with subprocess.Popen([sys.executable, "-c", outer], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        parent, child = processes_below(process.pid)
        assert parent.pid == process.pid and child.name.startswith("python")
        assert child.cpu_s >= 0.29 and child.resident_bytes > 80 << 20 and child.threads >= 1 and parent.resident_bytes < 60 << 20
        assert child.pid in {each.pid for each in processes_below(os.getpid())}
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait(timeout=60)
    assert processes_below(process.pid) == []
