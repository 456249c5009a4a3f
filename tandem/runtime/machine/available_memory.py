"""The memory of this machine that a run may use."""


def available_bytes(limit_gib: float) -> int:
    """Returns ``limit_gib`` in bytes, or if it is 0, 80 % of the memory that is free now and within the cgroup's limit."""
    if limit_gib:
        return int(limit_gib * 2**30)
    with open("/proc/meminfo", encoding="ascii") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                text = file.read().strip()
        except OSError:
            continue
        if text.isdigit():
            free = min(free, int(text))
    return int(0.8 * free)
