"""The memory of this machine that a run may use."""

from collections.abc import Iterator


def available_bytes(limit_gib: float) -> int:
    """Returns ``limit_gib`` in bytes, or if it is 0, 80 % of the memory that is free now and within the cgroup's limit."""
    if limit_gib:
        return int(limit_gib * 2**30)
    return int(0.8 * min(_meminfo("MemAvailable"), *_cgroup_limits()))


def total_bytes() -> int:
    """Returns the memory of this machine, used or not, within the cgroup's limit. Linux refuses a single allocation of more."""
    return min(_meminfo("MemTotal"), *_cgroup_limits())


def _meminfo(name: str) -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _cgroup_limits() -> Iterator[int]:
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            yield int(text)
    yield 2**63
